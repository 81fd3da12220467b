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
    options = {"g": "24", "crf": "18", "preset": "medium"}
    return write_noise(
        tmp_path_factory.mktemp("noise") / "noise.mp4", "mp4", NUM_FRAMES, options, side=128
    )


def copied(path: Path) -> int:
    """The number of frames of a video that is found intact."""
    return store(path, encode="copy").num_frames


def test_random_damage_is_found(source: Path, tmp_path: Path) -> None:
    draw, data, path = np.random.default_rng(1), source.read_bytes(), tmp_path / "damaged.mp4"
    with av.open(str(source)) as container:
        first = next(container.demux(video=0)).pos
    for _ in range(8):
        cut, places = (
            int(draw.integers(40, len(data) - 1)),
            draw.integers(first, len(data), 40).tolist(),
        )
        for damaged in (data[:cut], flip(data, places), data[:cut] + data[cut + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises((VideoError, av.error.FFmpegError)):
                copied(path)


def trimmed(data: bytes, start: int, container: str, from_keyframe: bool, **options: str) -> bytes:
    """What `ffmpeg -ss START -c copy` makes: packets from the keyframe before frame `start` on, or, as a recorder that
    is switched on does, from there on; times are counted from `start`, and the others are negative or hidden."""
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(file, "w", format=container, options=options) as output,
    ):
        video = source.streams.video[0]
        stream, begin = output.add_stream_from_template(video), round(start / 8 / video.time_base)
        if from_keyframe:
            source.seek(begin, stream=video)
        for packet in source.demux(video):
            if packet.size and (from_keyframe or packet.pts >= begin):
                packet.pts, packet.dts, packet.stream = (
                    packet.pts - begin,
                    packet.dts - begin,
                    stream,
                )
                output.mux(packet)
    return file.getvalue()


TRIMS: dict[
    str, tuple[str, bool, dict[str, str]]
] = {  # the container, whether from a keyframe, FFmpeg's options
    "edit list": ("mp4", True, {}),
    "edit list in mov": ("mov", True, {}),
    "negative times": ("matroska", True, {"avoid_negative_ts": "disabled"}),
    "begins in a group": ("mpegts", False, {}),
}


def trim(kind: str, container: str, from_keyframe: bool, options: dict[str, str]) -> bytes:
    made: dict[str, Any] = KINDS[kind]
    if kind == "h264, one keyframe" and not from_keyframe:  # else no keyframe would be left
        made = WITH_B_FRAMES | {"options": {**X264, "g": "24"}}
    return trimmed(encode(60, **made), 17, container, from_keyframe, **options)


def forget_display_times(packet: av.Packet, number: int) -> av.Packet:
    packet.pts = packet.dts = number * round(1 / 8 / packet.time_base)
    return packet


def end_early(data: bytes, num_frames: int) -> bytes:
    """Shorten the edit list by some frames, as a trim on a phone does."""
    found = bytearray(data)
    at, scale_at = data.index(b"elst") + 12, data.index(b"mvhd") + 16
    units = num_frames * int.from_bytes(data[scale_at : scale_at + 4]) // 8
    found[at : at + 4] = (int.from_bytes(data[at : at + 4]) - units).to_bytes(4)
    return bytes(found)


WITH_B_FRAMES: dict[str, Any] = KINDS["h264 with B-frames"]
TRIMMED = (
    "h264 without B-frames",
    "h264 with B-frames",
    "h264, one keyframe",
    "mpeg4 with B-frames",
)
COPIES: dict[str, Callable[[], bytes]] = {
    "AVI": lambda: encode(60, container="avi", **WITH_B_FRAMES),
    "MP4 without times of display": lambda: remux(
        encode(60, **WITH_B_FRAMES), "mp4", forget_display_times
    ),
    "Matroska with times of decoding": lambda: remux(
        encode(60, **WITH_B_FRAMES), "matroska", forget_display_times
    ),
    "an edit list that ends early": lambda: end_early(encode(60, **WITH_B_FRAMES), 7),
    **{f"{kind}: {how}": partial(trim, kind, *TRIMS[how]) for kind, how in product(TRIMMED, TRIMS)},
}


@pytest.mark.parametrize("kind", COPIES)
def test_clips_of_copies_are_the_frames_that_are_shown(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "video"
    path.write_bytes(COPIES[kind]())
    shown = [read_number(frame) for frame in decode(path)]
    assert len(shown) in ((53,) if "early" in kind else range(31, 61) if ":" in kind else (60,))
    assert copied(path) == len(shown)
    for start in (*range(0, len(shown) - 4, 5), len(shown) - 4):
        clip = decode_frames(path.read_bytes(), range(start, start + 4), len(shown))
        assert [read_number(frame) for frame in clip] == shown[start : start + 4]


def name_larger_size(data: bytes, kind: bytes, change: int) -> bytes:
    """Change the size of the box or chunk `kind`."""
    changed, order = bytearray(data), "big" if kind == b"mdat" else "little"
    at = data.rindex(kind) + (-4 if kind == b"mdat" else 4)
    changed[at : at + 4] = (int.from_bytes(data[at : at + 4], order) + change).to_bytes(4, order)  # type: ignore
    return bytes(changed)


FRAGMENTS = "empty_moov+frag_keyframe+skip_trailer"
INTACT: dict[str, Callable[[bytes], bytes]] = {
    "RIFF size": lambda _: name_larger_size(encode(NUM_FRAMES, **KINDS["mjpeg"]), b"RIFF", 8),  # type: ignore[arg-type]
    "mdat size": lambda data: name_larger_size(data, b"mdat", 8),
    "mdat size of a fragment": lambda data: name_larger_size(
        remux(data, "mp4", movflags=FRAGMENTS), b"mdat", 8
    ),
}


@pytest.mark.parametrize("kind", INTACT)
def test_what_a_file_says_wrongly_of_itself_is_no_damage(
    source: Path, kind: str, tmp_path: Path
) -> None:
    data, path = INTACT[kind](source.read_bytes()), tmp_path / "video.mp4"
    path.write_bytes(data)
    assert copied(path) == NUM_FRAMES
    path.write_bytes(data[: len(data) - len(data) // 8])
    with pytest.raises(VideoError, match=r"cut off|damaged|moov"):
        copied(path)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "longer": lambda data: data + bytes(8),
    "shorter": lambda data: data[:-9000],
    "another": lambda data: flip(data, [len(data) // 2]),  # and neither size nor time tell
}


def change(path: Path, how: str) -> None:
    status = path.stat()
    path.write_bytes(CHANGES[how](path.read_bytes()))
    if how == "another":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("encode", "how", "is_read"),
    [("copy", "longer", True), ("h264", "longer", True), *product(["copy"], CHANGES, [False])],
)
def test_a_file_that_changes_while_it_is_read_or_before_it_is_stored_is_rejected(
    source: Path,
    tmp_path: Path,
    encode: str,
    how: str,
    is_read: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_folder(
        tmp_path / "in", dict.fromkeys(["kept.mp4", "touched.mp4"], source.read_bytes())
    )
    touched = folder / "touched.mp4"

    def change_after(*arguments: Any, **options: Any) -> Any:
        for job, result in run_here(*arguments):
            if job.location == str(touched) and not is_read:
                change(touched, how)
            yield job, result

    monkeypatch.setitem(ENGINES, "processes", change_after)
    if is_read:
        monkeypatch.setattr(work, "restart_timer", lambda: change(touched, how))
    make(folder, tmp_path / "out", "--encode", encode)
    assert build.read_rejects(tmp_path / "out") == {
        "touched.mp4": "it was changed while it was read"
    }
    ((shard, kept),) = all_samples(tmp_path / "out")
    assert (video_bytes(tmp_path / "out", shard, kept) == source.read_bytes()) == (encode == "copy")
