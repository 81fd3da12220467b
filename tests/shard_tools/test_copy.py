"""Copied videos: what is decoded of them to see that they are intact, and what that finds."""

import io
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from made_videos import KINDS, X264, encode, read_number, remux
from shard_making import (
    all_samples,
    decode,
    flip,
    make,
    make_folder,
    run_here,
    store,
    video_bytes,
    write_noise,
)

from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools import build, work
from adamae.shard_tools.workers import ENGINES

NUM_FRAMES = 96


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noise") / "noise.mp4"
    options = {"g": "24", "crf": "18", "preset": "medium"}
    return write_noise(path, "mp4", NUM_FRAMES, options, side=128)


def copied(path: Path) -> int:
    """Return the number of frames of a video; raise VideoError unless it is found intact."""
    return store(path, encode="copy").num_frames


def test_random_damage_is_found(source: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = source.read_bytes()
    path = tmp_path / "damaged.mp4"
    with av.open(str(source)) as container:
        first = next(container.demux(video=0)).pos
    for _ in range(8):
        cut = int(rng.integers(40, len(data) - 1))
        positions = rng.integers(first, len(data), 40).tolist()
        for damaged in (data[:cut], flip(data, positions), data[:cut] + data[cut + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises((VideoError, av.error.FFmpegError)):
                copied(path)


def trimmed(data: bytes, start: int, container: str, from_keyframe: bool, **options: str) -> bytes:
    """Cut a video like `ffmpeg -ss START -c copy`, without encoding it again.

    Packets begin with the keyframe before frame `start`, or, as a recorder does that is switched on
    in between, with that frame. Times count from `start`; earlier ones are negative or hidden.
    """
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(file, "w", format=container, options=options) as output,
    ):
        video = source.streams.video[0]
        stream = output.add_stream_from_template(video)
        # Videos of made_videos have 8 frames per second.
        begin = round(start / 8 / video.time_base)
        if from_keyframe:
            source.seek(begin, stream=video)
        for packet in source.demux(video):
            if packet.size and (from_keyframe or packet.pts >= begin):
                packet.pts -= begin
                packet.dts -= begin
                packet.stream = stream
                output.mux(packet)
    return file.getvalue()


# The container, whether packets begin with a keyframe, and FFmpeg's options.
TRIMS: dict[str, tuple[str, bool, dict[str, str]]] = {
    "edit list": ("mp4", True, {}),
    "edit list in mov": ("mov", True, {}),
    "negative times": ("matroska", True, {"avoid_negative_ts": "disabled"}),
    "begins in a group": ("mpegts", False, {}),
}


def trim(kind: str, container: str, from_keyframe: bool, options: dict[str, str]) -> bytes:
    made: dict[str, Any] = KINDS[kind]
    if kind == "h264, one keyframe" and not from_keyframe:
        # Otherwise no keyframe would remain.
        made = WITH_B_FRAMES | {"options": {**X264, "g": "24"}}
    return trimmed(encode(60, **made), 17, container, from_keyframe, **options)


def forget_display_times(packet: av.Packet, number: int) -> av.Packet:
    time = number * round(1 / 8 / packet.time_base)
    packet.pts = time
    packet.dts = time
    return packet


def end_early(data: bytes, num_frames: int) -> bytes:
    """Shorten the edit list by some frames, as a trim on a phone does."""
    changed = bytearray(data)
    scale_at = data.index(b"mvhd") + 16
    ticks_per_second = int.from_bytes(data[scale_at : scale_at + 4])
    at = data.index(b"elst") + 12
    duration = int.from_bytes(data[at : at + 4]) - num_frames * ticks_per_second // 8
    changed[at : at + 4] = duration.to_bytes(4)
    return bytes(changed)


def encode_with_b_frames(**options: Any) -> bytes:
    return encode(60, **WITH_B_FRAMES, **options)


WITH_B_FRAMES: dict[str, Any] = KINDS["h264 with B-frames"]
TRIMMED = (
    "h264 without B-frames",
    "h264 with B-frames",
    "h264, one keyframe",
    "mpeg4 with B-frames",
)
COPIES: dict[str, Callable[[], bytes]] = {
    "AVI": lambda: encode_with_b_frames(container="avi"),
    "MP4 without times of display": lambda: remux(
        encode_with_b_frames(), "mp4", forget_display_times
    ),
    "Matroska with times of decoding": lambda: remux(
        encode_with_b_frames(), "matroska", forget_display_times
    ),
    "an edit list that ends early": lambda: end_early(encode_with_b_frames(), 7),
    **{f"{kind}: {how}": partial(trim, kind, *TRIMS[how]) for kind, how in product(TRIMMED, TRIMS)},
}


@pytest.mark.parametrize("kind", COPIES)
def test_clips_of_copies_are_the_frames_that_are_shown(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "video"
    path.write_bytes(COPIES[kind]())
    shown = [read_number(frame) for frame in decode(path)]
    if "early" in kind:
        assert len(shown) == 53
    elif ":" in kind:
        # What a trim leaves depends on the keyframes.
        assert 31 <= len(shown) <= 60
    else:
        assert len(shown) == 60
    assert copied(path) == len(shown)
    for start in (*range(0, len(shown) - 4, 5), len(shown) - 4):
        clip = decode_frames(path.read_bytes(), range(start, start + 4), len(shown))
        assert [read_number(frame) for frame in clip] == shown[start : start + 4]


def enlarge_box(data: bytes, kind: bytes, change: int) -> bytes:
    """Add to the size that the last box of a kind names: big endian, before the kind."""
    changed = bytearray(data)
    at = data.rindex(kind) - 4
    size = int.from_bytes(data[at : at + 4], "big")
    changed[at : at + 4] = (size + change).to_bytes(4, "big")
    return bytes(changed)


def enlarge_riff(data: bytes, change: int) -> bytes:
    """Add to the size that a RIFF file names: little endian, after the kind."""
    changed = bytearray(data)
    at = data.rindex(b"RIFF") + 4
    size = int.from_bytes(data[at : at + 4], "little")
    changed[at : at + 4] = (size + change).to_bytes(4, "little")
    return bytes(changed)


MJPEG: dict[str, Any] = KINDS["mjpeg"]
FRAGMENTS = "empty_moov+frag_keyframe+skip_trailer"
INTACT: dict[str, Callable[[bytes], bytes]] = {
    "RIFF size": lambda _: enlarge_riff(encode(NUM_FRAMES, **MJPEG), 8),
    "mdat size": lambda data: enlarge_box(data, b"mdat", 8),
    "mdat size of a fragment": lambda data: enlarge_box(
        remux(data, "mp4", movflags=FRAGMENTS), b"mdat", 8
    ),
}


@pytest.mark.parametrize("kind", INTACT)
def test_what_a_file_says_wrongly_of_itself_is_no_damage(
    source: Path, kind: str, tmp_path: Path
) -> None:
    data = INTACT[kind](source.read_bytes())
    path = tmp_path / "video.mp4"
    path.write_bytes(data)
    assert copied(path) == NUM_FRAMES
    path.write_bytes(data[: len(data) - len(data) // 8])
    with pytest.raises(VideoError, match=r"cut off|damaged|moov"):
        copied(path)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "longer": lambda data: data + bytes(8),
    "shorter": lambda data: data[:-9000],
    "another": lambda data: flip(data, [len(data) // 2]),
}


def change(path: Path, how: str) -> None:
    status = path.stat()
    path.write_bytes(CHANGES[how](path.read_bytes()))
    # Neither the size nor the time of this change tells that there was one.
    if how == "another":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def touched(source: Path, tmp_path: Path) -> Path:
    """Return one of two videos in a folder, the one to be changed."""
    names = ["kept.mp4", "touched.mp4"]
    return make_folder(tmp_path / "in", dict.fromkeys(names, source.read_bytes())) / "touched.mp4"


def require_rejected(output: Path, encode: str, source: Path) -> None:
    """Require that the touched video is rejected alone."""
    assert build.read_rejects(output) == {"touched.mp4": "it was changed while it was read"}
    ((shard, kept),) = all_samples(output)
    is_copied = video_bytes(output, shard, kept) == source.read_bytes()
    assert is_copied == (encode == "copy")


@pytest.mark.parametrize("encode", ["copy", "h264"])
def test_a_file_that_changes_while_it_is_read_is_rejected(
    source: Path, touched: Path, tmp_path: Path, encode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "restart_timer", lambda: change(touched, "longer"))
    make(touched.parent, tmp_path / "out", "--encode", encode)
    require_rejected(tmp_path / "out", encode, source)


@pytest.mark.parametrize("how", CHANGES)
def test_a_copy_that_changes_before_it_is_stored_is_rejected(
    source: Path, touched: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_after(*arguments: Any, **options: Any) -> Any:
        for job, result in run_here(*arguments):
            if job.location == str(touched):
                change(touched, how)
            yield job, result

    monkeypatch.setitem(ENGINES, "processes", change_after)
    make(touched.parent, tmp_path / "out", "--encode", "copy")
    require_rejected(tmp_path / "out", "copy", source)
