"""The ways in which videos may be stored. A new one is a class like those below, in a file of its own, and a line in
CLIP_SOURCES."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import UInt8

from pipeline.decoding.array_source import ArraySource
from pipeline.decoding.planes import Allocate, PlanarFrames
from pipeline.decoding.video_source import VideoSource
from pipeline.planning.crops import FrameSize
from pipeline.planning.plan import PlanRow
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice


class ClipSource(Protocol):
    """One way to store a video."""

    def recognizes(self, source: bytes | Path) -> bool:
        """Return whether a file, or its content, is stored in this way."""

    def cut_views(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], clips: UInt8[np.ndarray, "views T H W C"]
    ) -> int:
        """Crop, flip and scale every frame of `rows`, which share their frames, into `clips`.

        Return how many frames were decoded. Raise VideoError if one cannot be.
        """

    def copy_planes(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], size: FrameSize, allocate: Allocate
    ) -> PlanarFrames | None:
        """Copy what `rows` show of their frames as it was decoded, for the device to crop, flip and scale.

        Return None if the frames are not for it: cut_views does it all.
        """

    def read_frames(
        self, source: bytes | Path, numbers: Sequence[int], num_frames: int | None
    ) -> UInt8[np.ndarray, "T H W C"]:
        """Decode whole frames, upright, in the order given; `num_frames` of the video where it is known.

        Raise VideoError if one cannot be decoded.
        """


CLIP_SOURCES: dict[str, ClipSource] = {
    "array": ArraySource(),
    "video": VideoSource(),  # last: it takes whatever FFmpeg may know
}


def find_source(source: bytes | Path) -> ClipSource:
    return next(kind for kind in CLIP_SOURCES.values() if kind.recognizes(source))


def decode_frames(
    source: bytes | Path, numbers: Sequence[int], num_frames: int | None = None
) -> UInt8[np.ndarray, "T H W C"]:
    """Decode whole frames of any stored video; see ClipSource.read_frames."""
    return find_source(source).read_frames(source, numbers, num_frames)
