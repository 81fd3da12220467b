"""A short way to make shards in tests, and to look at what came out."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np

from pipeline.shards.format import Sample, read_dataset_info, read_samples
from shard_tools import make_shards
from shard_tools.synthetic_videos import GRID, GRID_FRACTION, check_bits, draw_frame_number

NUM_VIDEOS, NUM_FRAMES = 9, 18


def run_here(
    function: Callable[[Any], Any], jobs: Iterable[Any], *_: object, **__: object
) -> Iterator[tuple[Any, Any]]:
    """Run all jobs in this process."""
    return ((job, function(job)) for job in jobs)


def make_folder(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files, by name with their content."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


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


def read_frame_number(frame: np.ndarray) -> int:
    """Read the number drawn into `frame`, uint8 [H, W, 3]; raise ValueError if none is readable."""
    height, width = frame.shape[:2]
    code = 0
    for i in range(GRID * GRID):
        row, column = divmod(i, GRID)
        y, x = (row + 0.5) * height / GRID_FRACTION, (column + 0.5) * width / GRID_FRACTION
        code |= int(frame[round(y - 1) : round(y + 1), round(x - 1) : round(x + 1)].mean() > 127) << i
    number = code >> 4
    if code & 15 != check_bits(number):
        raise ValueError("no frame number is readable in the top left corner")
    return number


def read_numbers(video: bytes | Path) -> list[int]:
    """The numbers that synthetic_videos.draw_frame_number has written into the frames of a video."""
    return [read_frame_number(frame) for frame in decode(video)]


def numbers_of(folder: Path, field: str = "key") -> dict[str, list[int]]:
    """The frame numbers in every sample of a dataset, by a field of it."""
    samples = all_samples(folder)
    return {getattr(sample, field): read_numbers(video_bytes(folder, shard, sample)) for shard, sample in samples}


def write_noise(path: Path, container: str, num_frames: int, options: dict[str, str], side: int = 64) -> Path:
    """Write noise that moves, with the number of each frame: every picture is thousands of bytes, so that damage hits
    pictures."""
    noise = np.random.default_rng(0).integers(0, 256, (side * 3 // 4, side, 3), np.uint8)
    with av.open(str(path), "w", format=container, options={"movflags": "+faststart"}) as output:
        stream = output.add_stream("libx264", rate=30, options={"sc_threshold": "0", "preset": "ultrafast"} | options)
        stream.width, stream.height, stream.pix_fmt = side, side * 3 // 4, "yuv420p"
        for number in range(num_frames):
            picture = np.roll(noise, (3 * number, 5 * number), (0, 1))
            draw_frame_number(picture, number)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        output.mux(stream.encode(None))
    return path
