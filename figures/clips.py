"""Read clips for figures: from video files, folders of them, and shards."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from common.arithmetic import ceil_div
from common.errors import InputError
from common.logging import log, printable
from pipeline.config import DataConfig
from pipeline.decoding.containers import VIDEO_EXTENSIONS
from pipeline.decoding.sources import decode_frames, scale_frames
from pipeline.planning.crops import FrameSize, view_crop
from pipeline.planning.plan import check_strides, frame_step, strided_frames
from pipeline.reading.storage import is_remote
from pipeline.shards.arrays import FPS, is_array, map_frames
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import DATASET_FILE, Sample
from pipeline.video_error import VideoError
from shard_tools.encoding.picture import UnusableError
from shard_tools.encoding.source import open_source, read_frames, read_timing


class Clip(NamedTuple):
    name: str  # of the video, made unique
    frames: UInt8[Tensor, "T H W C"]
    video: Path  # the file, or the tar that it is in
    numbers: list[int]  # of the frames in the video as stored
    times: list[float]  # of the frames, seconds
    title: str  # file name and class, for people


class Source(NamedTuple):
    """A video."""

    name: str
    title: str
    file: Path  # or the tar that it is in
    read: Callable[[], bytes | Path]  # returns what decode_frames takes
    sample: Sample | None = None  # of shards


def read_clips(
    places: Sequence[Path | str | ShardDataset],
    num_frames: int,
    image_size: int | Sequence[int],
    data: DataConfig,
    limit: int,
) -> Iterator[Clip]:
    """Read a clip from the middle of each video, as data.frame_stride or data.fps say, scaled and center cropped.

    A place is a video file, a folder of videos, or shards: a folder, a URL, or opened. Of all but a file, `limit`
    evenly spread videos are read; one that does not decode is skipped and named on stderr. Raises InputError for a
    place without a video, and for a file that does not decode.
    """
    used: set[str] = set()
    for place in places:
        sources = list(_list_sources(place, data))
        if not sources:
            raise InputError(f"{place} holds no video: give a video file, a folder of videos or a folder of shards")
        for source in sources[:: ceil_div(len(sources), limit)]:
            sample = source.sample
            try:
                total, fps = (sample.num_frames, sample.fps) if sample else count_frames(source.file)
                step = frame_step(fps, sample.frame_stride if sample else 1, data)
                numbers = list(strided_frames(total, num_frames, step, 0.5))
                stored = decode_frames(source.read(), numbers, total if sample else None)
                frames = resize_and_crop(stored, image_size)
            except (VideoError, UnusableError) as error:
                if not isinstance(place, ShardDataset) and Path(place).is_file():
                    raise InputError(f"{place} cannot be decoded: {error}") from error
                log(f"skipped {printable(source.name)}, which cannot be decoded: {error}", sys.stderr)
                continue
            candidates = (source.name if number == 1 else f"{source.name}-{number}" for number in count(1))
            name = next(candidate for candidate in candidates if candidate not in used)
            used.add(name)
            yield Clip(name, frames, source.file, numbers, [number / fps for number in numbers], source.title)


def describe_sample(dataset: ShardDataset, sample: Sample) -> str:
    """Return the name of the file that a video was, and its class."""
    classes = ", ".join(dataset.info.classes[label] for label in sample.labels or ())
    name = " ".join(filter(None, (PurePath(sample.source).name, sample.segment)))
    return printable(name) + f"\nclass {printable(classes)}" * bool(classes)


def _list_sources(place: Path | str | ShardDataset, data: DataConfig) -> Iterator[Source]:
    if isinstance(place, ShardDataset) or is_remote(str(place)) or (Path(place) / DATASET_FILE).is_file():
        dataset = place if isinstance(place, ShardDataset) else ShardDataset.open(place)
        check_strides(dataset, data)
        for index, sample in enumerate(dataset.samples):
            shard, title = Path(dataset.shards[int(dataset.shard_of(index))]), describe_sample(dataset, sample)
            yield Source(sample.key.replace("/", "_"), title, shard, partial(dataset.read_video, index), sample)
        return
    path = Path(place)
    if not path.exists():
        raise InputError(f"{path} does not exist: give a video file, a folder of videos or a folder of shards")
    if path.is_file():
        yield Source(path.stem, printable(path.name), path, partial(Path, path))
    for file in sorted(path.rglob("*")):
        if file.suffix.lower().removeprefix(".") in VIDEO_EXTENSIONS and file.is_file():
            name = file.relative_to(path)
            yield Source("_".join(name.with_suffix("").parts), printable(name), file, partial(Path, file))


def resize_and_crop(frames: UInt8[np.ndarray, "T H W C"], image_size: int | Sequence[int]) -> UInt8[Tensor, "T h w C"]:
    """Scale the center of frames, as large as possible, to `image_size`: a square's side, or height and width."""
    size = FrameSize.of(image_size)
    x, y, width, height = view_crop(frames.shape[2], frames.shape[1], 0, 1, size)
    clip = np.empty((len(frames), *size, frames.shape[3]), np.uint8)
    scale_frames(frames[:, y : y + height, x : x + width], clip)
    return torch.from_numpy(clip)


def count_frames(video: Path) -> tuple[int, float]:
    """Decode a video to count its frames, as containers are not always right; return the frame rate too."""
    if is_array(video):
        return len(map_frames(video)), FPS
    with open_source(video) as (container, stream):
        fps = float(read_timing(container, stream).rate)
    with open_source(video) as (container, stream):
        return sum(1 for _ in read_frames(container, stream)), fps
