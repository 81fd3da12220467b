"""A short way to make shards in tests, and to look at what came out."""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
from frame_numbers import read_frame_number

from pipeline.shards.format import Sample, read_dataset_info, read_samples
from shard_tools import make_shards

NUM_VIDEOS, NUM_FRAMES = 9, 18


def run_here(
    function: Callable[[Any], Any], jobs: Iterable[Any], *_: object, **__: object
) -> Iterator[tuple[Any, Any]]:
    """Run all jobs in this process."""
    return ((job, function(job)) for job in jobs)


def list_segments(videos: Path, path: Path) -> Path:
    """Write a list of some segments of each video, with any number of labels each."""
    rows = [
        {"path": str(video), "label": ["a", "b"][number % 3 : 2], "start": start, "end": start + 0.3}
        for number, video in enumerate(sorted(videos.rglob("*.mp4")))
        for start in (0, 0.1, 0.25)
    ]
    path.write_text(json.dumps(rows))
    return path


def make(inputs: Path | str, output: Path, *options: str) -> int:
    """make_shards with one worker and no limit on rejects, unless told otherwise; returns its exit code."""
    return make_shards.main([str(inputs), str(output), "--workers", "1", "--max-rejects", "1", *options])


def hashes(folder: Path) -> dict[str, bytes]:
    """Every file of a dataset, by name, with its bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def all_samples(folder: Path) -> list[tuple[str, Sample]]:
    """(shard, sample) of a whole dataset, in order."""
    info = read_dataset_info(folder)
    return [(shard.name, sample) for shard in info.shards for sample in read_samples(folder, shard)]


def video_bytes(folder: Path, shard: str, sample: Sample) -> bytes:
    with (folder / shard).open("rb") as file:
        file.seek(sample.offset)
        return file.read(sample.size)


def decode(video: bytes | Path) -> list[np.ndarray]:
    """All frames of a video, uint8 [H, W, 3]."""
    with av.open(io.BytesIO(video) if isinstance(video, bytes) else str(video)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def read_numbers(video: bytes | Path) -> list[int]:
    """The numbers that synthetic_videos.draw_frame_number has written into the frames of a video."""
    return [read_frame_number(frame) for frame in decode(video)]


def numbers_of(folder: Path, field: str = "key") -> dict[str, list[int]]:
    """The frame numbers in every sample of a dataset, by a field of it."""
    samples = all_samples(folder)
    return {getattr(sample, field): read_numbers(video_bytes(folder, shard, sample)) for shard, sample in samples}


def rolling_noise(num_frames: int, height: int = 48, width: int = 64) -> Iterator[np.ndarray]:
    """Noise that moves, uint8 [H, W, 3]: every picture is thousands of bytes, so that damage hits pictures."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return (np.roll(noise, (3 * number, 5 * number), (0, 1)) for number in range(num_frames))
