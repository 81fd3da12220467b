"""Clips from arrays (pipeline/shards/arrays.py): nothing to decode, but the same cropping and scaling as of videos."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from jaxtyping import UInt8

from pipeline.decoding.video import view_plane
from pipeline.planning.plan import PlanRow
from pipeline.shards import arrays
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError

EXACT = Interpolation.BILINEAR | Interpolation.ACCURATE_RND


class ArraySource:
    """NumPy arrays; see sources.ClipSource."""

    def recognizes(self, source: bytes | Path) -> bool:
        return arrays.is_array(source)

    def cut_views(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], clips: UInt8[np.ndarray, "views T H W C"]
    ) -> int:
        frames = arrays.read_array(video.data, video.numbers, video.num_frames)
        declared = (sample.height, sample.width, arrays.count_channels([sample.codec]))
        if frames.shape[1:] != declared:
            found, expected = ("x".join(map(str, shape)) for shape in (frames.shape[1:], declared))
            raise VideoError(f"its frames are {found} (height, width, channels), but the sample table says {expected}")
        for clip, row in zip(clips, rows, strict=True):
            box = frames[:, row.crop.y :, row.crop.x :][:, : row.crop.height, : row.crop.width]
            scale_frames(box[:, :, ::-1] if row.flip else box, clip)
        return len(set(video.numbers))

    def copy_planes(self, *_: object) -> None:
        """Leave arrays to cut_views."""

    def read_frames(
        self, source: bytes | Path, numbers: Sequence[int], num_frames: int | None
    ) -> UInt8[np.ndarray, "T H W C"]:
        return arrays.read_array(source, numbers)


def scale_frames(frames: UInt8[np.ndarray, "T H W C"], clip: UInt8[np.ndarray, "T height width C"]) -> None:
    """Scale frames to `clip`, each channel by itself: bilinearly with antialiasing, as FFmpeg scales those of videos.

    Four channels at a time are the planes of a yuva444p picture, which FFmpeg scales without converting colors: a
    quarter of the calls, at some 30 µs each.
    """
    source, reformatter = VideoFrame(frames.shape[2], frames.shape[1], "yuva444p"), VideoReformatter()
    channels = list(np.ndindex(len(frames), frames.shape[3]))
    for first in range(0, len(channels), 4):
        together = channels[first : first + 4]
        for plane, (t, c) in zip(source.planes, together, strict=False):
            view_plane(plane, frames.shape[1:3])[:] = frames[t, :, :, c]
        scaled = reformatter.reformat(source, clip.shape[2], clip.shape[1], interpolation=EXACT)
        for plane, (t, c) in zip(scaled.planes, together, strict=False):
            clip[t, :, :, c] = view_plane(plane, clip.shape[1:3])
