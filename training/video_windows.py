"""Read windows of frames along videos: of shards, or of whatever shards can be made of."""

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


class SampledFrame(NamedTuple):
    """A frame, cropped and scaled for the model."""

    # Source frames since the first one of the video or segment.
    number: int
    # Seconds in the source.
    time: float
    image: UInt8[np.ndarray, "H W C"]


@dataclass
class ListedVideo:
    """A video or segment to be read, and what is found out on the way."""

    # Its name among all videos, with /.
    key: str
    source: str
    label: str
    # Of the source: t=1.5,4 (seconds) or frames=10,50; "": all of it.
    segment: str
    fields: dict[str, Any]
    # Yields its sampled frames; raises VideoError or OSError where it is damaged.
    frames: Callable[[], Iterator[SampledFrame]]
    # Of its first frame in the source, seconds; known once it is read.
    offset: float = 0.0
    # Why the rest of it is missing; known once it is read.
    incomplete: str = ""


class Window(NamedTuple):
    """Frames of a video that are encoded together; without frames, it marks that the video is over."""

    video: ListedVideo
    frames: list[SampledFrame]


@dataclass(frozen=True)
class WindowReader:
    """Reads videos in windows of `length` sampled frames, which slide by `stride` of them.

    With `pad`, a window ends at the first frame and at every stride-th after it, and the first frame is repeated before
    them: 4 frames by a stride of 2 are 0 0 0 0, 0 0 1 2, 1 2 3 4, …
    """

    data: DataConfig
    size: FrameSize
    length: int = 1
    stride: int = 1
    pad: bool = False

    def list_videos(self, place: str) -> Iterator[ListedVideo]:
        """Yield all videos of shards, or of what make_shards.py takes, in the same order every time."""
        if is_remote(place) or (Path(place) / DATASET_FILE).is_file():
            yield from self.list_samples(ShardDataset.open(place))
            return
        splits = find_splits(Path(place))
        for split in splits:
            yield from self.list_samples(ShardDataset.open(split), f"{split.name}/")
        if splits:
            return
        for item in read_inputs(place, ListOptions(subset="all", asks=False)):
            yield self._list_item(item)

    def list_samples(self, dataset: ShardDataset, prefix: str = "") -> Iterator[ListedVideo]:
        """Yield the videos of shards; their keys begin with `prefix`. Raise InputError if the stride does not fit."""
        check_strides(dataset, self.data)
        for index, sample in enumerate(dataset.samples):
            label = ", ".join(dataset.info.classes[label] for label in sample.labels or ())
            frames = partial(self._read_sample, dataset, index)
            yield ListedVideo(
                prefix + sample.key, sample.source, label, sample.segment, sample.fields, frames
            )

    def _list_item(self, item: Item) -> ListedVideo:
        key = item.name
        # Where a list names a video outside of its folder, it has the key that shards would have.
        if item.source.startswith(("../", "/")):
            key = make_key(item.source, item.segment)
        label = ", ".join(item.labels or ())
        fields = json.loads(item.fields or "{}")
        return ListedVideo(
            key, item.source, label, item.segment, fields, partial(self._read_item, item)
        )

    def read_windows(self, video: ListedVideo) -> Iterator[Window]:
        """Yield the windows of a video, then one without frames; set the video's `offset` and `incomplete`.

        A video that is shorter than a window repeats its last frame; one that breaks off before has none.
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
            # Of a copy of the video.
            if getattr(error, "errno", None) in DISK_FULL:
                raise
            video.incomplete = str(error)
        if 0 < num_frames < first_end and not video.incomplete:
            missing = self.length - num_frames
            yield Window(video, [*held, *[held[-1]] * missing])
        yield Window(video, [])

    def _read_sample(self, dataset: ShardDataset, index: int) -> Iterator[SampledFrame]:
        sample = dataset.samples[index]
        content = dataset.read_video(index)
        rate = Fraction(sample.fps).limit_denominator(100_000)
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
        """Stream a video file, its frames numbered and timed as make_shards.py does."""
        if item.problem:
            raise VideoError(item.problem)
        with local_copy(item.location) as path:
            if not arrays.is_array(path):
                yield from self._read_video(SourceVideo(path), item)
            elif item.segment:
                raise VideoError("segments are cut out of videos, not out of arrays")
            else:
                yield from self._read_array(
                    path, self._find_step(item.source, Fraction(arrays.FPS))
                )

    def _read_video(self, video: SourceVideo, item: Item) -> Iterator[SampledFrame]:
        step = self._find_step(item.source, video.rate)
        segment = Segment.parse(item.segment) if item.segment else None
        first, _ = video.find_ticks(segment)
        scaler = None
        for tick, frame in video.frames(segment, step):
            if scaler is None:
                width, height = display_size(frame, video.pixel_aspect, find_flips(frame))
                scaler = make_scaler(round(width), round(height), self.size)
            yield SampledFrame(int(tick - first), float(tick / video.rate), scaler(frame))

    def _read_array(self, array: bytes | Path, step: Fraction) -> Iterator[SampledFrame]:
        frames = arrays.map_frames(array)
        for count in range(math.ceil(len(frames) / step)):
            number = int(count * step)
            image = resize_and_crop(frames[number : number + 1], self.size)[0].numpy()
            yield SampledFrame(number, number / arrays.FPS, image)

    def _find_step(self, source: str, fps: Fraction, stored_stride: int = 1) -> Fraction:
        """Return the distance of sampled frames in those of a video of `fps`, of which every n-th was stored."""
        step = frame_step(float(fps), stored_stride, self.data)
        if step < 1:
            too_few = f"{printable(source)} has {float(fps):g} frames a second"
            log(f"{too_few}: some are repeated for --fps {self.data.fps:g}", sys.stderr)
        return Fraction(step).limit_denominator(100_000)


def make_scaler(width: int, height: int, size: FrameSize) -> Scaler:
    """Return the scaler of the center of frames that are shown with this width and height."""
    return Scaler(view_crop(width, height, 0, 1, size), False, size, (width, height))
