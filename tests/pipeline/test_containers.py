"""What may be open_source as a video, how much of it, and which of its streams."""

import ast
import io
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition
from made_videos import X264, encode, read_number
from PIL import Image

from figures.clips import count_frames
from pipeline.decoding import containers
from pipeline.decoding.containers import main_stream, open_video
from pipeline.decoding.sources import decode_frames
from pipeline.decoding.video import Video, is_plain
from pipeline.video_error import VideoError
from shard_tools.encoding.picture import UnusableError
from shard_tools.encoding.source import open_source, read_frames
from shard_tools.plan import probe_duration

ROOT = Path(__file__).parents[2]
OTHERS = {
    "a stream from the network": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    b"m=video 45678 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    "a list of files": b"ffconcat version 1.0\nfile local.mp4\n",
    "a playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nlocal.mp4\n#EXT-X-ENDLIST\n",
    "a manifest": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period>'
    b'<AdaptationSet><Representation id="0" bandwidth="1"><BaseURL>local.mp4</BaseURL></Representation>'
    b"</AdaptationSet></Period></MPD>",
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("extension", ["mp4", "m3u8", "sdp"])
def test_what_names_other_places_is_not_followed(
    kind: str, extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local.mp4").write_bytes(encode(3))
    path = tmp_path / f"text.{extension}"
    path.write_bytes(OTHERS[kind])
    monkeypatch.chdir(tmp_path)
    ways: list[Callable[[], object]] = [
        lambda: open_video(OTHERS[kind]),
        lambda: open_video(path),
        lambda: open_video(io.BytesIO(OTHERS[kind])),
        lambda: Video(OTHERS[kind]),
        lambda: open_source(path).__enter__(),
    ]
    for way in ways:
        with pytest.raises((av.error.FFmpegError, VideoError, UnusableError)):
            way()
    assert probe_duration(str(path)) == 0


def png_in_mov(side: int) -> bytes:
    """A video of black pictures that are larger than its header says."""
    png, file = io.BytesIO(), io.BytesIO()
    Image.new("1", (side, side)).save(png, format="PNG")
    with av.open(file, "w", format="mov") as output:
        stream = output.add_stream("png", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "monob"
        for number in range(2):
            packet = av.Packet(png.getvalue())
            packet.pts = packet.dts = number
            packet.time_base, packet.stream, packet.is_keyframe = Fraction(1, 8), stream, True
            output.mux(packet)
    return file.getvalue()


def test_a_picture_of_gigabytes_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "huge.mov"
    path.write_bytes(png_in_mov(12000))
    assert path.stat().st_size < 100_000
    for source in (path, path.read_bytes()):
        with pytest.raises(VideoError):
            decode_frames(source, [0])
        with pytest.raises(VideoError):
            count_frames(source)
    with open_source(path) as (container, stream), pytest.raises(UnusableError, match="frame 0 cannot be decoded"):
        next(read_frames(container, stream))
    path.write_bytes(png_in_mov(1200))
    assert decode_frames(path, [1]).shape == (1, 1200, 1200, 3)


@pytest.mark.parametrize("kind", [{}, {"container": "mpegts"}, {"codec": "mpeg4", "container": "avi"}])
def test_the_bound_holds_in_every_container(kind: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(4, **kind)  # type: ignore[arg-type]
    assert len(decode_frames(data, [0, 3])) == 2
    monkeypatch.setattr(containers, "MAX_PIXELS", 64 * 48 - 1)
    with pytest.raises(VideoError):
        decode_frames(data, [0])


def several(lengths: dict[int, int], default: int | None = None, container: str = "mp4") -> bytes:
    """A file of several streams, without sound; key: the first frame's number, value: how many frames."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        streams = []
        for place, (first, count) in enumerate(lengths.items()):
            with av.open(io.BytesIO(encode(count, first=first, options=X264))) as source:
                stream = output.add_stream_from_template(source.streams.video[0])
                if default is not None:
                    stream.disposition = Disposition.default if place == default else Disposition(0)
                streams.append((stream, [packet for packet in source.demux(video=0) if packet.size]))
        for stream, packets in streams:
            for packet in packets:
                packet.stream = stream
                output.mux(packet)
    return file.getvalue()


def with_cover_first() -> bytes:
    """An MP4 whose first video stream is the picture on its cover."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output, av.open(io.BytesIO(encode(12, first=5))) as source:
        video = output.add_stream_from_template(source.streams.video[0])
        cover = output.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 32, 32, "yuvj420p"
        cover.disposition = Disposition.attached_pic
        picture = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 255, np.uint8)).reformat(format="yuvj420p")
        for packet in [*cover.encode(picture), *cover.encode(None)]:
            output.mux(packet)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = video
                output.mux(packet)
    data = file.getvalue()
    start, _ = box(data, 0, b"moov")
    at, _ = box(data, start + 8, b"trak")
    tags, size = box(data, start + 8, b"udta")  # of the same size in another order: what moov points at stays
    return data[:at] + data[tags : tags + size] + data[at:tags] + data[tags + size :]


def box(data: bytes, start: int, name: bytes) -> tuple[int, int]:
    """(offset, size) of the first box of a name at or behind `start`."""
    while data[start + 4 : start + 8] != name:
        start += struct.unpack(">I", data[start : start + 4])[0]
    return start, struct.unpack(">I", data[start : start + 4])[0]


@pytest.mark.parametrize(
    ("data", "first", "count"),
    [
        (with_cover_first, 5, 12),
        (lambda: several({0: 4, 9: 8}, default=1), 9, 8),
        (lambda: several({0: 8, 9: 4}, default=1), 9, 4),
        (lambda: several({0: 4, 9: 8}), 0, 4),  # FFmpeg marks the first
        (lambda: several({0: 4, 9: 8}, container="mpegts"), 9, 8),  # marks none
    ],
    ids=["not the cover", "the default one", "the default one, if shorter", "the first", "the longest"],
)
def test_one_rule_says_which_stream_is_the_video(
    data: Callable[[], bytes], first: int, count: int, tmp_path: Path
) -> None:
    made = data()
    (tmp_path / "video.mp4").write_bytes(made)
    with open_video(made) as container:
        stream = main_stream(container)
        assert stream is not None
        assert len(container.streams.video) == 2
        index = stream.index
    for source in (made, tmp_path / "video.mp4"):
        assert count_frames(source)[0] == count
        assert read_number(decode_frames(source, [0])[0]) == first
    with open_source(tmp_path / "video.mp4") as (_, taken):
        assert taken.index == index
    assert not is_plain(made, count), "another decoder may take the other stream"


def test_tags_in_any_alphabet_are_no_reason_to_fail() -> None:
    file = io.BytesIO()
    with av.open(io.BytesIO(encode(3))) as source, av.open(file, "w", format="mp4") as output:
        output.metadata["title"] = "TITLE"
        stream = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    assert len(decode_frames(file.getvalue().replace(b"TITLE", b"\xff\xfeT\xe9\xff"), [0, 2])) == 2


def test_there_is_one_door() -> None:
    """Nothing but pipeline/decoding/containers.py opens a video for reading."""
    found = []
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if parts[0] in ("tests", "build") or any(part.startswith(".") for part in parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "av":
                found += [(parts, node.lineno) for name in node.names if name.name == "open"]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("av.open", "av.container.open"):
                writes = any(isinstance(value, ast.Constant) and value.value == "w" for value in node.args)
                found += [] if writes else [(parts, node.lineno)]
    assert [parts for parts, _ in found] == [("pipeline", "decoding", "containers.py")], found
