"""What may be opened as a video, how large its frames may be, and which of its streams is used."""

import ast
import io
import re
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
from av.stream import Disposition
from made_videos import X264, encode, read_number
from PIL import Image

from adamae.pipeline.decoding import containers
from adamae.pipeline.decoding.containers import main_stream, open_video
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.opening import open_source
from adamae.pipeline.videos.source_video import read_frames
from adamae.shard_tools.plan import Header, probe_header

ROOT = Path(__file__).parents[2]
REFERENCES = {
    "network stream": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    b"m=video 45678 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    "list of files": b"ffconcat version 1.0\nfile local.mp4\n",
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nlocal.mp4\n#EXT-X-ENDLIST\n",
    "manifest": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static">'
    b'<Period><AdaptationSet><Representation id="0" bandwidth="1"><BaseURL>local.mp4</BaseURL>'
    b"</Representation></AdaptationSet></Period></MPD>",
}


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("extension", ["mp4", "m3u8", "sdp"])
def test_references_to_other_files_are_not_followed(
    kind: str, extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local.mp4").write_bytes(encode(3))
    path = tmp_path / f"text.{extension}"
    data = REFERENCES[kind]
    path.write_bytes(data)
    monkeypatch.chdir(tmp_path)
    for source in (data, path, io.BytesIO(data)):
        with pytest.raises(av.error.FFmpegError):
            open_video(source)
    with pytest.raises(VideoError):
        decode_frames(data, [0])
    with pytest.raises(VideoError), open_source(path):
        pass
    assert probe_header(str(path)) == Header()


def png_in_mov(side: int) -> bytes:
    """Make a video of black pictures that are larger than its header says."""
    png = io.BytesIO()
    file = io.BytesIO()
    Image.new("1", (side, side)).save(png, format="PNG")
    with av.open(file, "w", format="mov") as output:
        stream = output.add_stream("png", rate=8)
        stream.width = 64
        stream.height = 48
        stream.pix_fmt = "monob"
        for number in range(2):
            packet = av.Packet(png.getvalue())
            packet.pts = packet.dts = number
            packet.time_base = Fraction(1, 8)
            packet.stream = stream
            packet.is_keyframe = True
            output.mux(packet)
    return file.getvalue()


def test_a_frame_of_gigabytes_is_not_decoded(tmp_path: Path) -> None:
    path = tmp_path / "huge.mov"
    path.write_bytes(png_in_mov(12000))
    assert path.stat().st_size < 100_000
    for source in (path, path.read_bytes()):
        with pytest.raises(VideoError):
            decode_frames(source, [0])
    with (
        open_source(path) as (container, stream),
        pytest.raises(VideoError, match="frame 0 cannot be decoded"),
    ):
        next(read_frames(container, stream))
    # Square pictures of the width of the largest cameras.
    path.write_bytes(png_in_mov(7680))
    assert decode_frames(path, [1]).shape == (1, 7680, 7680, 3)


@pytest.mark.parametrize(
    "kind", [{}, {"container": "mpegts"}, {"codec": "mpeg4", "container": "avi"}]
)
def test_the_limit_holds_in_every_container(
    kind: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(4, **kind)  # type: ignore[arg-type]
    assert len(decode_frames(data, [0, 3])) == 2
    monkeypatch.setattr(containers, "MAX_PIXELS", 64 * 48 - 1)
    with pytest.raises(VideoError):
        decode_frames(data, [0])


def make_streams(
    lengths: dict[int, int],
    default: int | None = None,
    container: str = "mp4",
    cover: int | None = None,
) -> bytes:
    """Make a file of several streams.

    `lengths` are their numbers of frames, by the number that the first frame shows. `default` and
    `cover` are indices of streams.
    """
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        packets = []
        for index, (first, count) in enumerate(lengths.items()):
            if index == cover:
                data = encode(count, first=first, codec="mjpeg", container="avi")
            else:
                data = encode(count, first=first, options=X264)
            with av.open(io.BytesIO(data)) as source:
                stream = output.add_stream_from_template(source.streams.video[0])
                if index == cover:
                    stream.disposition = Disposition.attached_pic
                elif index == default:
                    stream.disposition = Disposition.default
                elif default is not None:
                    stream.disposition = Disposition(0)
                packets += [(stream, packet) for packet in source.demux(video=0) if packet.size]
        for stream, packet in packets:
            packet.stream = stream
            output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(
    ("settings", "first", "count"),
    [
        ({"lengths": {0: 4, 9: 8}, "default": 1}, 9, 8),
        ({"lengths": {0: 8, 9: 4}, "default": 1}, 9, 4),
        # In MP4, FFmpeg marks the first stream as the default one; in MPEG-TS it marks none.
        ({"lengths": {0: 4, 9: 8}}, 0, 4),
        ({"lengths": {0: 4, 9: 8}, "container": "mpegts"}, 9, 8),
    ],
    ids=["the default one", "the default one, if shorter", "the first", "the longest"],
)
def test_one_rule_says_which_stream_is_the_video(
    settings: dict[str, Any], first: int, count: int, tmp_path: Path
) -> None:
    data = make_streams(**settings)
    path = tmp_path / "video.mp4"
    path.write_bytes(data)
    with open_video(data) as container:
        stream = main_stream(container)
        assert stream is not None
        assert len(container.streams.video) == 2
        index = stream.index
    for source in (data, path):
        assert read_number(decode_frames(source, [0])[0]) == first
    with open_source(path) as (container, stream):
        assert stream.index == index
        assert sum(1 for _ in read_frames(container, stream)) == count


def test_a_cover_is_no_video() -> None:
    with pytest.raises(VideoError, match="it holds no video"):
        decode_frames(make_streams({0: 1}, cover=0), [0])


def test_tags_need_not_be_utf8() -> None:
    data = encode(3)
    assert b"TITLE" in data
    changed = data.replace(b"TITLE", b"\xff\xfeT\xe9\xff")
    assert len(decode_frames(changed, [0, 2])) == 2


def _opens_to_read(call: ast.AST) -> bool:
    """Return whether `call` is av.open(…) or container.open(…) without the mode "w"."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    if ast.unparse(call.func) not in ("av.open", "av.container.open", "container.open"):
        return False
    return all(ast.unparse(argument) != "'w'" for argument in call.args)


def test_only_one_module_opens_videos() -> None:
    modules = set()
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if parts[0] in ("tests", "build") or any(part.startswith(".") for part in parts):
            continue
        text = path.read_text(encoding="utf-8")
        imports_open = re.search(r"from av\S* import .*\bopen\b", text)
        if imports_open or any(_opens_to_read(node) for node in ast.walk(ast.parse(text))):
            modules.add(parts)
    assert modules == {("pipeline", "decoding", "containers.py")}


def test_recordings_of_high_speed_cameras_are_videos(tmp_path: Path) -> None:
    """Phantom's .cine; .dav of Dahua has a demuxer, too, and no program here writes one."""
    width, height, num_frames = 64, 48, 5
    setup = bytearray(0x2000)
    struct.pack_into("<2sH", setup, 0x8C, b"ST", len(setup))
    struct.pack_into("<I", setup, 0x300, 1000)
    bitmap = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 0, width * height, 0, 0, 256, 0)
    first_offset = 44 + len(bitmap) + len(setup)
    frames = b""
    offsets = b""
    for number in range(num_frames):
        start = first_offset + 8 * num_frames + len(frames)
        offsets += struct.pack("<Q", start)
        frames += struct.pack("<II", 8, width * height) + bytes([16 + number]) * (width * height)
    head = (44, 0, 1, 0, num_frames, 0, num_frames, 44, 44 + len(bitmap), first_offset, 0)
    header = struct.pack("<2sHHHiIiIIIIQ", b"CI", *head)
    path = tmp_path / "shot.cine"
    path.write_bytes(header + bitmap + bytes(setup) + offsets + frames)
    with open_source(path) as (container, stream):
        shades = [
            frame.to_ndarray(format="gray").mean() for frame in read_frames(container, stream)
        ]
    assert shades == [16, 17, 18, 19, 20]
    assert {"cine", "dav"} <= containers.VIDEO_EXTENSIONS
    assert "dhav" in av.formats_available
