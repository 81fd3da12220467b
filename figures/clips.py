"""Read clips for figures, from shards and from whatever shards can be made of."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from adamae.common.arithmetic import ceil_div
from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.common.logging import log, printable
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.sources import decode_frames, scale_frames
from adamae.pipeline.planning.crops import FrameSize, view_crop
from adamae.pipeline.planning.plan import check_strides, frame_step, strided_frames
from adamae.pipeline.shards.arrays import FPS, is_array, map_frames
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import DATASET_FILE, Sample
from adamae.pipeline.shards.read_format import find_splits
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.segment import Segment
from adamae.pipeline.videos.source_video import SourceVideo
from adamae.shard_tools.inputs import Item, ListOptions, read_inputs
from adamae.shard_tools.inputs.location import local_copy


class Clip(NamedTuple):
    """Frames of a video, and what figures need to know about them."""

    # The name of the video, made unique.
    name: str
    frames: UInt8[Tensor, "T H W C"]
    # The file of the video, or the tar that it is in.
    video: Path
    # The numbers of the frames in the video as stored.
    numbers: list[int]
    # The times of the frames, in seconds.
    times: list[float]
    # The file name and the class, for people.
    title: str


class Source(NamedTuple):
    """A video to read a clip of."""

    name: str
    title: str
    # The file of the video, or the tar that it is in.
    file: Path
    # Yields what decode_frames takes: the bytes of a stored video, or a file, which may be
    # temporary.
    open: Callable[[], AbstractContextManager[bytes | Path]]
    # Only videos in shards have one.
    sample: Sample | None = None
    # The part that a list asks for.
    segment: Segment | None = None
    # Why a list's video cannot be read.
    problem: str | None = None


class FrameRange(NamedTuple):
    """Consecutive frames of a video, and their rate."""

    first: int
    num_frames: int
    fps: float


def read_clips(
    locations: Sequence[Path | str | ShardDataset],
    num_frames: int,
    image_size: int | Sequence[int],
    data: DataConfig,
    limit: int,
) -> Iterator[Clip]:
    """Read a clip from the middle of each video, scaled and center cropped.

    A location is shards (a folder, a URL, or opened), or whatever shards can be made of: a video, a
    folder, a list, a tar. Of each one, up to `limit` evenly spread videos are read. A video that
    does not decode is skipped and named on stderr. `data` sets the distance of frames. Raise
    InputError for a location without a video, and for a single video that does not decode.
    """
    used_names: set[str] = set()
    for location in locations:
        sources = list(_list_sources(location, data))
        # Of 10 videos and a limit of 4, the first, fourth, seventh and tenth are read.
        step = ceil_div(len(sources), limit)
        for source in sources[::step]:
            try:
                frames, numbers, fps = _read_middle(source, num_frames, image_size, data)
            except VideoError as error:
                if len(sources) == 1 and source.sample is None:
                    raise InputError(f"{location} cannot be decoded: {error}") from error
                name = printable(source.name)
                log(f"skipped {name}, which cannot be decoded: {error}", sys.stderr)
                continue
            name = _make_unique(source.name, used_names)
            used_names.add(name)
            times = [number / fps for number in numbers]
            yield Clip(name, frames, source.file, numbers, times, source.title)


def _read_middle(
    source: Source, num_frames: int, image_size: int | Sequence[int], data: DataConfig
) -> tuple[UInt8[Tensor, "T H W C"], list[int], float]:
    """Return the clip in the middle of a video, its frames' numbers, and the video's frame rate."""
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
        # 0.5: half of the frames that the clip leaves out lie before it.
        offsets = strided_frames(frames.num_frames, num_frames, step, 0.5)
        numbers = [frames.first + offset for offset in offsets]
        clip = resize_and_crop(decode_frames(content, numbers, num_stored), image_size)
        return clip, numbers, frames.fps


def _make_unique(name: str, used_names: set[str]) -> str:
    """Return the name, or if it is used, "name-2" or the next number that is not."""
    candidate = name
    number = 1
    while candidate in used_names:
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def describe_sample(dataset: ShardDataset, sample: Sample) -> str:
    """Return the name of the file that a video was, and its class."""
    classes = ", ".join(dataset.info.classes[label] for label in sample.labels or ())
    name = PurePath(sample.source).name
    if sample.segment:
        name = f"{name} {sample.segment}"
    if not classes:
        return printable(name)
    return f"{printable(name)}\nclass {printable(classes)}"


def _list_sources(location: Path | str | ShardDataset, data: DataConfig) -> Iterator[Source]:
    """Yield the videos of a location; raise InputError if there is none."""
    if isinstance(location, ShardDataset):
        yield from _list_samples(location, data)
    elif is_remote(str(location)) or _is_of_shards(Path(location)):
        yield from _list_samples(ShardDataset.open(location), data)
    else:
        # Figures need no labels, so no question about them or about subsets is worth an error.
        options = ListOptions(subset="all", unlabeled=True, asks=False)
        for item in read_inputs(str(location), options):
            yield _make_source(item)


def _is_of_shards(folder: Path) -> bool:
    """Return whether a folder is a dataset, or holds splits: of these, the error names each."""
    return (folder / DATASET_FILE).is_file() or bool(find_splits(folder))


def _list_samples(dataset: ShardDataset, data: DataConfig) -> Iterator[Source]:
    check_strides(dataset, data)
    for index, sample in enumerate(dataset.samples):
        yield Source(
            name=sample.key.replace("/", "_"),
            title=describe_sample(dataset, sample),
            file=Path(dataset.shards[int(dataset.shard_of(index))]),
            open=partial(_open_sample, dataset, index),
            sample=sample,
        )


@contextmanager
def _open_sample(dataset: ShardDataset, index: int) -> Iterator[bytes]:
    yield dataset.read_video(index)


def _make_source(item: Item) -> Source:
    """Describe a video that no shard holds; its name is that of its path, without `/` and `..`."""
    path = PurePosixPath(item.source).with_suffix("")
    parts = [part for part in path.parts if part not in ("/", "..")]
    segment = None
    if item.segment:
        segment = Segment.parse(item.segment)
        parts.append(item.segment)
    # A location is a path, or a member of a tar.
    file = item.location if isinstance(item.location, str) else item.location.archive
    return Source(
        name="_".join(parts),
        title=printable(item.name),
        file=Path(file),
        open=partial(local_copy, item.location),
        segment=segment,
        problem=item.problem,
    )


def resize_and_crop(
    frames: UInt8[np.ndarray, "T H W C"], image_size: int | Sequence[int]
) -> UInt8[Tensor, "T h w C"]:
    """Scale the center of frames, as large as possible, to a side, or to height and width."""
    size = FrameSize.of(image_size)
    num_frames, frame_height, frame_width, num_channels = frames.shape
    x, y, width, height = view_crop(frame_width, frame_height, 0, 1, size)
    center = frames[:, y : y + height, x : x + width]
    clip = np.empty((num_frames, *size, num_channels), np.uint8)
    scale_frames(center, clip)
    return torch.from_numpy(clip)


def find_frames(path: Path, segment: Segment | None) -> FrameRange:
    """Find the frames of a segment, or of a whole video, by decoding: containers may be wrong."""
    if is_array(path):
        if segment is not None:
            raise VideoError("segments are cut out of videos, not out of arrays")
        return FrameRange(0, len(map_frames(path)), FPS)
    video = SourceVideo(path)
    first_tick, end = video.find_ticks(segment)
    num_before = 0
    num_frames = 0
    for tick, _ in video.decode(0):
        if tick >= end:
            break
        if tick < first_tick:
            num_before += 1
        else:
            num_frames += 1
    if num_frames == 0:
        raise VideoError("no frame is shown in its segment")
    return FrameRange(num_before, num_frames, float(video.rate))
