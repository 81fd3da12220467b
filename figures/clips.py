"""Read clips for figures, from shards and from whatever shards can be made of."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from adamae.common.arithmetic import ceil_div
from adamae.common.errors import InputError
from adamae.common.logging import log, printable
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.sources import decode_frames, scale_frames
from adamae.pipeline.planning.crops import FrameSize, view_crop
from adamae.pipeline.planning.plan import check_strides, frame_step, strided_frames
from adamae.pipeline.reading.storage import is_remote
from adamae.pipeline.shards.arrays import FPS, is_array, map_frames
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import DATASET_FILE, Sample
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.segment import Segment
from adamae.pipeline.videos.source_video import SourceVideo
from adamae.shard_tools.inputs import Item, ListOptions, read_inputs
from adamae.shard_tools.inputs.location import local_copy


class Clip(NamedTuple):
    """Frames of a video, and what a figure says of them."""

    # Of the video, made unique.
    name: str
    frames: UInt8[Tensor, "T H W C"]
    # The file, or the tar that it is in.
    video: Path
    # Of the frames in the video as stored.
    numbers: list[int]
    # Of the frames, seconds.
    times: list[float]
    # File name and class, for people.
    title: str


class Source(NamedTuple):
    """A video to read a clip of."""

    name: str
    title: str
    # The file, or the tar that it is in.
    file: Path
    # Gives what decode_frames takes: a stored video's bytes, or a file.
    open: Callable[[], AbstractContextManager[bytes | Path]]
    # Of a video in shards.
    sample: Sample | None = None
    # Of a video in a list: the part that is asked for, and why there is none.
    segment: Segment | None = None
    problem: str | None = None


class FrameRange(NamedTuple):
    """Frames of a video that follow each other."""

    first: int
    num_frames: int
    fps: float


def read_clips(
    places: Sequence[Path | str | ShardDataset],
    num_frames: int,
    image_size: int | Sequence[int],
    data: DataConfig,
    limit: int,
) -> Iterator[Clip]:
    """Read a clip from the middle of each video, as data.frame_stride or data.fps say, scaled and
    center cropped.

    A place is shards (a folder, a URL, or opened), or whatever shards can be made of: a video, a
    folder, a list, a tar. Of each place `limit` evenly spread videos are read; one that does not
    decode is skipped and named on stderr. Raise InputError for a place without a video, and for a
    single video that does not decode.
    """
    used: set[str] = set()
    for place in places:
        sources = list(_list_sources(place, data))
        step_between = ceil_div(len(sources), limit)
        for source in sources[::step_between]:
            try:
                frames, numbers, fps = _read_middle(source, num_frames, image_size, data)
            except VideoError as error:
                if len(sources) == 1 and source.sample is None:
                    raise InputError(f"{place} cannot be decoded: {error}") from error
                log(
                    f"skipped {printable(source.name)}, which cannot be decoded: {error}",
                    sys.stderr,
                )
                continue
            name = _make_unique(source.name, used)
            used.add(name)
            times = [number / fps for number in numbers]
            yield Clip(name, frames, source.file, numbers, times, source.title)


def _read_middle(
    source: Source, num_frames: int, image_size: int | Sequence[int], data: DataConfig
) -> tuple[UInt8[Tensor, "T H W C"], list[int], float]:
    """Return the clip in the middle of a video, the numbers of its frames, and the video's frame
    rate.
    """
    if source.problem is not None:
        raise VideoError(source.problem)
    with source.open() as content:
        if source.sample is not None:
            stored_stride = source.sample.frame_stride
            num_stored = source.sample.num_frames
            frames = FrameRange(0, num_stored, source.sample.fps)
        else:
            assert isinstance(content, Path)
            stored_stride = 1
            num_stored = None
            frames = find_frames(content, source.segment)
        step = frame_step(frames.fps, stored_stride, data)
        numbers = [
            frames.first + number
            for number in strided_frames(frames.num_frames, num_frames, step, 0.5)
        ]
        clip = resize_and_crop(decode_frames(content, numbers, num_stored), image_size)
        return clip, numbers, frames.fps


def _make_unique(name: str, used: set[str]) -> str:
    """Return the name, with a number behind it where it is used."""
    candidate = name
    for number in count(2):
        if candidate not in used:
            break
        candidate = f"{name}-{number}"
    return candidate


def describe_sample(dataset: ShardDataset, sample: Sample) -> str:
    """Return the name of the file that a video was, and its class."""
    classes = ", ".join(dataset.info.classes[label] for label in sample.labels or ())
    name = " ".join(filter(None, (PurePath(sample.source).name, sample.segment)))
    if not classes:
        return printable(name)
    return f"{printable(name)}\nclass {printable(classes)}"


def _list_sources(place: Path | str | ShardDataset, data: DataConfig) -> Iterator[Source]:
    """Yield the videos of shards, or of whatever shards can be made of. Raise InputError if there
    is none.
    """
    if isinstance(place, ShardDataset):
        yield from _list_samples(place, data)
    elif is_remote(str(place)) or (Path(place) / DATASET_FILE).is_file():
        yield from _list_samples(ShardDataset.open(place), data)
    else:
        for item in read_inputs(str(place), ListOptions(subset="all", unlabeled=True, asks=False)):
            yield _make_source(item)


def _list_samples(dataset: ShardDataset, data: DataConfig) -> Iterator[Source]:
    check_strides(dataset, data)
    for index, sample in enumerate(dataset.samples):
        name = sample.key.replace("/", "_")
        shard = Path(dataset.shards[int(dataset.shard_of(index))])
        yield Source(
            name,
            describe_sample(dataset, sample),
            shard,
            partial(_open_sample, dataset, index),
            sample,
        )


@contextmanager
def _open_sample(dataset: ShardDataset, index: int) -> Iterator[bytes]:
    yield dataset.read_video(index)


def _make_source(item: Item) -> Source:
    """Describe a video that no shard holds; its name is its path, without what only the whole path
    of a list has.
    """
    path = PurePosixPath(item.source).with_suffix("")
    parts = [part for part in path.parts if part not in ("/", "..")]
    segment = None
    if item.segment:
        segment = Segment.parse(item.segment)
        parts.append(item.segment)
    file = Path(item.location if isinstance(item.location, str) else item.location.archive)
    open_here = partial(local_copy, item.location)
    return Source(
        "_".join(parts), printable(item.name), file, open_here, None, segment, item.problem
    )


def resize_and_crop(
    frames: UInt8[np.ndarray, "T H W C"], image_size: int | Sequence[int]
) -> UInt8[Tensor, "T h w C"]:
    """Scale the center of frames, as large as possible, to `image_size`: a square's side, or height
    and width.
    """
    size = FrameSize.of(image_size)
    x, y, width, height = view_crop(frames.shape[2], frames.shape[1], 0, 1, size)
    clip = np.empty((len(frames), *size, frames.shape[3]), np.uint8)
    scale_frames(frames[:, y : y + height, x : x + width], clip)
    return torch.from_numpy(clip)


def find_frames(path: Path, segment: Segment | None) -> FrameRange:
    """Find the frames of a segment, or of all of a video, by decoding them, as containers are not
    always right.
    """
    if is_array(path):
        if segment is not None:
            raise VideoError("segments are cut out of videos, not out of arrays")
        return FrameRange(0, len(map_frames(path)), FPS)
    video = SourceVideo(path)
    first_tick, end = video.find_ticks(segment)
    num_before = 0
    num_shown = 0
    for tick, _ in video.decode(0):
        if tick >= end:
            break
        if tick < first_tick:
            num_before += 1
        else:
            num_shown += 1
    if num_shown == 0:
        raise VideoError("no frame is shown in its segment")
    return FrameRange(num_before, num_shown, float(video.rate))
