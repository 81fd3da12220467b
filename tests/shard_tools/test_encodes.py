"""Each codec's shards: short groups, frames in order, and the same bytes again."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from shard_making import read_numbers, store

from adamae.shard_tools.codecs import CODECS, TUNES
from adamae.shard_tools.settings import Settings

Generate = Callable[..., Path]


@pytest.fixture(scope="module")
def source(generate: Generate) -> Path:
    return generate("--num-frames", "80", "--size", "128x96")


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_keeps_frames_order_and_groups_alike_again(source: Path, codec: str) -> None:
    stored = store(source, encode=codec, gop=6)
    video = stored.path.read_bytes()
    assert store(source, encode=codec, gop=6).path.read_bytes() == video
    # SVT-AV1 makes the process a real-time one where root runs it: a few workers then take a whole
    # machine.
    for thread in map(int, os.listdir("/proc/self/task")):
        # A thread may have ended since it was listed.
        with suppress(ProcessLookupError):
            assert os.sched_getscheduler(thread) != os.SCHED_FIFO
    assert (stored.codec, stored.num_frames, stored.fps) == (codec, 20, 7.5)
    assert (stored.width, stored.height) == (128, 96)
    assert read_numbers(stored.path) == list(range(0, 80, 4))


@pytest.mark.parametrize("codec", CODECS)
def test_packets_are_in_order_with_a_key_frame_per_group(source: Path, codec: str) -> None:
    with av.open(str(store(source, encode=codec, gop=6).path)) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        assert stream.codec_context.codec.canonical_name == codec
        assert stream.average_rate == 7.5
    key_frames = [number for number, packet in enumerate(packets) if packet.is_keyframe]
    assert max(np.diff([*key_frames, 20])) <= 6
    times = [packet.dts if packet.pts is None else packet.pts for packet in packets]
    assert times == sorted(times), "frames are stored out of order: there are B-frames"
    assert len(packets) == 20, "hidden frames are stored"


def test_h264_is_the_same_on_every_processor(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--num-frames", "80", "--size", "128x96")
    sources = [generate(*options, "--seed", str(seed)) for seed in range(4)]
    bytes_here = [store(source).path.read_bytes() for source in sources]
    usual = CODECS["h264"]
    # asm=0 makes x264 use none of the processor's vector instructions.
    without_vectors = usual.options | {"x264-params": usual.options["x264-params"] + ":asm=0"}
    monkeypatch.setitem(CODECS, "h264", replace(usual, options=without_vectors))
    assert [store(source).path.read_bytes() for source in sources] == bytes_here


def read_pictures(path: Path, skip_loop_filter: str) -> list[np.ndarray]:
    """Return the decoded planes of all frames.

    A decoder that skips (`all`) the loop filters of a stream drifts from what was encoded.
    """
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.options |= {"skip_loop_filter": skip_loop_filter}
        return [frame.to_ndarray() for frame in container.decode(video=0)]


@pytest.mark.parametrize("tune", TUNES)
@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_tune_decode_stores_unfiltered_pictures(source: Path, codec: str, tune: str) -> None:
    path = store(source, encode=codec, tune=tune).path
    pairs = zip(read_pictures(path, "none"), read_pictures(path, "all"), strict=True)
    is_unfiltered = all(np.array_equal(filtered, skipped) for filtered, skipped in pairs)
    assert is_unfiltered == (tune == "decode")
    # x264 writes its settings into the stream.
    if codec == "h264":
        setting = {"decode": b" cabac=0 ", "size": b" cabac=1 "}[tune]
        assert setting in path.read_bytes()


@pytest.mark.parametrize(
    ("codec", "tune", "recorded_tune", "recorded_quality"),
    [
        ("h264", "decode", "decode", 22),
        ("h264", "size", "size", 23),
        ("hevc", "decode", "decode", 24),
        ("vp9", "decode", None, 31),
        ("vp9", "size", None, 31),
        ("copy", "decode", None, None),
    ],
)
def test_tune_is_recorded_where_it_has_an_effect_with_its_quality(
    codec: str, tune: str, recorded_tune: str | None, recorded_quality: int | None
) -> None:
    values = Settings(codec, tune=tune).to_json()
    assert values.get("tune") == recorded_tune
    assert values.get("quality") == recorded_quality


PEAK_MEMORY = """
import sys
from pathlib import Path
from adamae.shard_tools.encoding.encode import encode_segments
from adamae.shard_tools.settings import Settings
list(encode_segments(Path(sys.argv[1]), {Path(sys.argv[2]): None}, Settings(frame_stride=1)))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_length_of_a_video(
    generate: Generate, tmp_path: Path
) -> None:
    peaks = []
    for num_frames in ("20", "120"):
        path = generate("--size", "640x480", "--num-frames", num_frames)
        command = [sys.executable, "-c", PEAK_MEMORY, str(path), str(tmp_path / num_frames)]
        process = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(int(process.stdout) / 1024)
    assert peaks[1] < peaks[0] + 20, f"frames of 0.44 MiB are kept: {peaks} MiB"
