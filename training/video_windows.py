"""Read windows of frames along videos, from shards or from anything shards can be made of."""

import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from adamae.common.errors import DISK_FULL
from adamae.common.logging import log, printable
from adamae.figures.clips import resize_and_crop
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.video import Video
from adamae.pipeline.decoding.video_source import Scaler
from adamae.pipeline.planning.crops import FrameSize, view_crop
from adamae.pipeline.planning.plan import check_strides, frame_step
from adamae.pipeline.reading.storage import is_remote
from adamae.pipeline.shards import arrays
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import DATASET_FILE
from adamae.pipeline.shards.read_format import find_splits
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.orientation import display_size, find_flips
from adamae.pipeline.videos.segment import Segment
from adamae.pipeline.videos.source_video import SourceVideo, subsample
from adamae.shard_tools.inputs import Item, ListOptions, read_inputs
from adamae.shard_tools.inputs.location import local_copy
from adamae.shard_tools.plan import make_key

# Frame rates and steps are made fractions, so that the times of an hour's frames do not drift.
MAX_DENOMINATOR = 100_000


class SampledFrame(NamedTuple):
    """A frame, cropped and scaled for the model."""

    # The number of the frame in the source, counted from the first one of the video or segment.
    number: int
    # Seconds in the source.
    time: float
    image: UInt8[np.ndarray, "H W C"]


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
    # Starts to decode, and yields sampled frames; raises VideoError or OSError at damage.
    frames: Callable[[], Iterator[SampledFrame]]
    # The time of the first frame in the source, in seconds.
    offset: float = 0.0
    # Why frames at the end are missing; "": none are.
    incomplete: str = ""


