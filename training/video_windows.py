"""Read windows of frames along videos, from shards or from anything shards can be made of."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import UInt8

from adamae.common.errors import DISK_FULL, InputError
from adamae.common.locations import is_remote
from adamae.figures.clips import resize_and_crop
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.video import Video
from adamae.pipeline.decoding.video_source import Scaler
from adamae.pipeline.planning.crops import FrameSize, view_crop
from adamae.pipeline.planning.plan import check_strides, clip_offsets, frame_step
from adamae.pipeline.shards import arrays
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import DATASET_FILE, Sample
from adamae.pipeline.shards.read_format import find_splits
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.orientation import display_size, find_flips
from adamae.pipeline.videos.segment import Segment
from adamae.pipeline.videos.source_video import SourceVideo
from adamae.shard_tools.inputs import Item, ListOptions, read_inputs
from adamae.shard_tools.inputs.location import local_copy
from adamae.shard_tools.plan import make_key

# Frame rates and steps are made fractions, so that the times of an hour's frames do not drift.
MAX_DENOMINATOR = 100_000

Image = UInt8[np.ndarray, "H W C"]


class SampledFrame(NamedTuple):
    """A frame, cropped and scaled for the model."""

    # The number of the frame in the source, counted from the first one of the video or segment.
    number: int
    # Seconds in the source.
    time: float
    image: Image


class DecodedFrame(NamedTuple):
    """A frame of a video as it is stored."""

    # Counted in stored frames, from the first one of the video or segment.
    number: int
    # Seconds in the source.
    time: float
    # Crops and scales the frame for the model, which takes longer than decoding it.
    render: Callable[[], Image]


class DecodedVideo(NamedTuple):
    """A video that is being decoded."""

    # The distance of sampled frames, in stored frames. Below 1, some frames are sampled twice.
    step: float
    # The distance of stored frames, in frames of the source.
    stored_stride: int
    # All stored frames, in order.
    frames: Iterator[DecodedFrame]

    def sample(self, frame: DecodedFrame) -> SampledFrame:
        return SampledFrame(frame.number * self.stored_stride, frame.time, frame.render())


@dataclass
class ListedVideo:
    """A video or segment to be read, and what is known once it has been read."""

    # A name that no other video has, such as walk/person01.
    key: str
    source: str
    label: str
    # The part of the source, t=1.5,4 (seconds) or frames=10,50; "": all of it.
    segment: str
    fields: dict[str, Any]
    # Starts to decode; this or the iteration over the frames raises VideoError or OSError at
    # damage.
    open: Callable[[], AbstractContextManager[DecodedVideo]]
    # The time of the first frame in the source, in seconds.
    offset: float = 0.0
    # Why frames at the end are missing; "": none are.
    incomplete: str = ""
    # Whether frames are sampled twice, since the video has fewer per second than are sampled.
    repeats_frames: bool = False

    def frames(self) -> Iterator[SampledFrame]:
        """Yield the frames nearest to times that lie a step apart, from the first frame on."""
        with self.open() as video:
            step = exact_step(video.step)
            index = 0
            for frame in video.frames:
                while round_half_up(index * step) == frame.number:
                    yield video.sample(frame)
                    index += 1


class Window(NamedTuple):
    """Frames of a video that are encoded together; one without frames marks the video's end."""

    video: ListedVideo
    frames: list[SampledFrame]


class WindowBuilder:
    """Collects the frames of the windows of a video, while it is being decoded.

    A window has the frames that training takes of a clip with the same first frame (of padded
    windows, with the same last frame). At 25 frames per second and 8 sampled ones, 3.125 apart, two
    windows of 4 that slide by 2 have the frames 0 3 6 9 and 6 9 12 15.
    """

    def __init__(self, video: DecodedVideo, length: int, stride: int, pad: bool) -> None:
        self._video = video
        self._stride = stride * exact_step(video.step)
        self._offsets = clip_offsets(length, video.step)
        self._pad = pad
        # The frames that windows wait for or have in common, by their numbers.
        self._frames: dict[int, SampledFrame] = {}
        self._last: DecodedFrame | None = None
        # The numbers of the frames of each window that has begun and is not complete.
        self._begun: deque[list[int]] = deque()
        self._num_begun = 0
        self._next = self._choose_numbers(0)
        self._is_any_complete = False

    def add(self, frame: DecodedFrame) -> Iterator[list[SampledFrame]]:
        """Take the next frame of the video; yield the windows that end with it."""
        self._last = frame
        while self._next[0] <= frame.number:
            self._begun.append(self._next)
            self._num_begun += 1
            self._next = self._choose_numbers(self._num_begun)
        if any(frame.number in numbers for numbers in self._begun):
            self._frames[frame.number] = self._video.sample(frame)
        while self._begun and self._begun[0][-1] == frame.number:
            self._is_any_complete = True
            numbers = self._begun.popleft()
            yield [self._frames[number] for number in numbers]
        first_needed = self._begun[0][0] if self._begun else self._next[0]
        for number in [number for number in self._frames if number < first_needed]:
            del self._frames[number]

    def finish(self) -> Iterator[list[SampledFrame]]:
        """Yield the only window of a video that is shorter than one: its last frame is repeated."""
        if self._last is None or self._is_any_complete:
            return
        last = self._last.number
        self._frames[last] = self._video.sample(self._last)
        yield [self._frames[min(number, last)] for number in self._begun[0]]

    def _choose_numbers(self, index: int) -> list[int]:
        """Return the numbers of a window's frames; before the first frame, that is repeated."""
        anchor = round_half_up(index * self._stride)
        if self._pad:
            anchor -= self._offsets[-1]
        return [max(0, anchor + offset) for offset in self._offsets]


