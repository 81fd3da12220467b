"""The ways in which videos may be stored: what FFmpeg decodes, and arrays.

Of arrays nothing is decoded, but they are cropped and scaled as videos are. Another way is a class
like ArraySource and a line in CLIP_SOURCES.
"""

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
from adamae.pipeline.planning.plan import PlanRow, index_frames
from adamae.pipeline.shards import arrays
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError

Source = bytes | Path
Frames = UInt8[np.ndarray, "T H W C"]
Clips = UInt8[np.ndarray, "views T H W C"]

# Of the pictures in which FFmpeg scales an array's channels: Y, U, V and alpha, all of one size.
PLANES_PER_PICTURE = 4


class ClipSource(Protocol):
    """One way to store a video."""

    def recognizes(self, source: Source) -> bool:
        """Return whether a file, or its content, is stored in this way."""

    def cut_views(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], clips: Clips
    ) -> int:
        """Crop, flip and scale every frame of `rows` into `clips`.

        `video` was cut out for `join_frames(rows)`.

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
        """Copy what `rows` show of their frames as it was decoded; the device scales it.

        Return None where cut_views has to be called instead. Raise VideoError if a frame cannot be
        decoded.
        """
        return None

    def read_frames(self, source: Source, numbers: Sequence[int], num_frames: int | None) -> Frames:
        """Decode whole frames, upright, in the order of `numbers`.

        `num_frames` is how many the video has, where it is known. Raise VideoError if one cannot be
        decoded.
        """


class ArraySource(ClipSource):
    """NumPy arrays; see ClipSource."""

    def recognizes(self, source: Source) -> bool:
        return arrays.is_array(source)

    def cut_views(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], clips: Clips
    ) -> int:
        frames = arrays.read_array(video.data, video.numbers, video.num_frames)
        shape = frames.shape[1:]
        expected = (sample.height, sample.width, arrays.count_channels([sample.codec]))
        if shape != expected:
            raise VideoError(
                f"its frames are {'x'.join(map(str, shape))} (height, width, channels), but the"
                f" sample table says {'x'.join(map(str, expected))}"
            )
        for clip, row, indices in zip(clips, rows, index_frames(rows), strict=True):
            x, y, width, height = row.crop
            box = frames[indices, y : y + height, x : x + width]
            if row.flip:
                box = box[:, :, ::-1]
            scale_frames(box, clip)
        return len(frames)

    def read_frames(self, source: Source, numbers: Sequence[int], num_frames: int | None) -> Frames:
        return arrays.read_array(source, numbers)


CLIP_SOURCES: dict[str, ClipSource] = {
    "array": ArraySource(),
    # The last one, as it takes everything: FFmpeg finds out what it is.
    "video": VideoSource(),
}


def find_source(source: Source) -> ClipSource:
    """Return the way in which a file, or the content of one, is stored."""
    return next(kind for kind in CLIP_SOURCES.values() if kind.recognizes(source))


def decode_frames(source: Source, numbers: Sequence[int], num_frames: int | None = None) -> Frames:
    """Decode whole frames of any stored video; see ClipSource.read_frames."""
    return find_source(source).read_frames(source, numbers, num_frames)


def scale_frames(frames: Frames, clip: UInt8[np.ndarray, "T height width C"]) -> None:
    """Scale frames to `clip`, each channel by itself: bilinearly with antialiasing, as for videos.

    Four channels at a time are the planes of a yuva444p picture, which FFmpeg scales without
    converting colors: a quarter of the calls, at some 30 µs each. Two frames of three channels are
    six planes: two pictures, of which the second one has two planes of old values that nobody
    reads.
    """
    num_frames, height, width, num_channels = frames.shape
    _, new_height, new_width, _ = clip.shape
    picture = VideoFrame(width, height, "yuva444p")
    reformatter = VideoReformatter()
    channels = list(np.ndindex(num_frames, num_channels))
    for first in range(0, len(channels), PLANES_PER_PICTURE):
        group = channels[first : first + PLANES_PER_PICTURE]
        # The last group may have fewer channels than the picture has planes.
        for plane, (t, c) in zip(picture.planes, group, strict=False):
            target = view_plane(plane, (height, width))
            target[:] = frames[t, :, :, c]
        scaled = reformatter.reformat(picture, new_width, new_height, interpolation=EXACT)
        for plane, (t, c) in zip(scaled.planes, group, strict=False):
            clip[t, :, :, c] = view_plane(plane, (new_height, new_width))
