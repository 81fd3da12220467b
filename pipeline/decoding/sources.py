"""The ways in which videos may be stored: what FFmpeg decodes, and arrays, of which nothing is decoded, but which are
cropped and scaled as videos are. A new one is a class like ArraySource and a line in CLIP_SOURCES."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from jaxtyping import UInt8

from adamae.pipeline.decoding.planes import Allocate, PlanarFrames
from adamae.pipeline.decoding.video import EXACT, view_plane
from adamae.pipeline.decoding.video_source import VideoSource
from adamae.pipeline.planning.crops import FrameSize
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards import arrays
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError

Source = bytes | Path
Frames = UInt8[np.ndarray, "T H W C"]
Clips = UInt8[np.ndarray, "views T H W C"]


class ClipSource(Protocol):
    """One way to store a video."""

    def recognizes(self, source: Source) -> bool:
        """Return whether a file, or its content, is stored in this way."""

    def cut_views(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], clips: Clips
    ) -> int:
        """Crop, flip and scale every frame of `rows`, which share their frames, into `clips`.

        Return how many frames were decoded. Raise VideoError if one cannot be.
        """

    def copy_planes(
        self,
        video: VideoSlice,
        sample: Sample,
        rows: list[PlanRow],
        size: FrameSize,
        allocate: Allocate,
    ) -> PlanarFrames | None:
        """Copy what `rows` show of their frames as it was decoded, for the device to crop, flip and scale; None where
        cut_views does it all."""
        return None

    def read_frames(self, source: Source, numbers: Sequence[int], num_frames: int | None) -> Frames:
        """Decode whole frames, upright, in the order given; `num_frames` of the video where it is known.

        Raise VideoError if one cannot be decoded.
        """


class ArraySource(ClipSource):
    """NumPy arrays; see ClipSource."""

    def recognizes(self, source: Source) -> bool:
        return arrays.is_array(source)

    def cut_views(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], clips: Clips
    ) -> int:
        frames = arrays.read_array(video.data, video.numbers, video.num_frames)
        declared = (sample.height, sample.width, arrays.count_channels([sample.codec]))
        if frames.shape[1:] != declared:
            found, expected = ("x".join(map(str, shape)) for shape in (frames.shape[1:], declared))
            raise VideoError(
                f"its frames are {found} (height, width, channels), but the sample table says {expected}"
            )
        for clip, row in zip(clips, rows, strict=True):
            box = frames[:, row.crop.y :, row.crop.x :][:, : row.crop.height, : row.crop.width]
            scale_frames(box[:, :, ::-1] if row.flip else box, clip)
        return len(set(video.numbers))

    def read_frames(self, source: Source, numbers: Sequence[int], num_frames: int | None) -> Frames:
        return arrays.read_array(source, numbers)


CLIP_SOURCES: dict[str, ClipSource] = {
    "array": ArraySource(),
    "video": VideoSource(),  # last: it takes whatever FFmpeg may know
}


def find_source(source: Source) -> ClipSource:
    return next(kind for kind in CLIP_SOURCES.values() if kind.recognizes(source))


def decode_frames(source: Source, numbers: Sequence[int], num_frames: int | None = None) -> Frames:
    """Decode whole frames of any stored video; see ClipSource.read_frames."""
    return find_source(source).read_frames(source, numbers, num_frames)


def scale_frames(frames: Frames, clip: UInt8[np.ndarray, "T height width C"]) -> None:
    """Scale frames to `clip`, each channel by itself: bilinearly with antialiasing, as FFmpeg scales those of videos.

    Four channels at a time are the planes of a yuva444p picture, which FFmpeg scales without converting colors: a
    quarter of the calls, at some 30 µs each.
    """
    source, reformatter = (
        VideoFrame(frames.shape[2], frames.shape[1], "yuva444p"),
        VideoReformatter(),
    )
    channels = list(np.ndindex(len(frames), frames.shape[3]))
    for first in range(0, len(channels), 4):
        together = channels[first : first + 4]
        for plane, (t, c) in zip(source.planes, together, strict=False):
            view_plane(plane, frames.shape[1:3])[:] = frames[t, :, :, c]
        scaled = reformatter.reformat(source, clip.shape[2], clip.shape[1], interpolation=EXACT)
        for plane, (t, c) in zip(scaled.planes, together, strict=False):
            clip[t, :, :, c] = view_plane(plane, clip.shape[1:3])