@dataclass(frozen=True)
class WindowReader:
    """Reads videos in windows of `length` sampled frames, which slide by `stride` of them.

    With 4 frames and a stride of 2, windows are 0 1 2 3, 2 3 4 5, … With `pad`, they end at the
    first frame and at every stride-th after it, and the first frame is repeated before them:
    0 0 0 0, 0 0 1 2, 1 2 3 4, … as a policy sees a video that has just begun.
    """

    data: DataConfig
    size: FrameSize
    length: int = 1
    stride: int = 1
    pad: bool = False

    def list_videos(self, path: str, columns: str | None = None) -> Iterator[ListedVideo]:
        """Yield all videos of a path, in the same order every time.

        path: shards, a folder of shards (splits), or any input of make_shards.py.
        columns: what the columns of a list hold, as --columns of make_shards.py.
        """
        datasets = open_datasets(path)
        if datasets and columns is not None:
            raise InputError(f"--columns is for lists, and {path} holds shards: leave it out")
        for prefix, dataset in datasets.items():
            yield from self.list_samples(dataset, prefix)
        if datasets:
            return
        options = ListOptions(columns=columns, takes_columns=True, subset="all", asks=False)
        for item in read_inputs(path, options):
            yield self._list_item(item)

    def list_samples(self, dataset: ShardDataset, prefix: str = "") -> Iterator[ListedVideo]:
        """Yield the videos of shards; their keys begin with `prefix`.

        Raise InputError if the frames of the configured stride are not stored.
        """
        check_strides(dataset, self.data, "--frame-stride ", "--fps ")
        for index, sample in enumerate(dataset.samples):
            label = ", ".join(dataset.info.classes[label] for label in sample.labels or ())
            start = partial(self._open_sample, dataset, index)
            yield ListedVideo(
                prefix + sample.key, sample.source, label, sample.segment, sample.fields, start
            )

    def _list_item(self, item: Item) -> ListedVideo:
        key = item.name
        # A list may name a video outside of its folder, whose path would lead out of the output.
        if item.source.startswith(("../", "/")):
            key = make_key(item.source, item.segment)
        label = ", ".join(item.labels or ())
        fields = json.loads(item.fields or "{}")
        return ListedVideo(
            key, item.source, label, item.segment, fields, partial(self._open_item, item)
        )

    def find_segment(self, path: str, start: float, end: float) -> ListedVideo:
        """Return the part of a video that is shown from `start` to before `end`, in seconds.

        Raise InputError if `path` is not a single video.
        """
        item = find_video(path)
        if start > 0 or end < math.inf:
            item = msgspec.structs.replace(item, segment=str(Segment(start, end)))
        return self._list_item(item)

    def measure_window(self, path: str) -> float:
        """Return how many seconds of a video a window lasts; raise InputError if it has no rate."""
        with local_copy(find_video(path).location) as file:
            try:
                rate = float(SourceVideo(file).rate)
            except (VideoError, OSError) as error:
                raise InputError(f"{path} cannot be read: {error}") from error
        return self.length * frame_step(rate, 1, self.data) / rate

    def read_windows(self, video: ListedVideo) -> Iterator[Window]:
        """Yield the windows of a video, then one without frames.

        Set the video's `offset` and `incomplete`. A video that is shorter than a window repeats its
        last frame; one that breaks off before its first window has none.
        """
        builder = None
        try:
            with video.open() as decoded:
                video.repeats_frames = decoded.step < 1
                builder = WindowBuilder(decoded, self.length, self.stride, self.pad)
                for frame in decoded.frames:
                    if frame.number == 0:
                        video.offset = frame.time
                    for frames in builder.add(frame):
                        yield Window(video, frames)
        except (VideoError, OSError) as error:
            # A full disk, onto which a tar's video is copied, is no damage of the video.
            if getattr(error, "errno", None) in DISK_FULL:
                raise
            video.incomplete = str(error)
        if builder is not None and not video.incomplete:
            for frames in builder.finish():
                yield Window(video, frames)
        yield Window(video, [])

    @contextmanager
    def _open_sample(self, dataset: ShardDataset, index: int) -> Iterator[DecodedVideo]:
        """Decode a video of shards."""
        sample = dataset.samples[index]
        content = dataset.read_video(index)
        step = frame_step(sample.fps, sample.frame_stride, self.data)
        if arrays.is_array(content):
            yield DecodedVideo(step, sample.frame_stride, self._read_array(content))
            return
        yield DecodedVideo(step, sample.frame_stride, self._decode_sample(sample, content))

    def _decode_sample(self, sample: Sample, content: bytes) -> Iterator[DecodedFrame]:
        # The rate is stored as a float: 29.97 again becomes 30000/1001, and times are exact.
        rate = Fraction(sample.fps).limit_denominator(MAX_DENOMINATOR)
        scaler = make_scaler(sample.width, sample.height, self.size)
        video = Video(content, sample.num_frames)
        for number, frame in video.frames(range(sample.num_frames)):
            time = sample.start + float(number / rate)
            yield DecodedFrame(number, time, partial(scaler, frame))

    @contextmanager
    def _open_item(self, item: Item) -> Iterator[DecodedVideo]:
        """Decode a video file as a stream, with numbers and times as make_shards.py gives them."""
        if item.problem:
            raise VideoError(item.problem)
        with local_copy(item.location) as path:
            if arrays.is_array(path):
                if item.segment:
                    raise VideoError("segments are cut out of videos, not out of arrays")
                step = frame_step(float(arrays.FPS), 1, self.data)
                yield DecodedVideo(step, 1, self._read_array(path))
                return
            video = SourceVideo(path)
            step = frame_step(float(video.rate), 1, self.data)
            yield DecodedVideo(step, 1, self._decode_file(video, item))

    def _decode_file(self, video: SourceVideo, item: Item) -> Iterator[DecodedFrame]:
        segment = Segment.parse(item.segment) if item.segment else None
        first_tick, _ = video.find_ticks(segment)
        scaler = None
        for tick, frame in video.frames(segment, 1):
            # How a video is to be turned stands in its first frame.
            if scaler is None:
                width, height = display_size(frame, video.pixel_aspect, find_flips(frame))
                scaler = make_scaler(round(width), round(height), self.size)
            time = float(tick / video.rate)
            yield DecodedFrame(int(tick) - first_tick, time, partial(scaler, frame))

    def _read_array(self, array: bytes | Path) -> Iterator[DecodedFrame]:
        """Read the frames of an array, which counts as arrays.FPS frames per second."""
        frames = arrays.map_frames(array)
        for number in range(len(frames)):
            render = partial(self._crop_array, frames[number : number + 1])
            yield DecodedFrame(number, number / arrays.FPS, render)

    def _crop_array(self, frames: UInt8[np.ndarray, "1 H W C"]) -> Image:
        return resize_and_crop(frames, self.size)[0].numpy()


