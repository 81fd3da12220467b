"""Copied videos: what is decoded of them to see that they are intact, and what that finds."""

from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest

from shard_tools.encode import SAMPLED_SHARE, store
from shard_tools.picture import UnusableError
from shard_tools.settings import CHECKS, Settings
from shard_tools.source import checked, opened

NUM_FRAMES, GROUP = 96, 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise that moves: every picture is thousands of bytes, so that damage hits pictures."""
    path = tmp_path_factory.mktemp("noise") / "noise.mp4"
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8).repeat(2, 0).repeat(2, 1)
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as output:
        stream = output.add_stream("libx264", rate=25, options={"g": str(GROUP), "sc_threshold": "0", "crf": "18"})
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for number in range(NUM_FRAMES):
            picture = np.roll(noise, (3 * number, 5 * number), (0, 1))
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        output.mux(stream.encode(None))
    return path


def copied(path: Path, check: str) -> int:
    """The number of frames of a video that is found intact."""
    (one,) = store(path, path.with_suffix(""), Settings(encode="copy", check=check))
    return one.num_frames


def packet_places(path: Path) -> list[tuple[int, int]]:
    """(offset, size) in the file of every picture, in the order in which they are decoded."""
    with av.open(str(path)) as container:
        return [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.pos is not None]


@pytest.mark.parametrize("check", CHECKS)
def test_an_intact_video_has_all_its_frames(source: Path, check: str) -> None:
    assert copied(source, check) == NUM_FRAMES


def test_a_sample_holds_the_first_frames_of_every_group(source: Path) -> None:
    with opened(source) as (container, stream):
        assert checked(container, stream, run=6)[1] == NUM_FRAMES * SAMPLED_SHARE
    found: dict[str, set[int]] = {check: set() for check in CHECKS}
    for number, (offset, size) in enumerate(packet_places(source)):
        every_ninth = list(range(offset + 20, offset + size, 9))
        path = damaged(source, lambda data, places=every_ninth: flip(data, places))
        for check in CHECKS:
            try:
                copied(path, check)
            except UnusableError:
                found[check].add(number)
    # Wrong bytes may make a picture that no decoder complains of.
    assert len(found["full"]) > 0.75 * NUM_FRAMES
    assert found["sample"] == {number for number in found["full"] if number % GROUP < 6}


def damaged(source: Path, damage: Callable[[bytearray], bytes]) -> Path:
    path = source.with_name("damaged.mp4")
    path.write_bytes(damage(bytearray(source.read_bytes())))
    return path


def flip(data: bytearray, places: list[int]) -> bytes:
    for place in places:
        data[place] ^= 255
    return bytes(data)


def zeros(data: bytearray, start: int, count: int) -> bytes:
    data[start : start + count] = bytes(count)
    return bytes(data)


@pytest.mark.parametrize("check", CHECKS)
def test_random_damage_is_found(source: Path, check: str) -> None:
    draw, places = np.random.default_rng(1), packet_places(source)
    first, end = places[0][0], source.stat().st_size
    for _ in range(8):
        cut = int(draw.integers(40, end - 1))
        many = draw.integers(first, end, 40).tolist()
        offset, size = places[int(draw.integers(NUM_FRAMES))]
        kinds: dict[str, Callable[[bytearray], bytes]] = {
            "cut off": lambda data, cut=cut: bytes(data[:cut]),
            "flipped": lambda data, many=many: flip(data, many),
            "a hole": lambda data, at=offset + size // 3: zeros(data, at, 300),  # in any picture, decoded or not
            "a byte is missing": lambda data, cut=cut: bytes(data[:cut] + data[cut + 1 :]),
        }
        for damage in kinds.values():
            with pytest.raises((UnusableError, av.error.FFmpegError)):
                copied(damaged(source, damage), check)


@pytest.mark.parametrize("check", CHECKS)
def test_hidden_frames_are_not_counted(source: Path, tmp_path: Path, check: str) -> None:
    hidden = 30
    with av.open(str(source)) as whole, av.open(str(tmp_path / "hidden.mp4"), "w") as output:
        stream = output.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(video=0):
            if packet.dts is not None and packet.pts is not None and packet.time_base:
                shift = round(hidden / 25 / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, stream
                output.mux(packet)
    with av.open(str(tmp_path / "hidden.mp4")) as container:
        shown = sum(1 for _ in container.decode(video=0))
    assert shown == NUM_FRAMES - hidden
    assert copied(tmp_path / "hidden.mp4", check) == shown


def test_shared_clips_are_counted_alike_by_both_checks(shared_folder: Path | None) -> None:
    if shared_folder is None:
        pytest.skip("no clips beside the repository")
    for path in sorted((shared_folder / "videos" / "edge").glob("*.[!t]*")):
        counts: list[int | None] = []
        for check in CHECKS:
            try:
                counts.append(copied(path, check))
            except UnusableError:
                counts.append(None)
        assert counts[0] == counts[1], path.name
        assert (counts[0] is None) == (path.name == "decord__corrupted.mp4")


@pytest.mark.parametrize("check", CHECKS)
def test_shared_broken_files_are_refused(shared_folder: Path | None, check: str) -> None:
    if shared_folder is None:
        pytest.skip("no clips beside the repository")
    for path in sorted((shared_folder / "videos" / "broken").iterdir()):
        with pytest.raises((UnusableError, av.error.FFmpegError)):
            copied(path, check)