class Window(NamedTuple):
    """Frames of a video that are encoded together; one without frames marks the video's end."""

    video: ListedVideo
    frames: list[SampledFrame]


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

    def list_videos(self, path: str) -> Iterator[ListedVideo]:
        """Yield all videos of a path, in the same order every time.

        path: shards, a folder of shards (splits), or any input of make_shards.py.
        """
        if is_remote(path) or (Path(path) / DATASET_FILE).is_file():
            yield from self.list_samples(ShardDataset.open(path))
            return
        splits = find_splits(Path(path))
        for split in splits:
            yield from self.list_samples(ShardDataset.open(split), f"{split.name}/")
        if splits:
            return
        for item in read_inputs(path, ListOptions(subset="all", asks=False)):
            yield self._list_item(item)

    def list_samples(self, dataset: ShardDataset, prefix: str = "") -> Iterator[ListedVideo]:
        """Yield the videos of shards; their keys begin with `prefix`.

        Raise InputError if the frames of the configured stride are not stored.
        """
        check_strides(dataset, self.data)
        for index, sample in enumerate(dataset.samples):
            label = ", ".join(dataset.info.classes[label] for label in sample.labels or ())
            frames = partial(self._read_sample, dataset, index)
            yield ListedVideo(
                prefix + sample.key, sample.source, label, sample.segment, sample.fields, frames
            )

    def _list_item(self, item: Item) -> ListedVideo:
        key = item.name
        # A list may name a video outside of its folder, whose path would lead out of the output.
        if item.source.startswith(("../", "/")):
            key = make_key(item.source, item.segment)
        label = ", ".join(item.labels or ())
        fields = json.loads(item.fields or "{}")
        return ListedVideo(
            key, item.source, label, item.segment, fields, partial(self._read_item, item)
        )

    def read_windows(self, video: ListedVideo) -> Iterator[Window]:
        """Yield the windows of a video, then one without frames.

        Set the video's `offset` and `incomplete`. A video that is shorter than a window repeats its
        last frame; one that breaks off before its first window has none.
        """
        held: deque[SampledFrame] = deque(maxlen=self.length)
        num_frames = 0
        first_end = 1 if self.pad else self.length
        try:
            for num_frames, frame in enumerate(video.frames(), 1):
                if num_frames == 1:
                    video.offset = frame.time
                    held.extend([frame] * (self.length - first_end))
                held.append(frame)
                if num_frames >= first_end and (num_frames - first_end) % self.stride == 0:
                    yield Window(video, list(held))
        except (VideoError, OSError) as error:
            # A full disk, onto which a tar's video is copied, is no damage of the video.
            if getattr(error, "errno", None) in DISK_FULL:
                raise
            video.incomplete = str(error)
        if 0 < num_frames < first_end and not video.incomplete:
            while len(held) < self.length:
                held.append(held[-1])
            yield Window(video, list(held))
        yield Window(video, [])

    def _read_sample(self, dataset: ShardDataset, index: int) -> Iterator[SampledFrame]:
        """Decode a video of shards."""
        sample = dataset.samples[index]
        content = dataset.read_video(index)
        # The rate is stored as a float: 29.97 again becomes 30000/1001, and times are exact.
        rate = Fraction(sample.fps).limit_denominator(MAX_DENOMINATOR)
        step = self._find_step(sample.source, rate, sample.frame_stride)
        if arrays.is_array(content):
            yield from self._read_array(content, step)
            return
        scaler = make_scaler(sample.width, sample.height, self.size)
        frames = Video(content, sample.num_frames).frames(range(sample.num_frames))
        for tick, frame in subsample(frames, step):
            time = sample.start + float(tick / rate)
            yield SampledFrame(int(tick) * sample.frame_stride, time, scaler(frame))

    def _read_item(self, item: Item) -> Iterator[SampledFrame]:
        """Decode a video file as a stream, with numbers and times as make_shards.py gives them."""
        if item.problem:
            raise VideoError(item.problem)
        with local_copy(item.location) as path:
            if not arrays.is_array(path):
                yield from self._read_video(SourceVideo(path), item)
                return
            if item.segment:
                raise VideoError("segments are cut out of videos, not out of arrays")
            step = self._find_step(item.source, Fraction(arrays.FPS))
            yield from self._read_array(path, step)

    def _read_video(self, video: SourceVideo, item: Item) -> Iterator[SampledFrame]:
        step = self._find_step(item.source, video.rate)
        segment = Segment.parse(item.segment) if item.segment else None
        first_tick, _ = video.find_ticks(segment)
        scaler = None
        for tick, frame in video.frames(segment, step):
            # How a video is to be turned stands in its first frame.
            if scaler is None:
                width, height = display_size(frame, video.pixel_aspect, find_flips(frame))
                scaler = make_scaler(round(width), round(height), self.size)
            time = float(tick / video.rate)
            yield SampledFrame(int(tick - first_tick), time, scaler(frame))

    def _read_array(self, array: bytes | Path, step: Fraction) -> Iterator[SampledFrame]:
        """Sample frames of an array, which counts as arrays.FPS frames per second."""
        frames = arrays.map_frames(array)
        num_sampled = math.ceil(len(frames) / step)
        for index in range(num_sampled):
            number = int(index * step)
            image = resize_and_crop(frames[number : number + 1], self.size)[0]
            yield SampledFrame(number, number / arrays.FPS, image.numpy())

    def _find_step(self, source: str, fps: Fraction, stored_stride: int = 1) -> Fraction:
        """Return the distance of sampled frames, in frames of a video that has `fps`.

        stored_stride: how many frames of the source each of these stands for.
        """
        step = frame_step(float(fps), stored_stride, self.data)
        if step < 1:
            log(
                f"{printable(source)} has {float(fps):g} frames a second: some are repeated for"
                f" --fps {self.data.fps:g}",
                sys.stderr,
            )
        return Fraction(step).limit_denominator(MAX_DENOMINATOR)


def make_scaler(width: int, height: int, size: FrameSize) -> Scaler:
    """Return the scaler that crops the center of frames that are shown in this width and height."""
    return Scaler(view_crop(width, height, 0, 1, size), False, size, (width, height))