def open_datasets(path: str) -> dict[str, ShardDataset]:
    """Open the shards at a path, by a prefix that tells their keys apart; return {} for videos.

    The shards of a folder of train/ and validation/ have the prefixes "train/" and "validation/".
    """
    if is_remote(path) or (Path(path) / DATASET_FILE).is_file():
        return {"": ShardDataset.open(path)}
    splits = find_splits(Path(path))
    return {f"{split.name}/": ShardDataset.open(split) for split in splits}


def find_video(path: str) -> Item:
    """Return the only video of a path; raise InputError if it has none or several."""
    items = list(islice(read_inputs(path, ListOptions(subset="all", asks=False)), 2))
    if len(items) != 1:
        raise InputError(f"{path} has several videos: give one of them")
    return items[0]


def make_scaler(width: int, height: int, size: FrameSize) -> Scaler:
    """Return the scaler that crops the center of frames that are shown in this width and height."""
    return Scaler(view_crop(width, height, 0, 1, size), False, size, (width, height))


def exact_step(step: float) -> Fraction:
    """Return the fraction that a step between frames is, such as 25/8 for 3.125."""
    return Fraction(step).limit_denominator(MAX_DENOMINATOR)


def round_half_up(value: Fraction) -> int:
    """Round as training does: 12.5 becomes 13."""
    return math.floor(value + Fraction(1, 2))
