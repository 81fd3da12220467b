"""A short way to make shards in tests, and to look at what came out."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.read_format import read_dataset_info, read_samples
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools import make_shards
from adamae.shard_tools.encoding.encode import StoredVideo, encode_segments
from adamae.shard_tools.inputs import Item, ItemStore
from adamae.shard_tools.settings import Settings
from adamae.shard_tools.synthetic_videos import GRID, GRID_FRACTION, check_bits, draw_frame_number

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


def flip(data: bytes, places: Iterable[int], bits: int = 255) -> bytes:
    """Flip bits of some bytes."""
    damaged = bytearray(data)
    for place in places:
        damaged[place] ^= bits
    return bytes(damaged)


def list_segments(videos: Path, path: Path) -> Path:
    """Write a list of some segments of each video, with any number of labels each."""
    rows = [
        {
            "path": str(video),
            "label": ["a", "b"][number % 3 : 2],
            "start": start,
            "end": start + 0.3,
        }
        for number, video in enumerate(sorted(videos.rglob("*.mp4")))
        for start in (0, 0.1, 0.25)
    ]
    path.write_text(json.dumps(rows))
    return path


def collect(items: Iterable[Item], unlabeled: bool = False) -> ItemStore:
    inputs = ItemStore()
    inputs.add(items)
    inputs.deduplicate(unlabeled)
    return inputs


def make(inputs: Path | str, output: Path, *options: str) -> int:
    """make_shards with one worker and no limit on rejects, unless told otherwise; returns its exit code."""
    return make_shards.main(
        [str(inputs), str(output), "--workers", "1", "--max-rejects", "1", *options]
    )


def store(source: Path, **settings: Any) -> StoredVideo:
    """Store all of a video beside it. Raise VideoError."""
    ((_, result),) = encode_segments(
        source, {source.with_name("stored"): None}, Settings(**settings)
    )
    if isinstance(result, VideoError):
        raise result
    return result


def hashes(folder: Path) -> dict[str, bytes]:
    """Every file of a dataset, by name, with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


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
        code |= (
            int(frame[round(y - 1) : round(y + 1), round(x - 1) : round(x + 1)].mean() > 127) << i
        )
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
    return {
        getattr(sample, field): read_numbers(video_bytes(folder, shard, sample))
        for shard, sample in samples
    }


def write_video(
    path: Path,
    frames: Iterable[np.ndarray],
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    times_ms: list[int] | None = None,
    options: dict[str, str] | None = None,
    container: str | None = None,
    rate: int = 25,
    **context: Any,
) -> Path:
    """Encode frames uint8 [H, W, 3], at `rate` or shown at `times_ms`; `context` sets the codec context's fields."""
    muxing = {"movflags": "+faststart"} | ({"avoid_negative_ts": "disabled"} if times_ms else {})
    with av.open(str(path), "w", format=container, options=muxing) as output:
        options = {"bf": "0", "crf": "6", "g": "8"} | (options or {})
        stream: Any = output.add_stream(codec, rate=rate, options=options)
        for number, picture in enumerate(frames):
            if not number:
                height, width = picture.shape[:2]
                unit = Fraction(1, 1000 if times_ms else rate)
                fields = {
                    "height": height,
                    "width": width,
                    "pix_fmt": pixel_format,
                    "time_base": unit,
                }
                for name, value in (fields | context).items():
                    setattr(stream.codec_context, name, value)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(
                format=pixel_format
            )
            frame.time_base = unit
            frame.pts = number if times_ms is None else times_ms[number]
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def write_noise(
    path: Path, container: str, num_frames: int, options: dict[str, str], side: int = 64
) -> Path:
    """Write noise that moves, with the number of each frame: every picture is thousands of bytes, so that damage hits
    pictures."""
    noise = np.random.default_rng(0).integers(0, 256, (side * 3 // 4, side, 3), np.uint8)
    pictures = [np.roll(noise, (3 * number, 5 * number), (0, 1)) for number in range(num_frames)]
    for number, picture in enumerate(pictures):
        draw_frame_number(picture, number)
    options = {
        "sc_threshold": "0",
        "preset": "ultrafast",
        "crf": "23",
        "bf": "-1",
    } | options  # -1: as the preset has it
    return write_video(path, pictures, options=options, container=container, rate=30)
