"""Clips from arrays (pipeline/shards/arrays.py): nothing to decode, but the same cropping and scaling as of videos."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from einops import rearrange
from jaxtyping import UInt8

from pipeline.planning.crops import FrameSize
from pipeline.planning.plan import PlanRow
from pipeline.shards import arrays
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError

BYTE_CHANNELS = (3, 4)  # torch scales these many as bytes, on the calling thread alone


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
            clip[:] = scale_frames(box[:, :, ::-1] if row.flip else box, FrameSize(*clip.shape[1:3]))
        return len(set(video.numbers))

    def copy_planes(self, *_: object) -> None:
        """Leave arrays to cut_views."""

    def read_frames(
        self, source: bytes | Path, numbers: Sequence[int], num_frames: int | None
    ) -> UInt8[np.ndarray, "T H W C"]:
        return arrays.read_array(source, numbers)


def scale_frames(frames: UInt8[np.ndarray, "T H W C"], size: FrameSize) -> UInt8[np.ndarray, "T height width C"]:
    """Scale bilinearly with antialiasing, within one gray level of FFmpeg.

    All frames at once: one by one and channel by channel through FFmpeg, 8 frames of 32x32 took 1.7 ms, this takes .07.
    """
    import torch  # which processes that only decode do without (process.py)
    from torch.nn import functional

    channels = frames.shape[-1]
    if channels in BYTE_CHANNELS:
        clip = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
        return functional.interpolate(clip, size, mode="bilinear", antialias=True).permute(0, 2, 3, 1).numpy()
    planes = rearrange(frames, "t h w c -> (t c) h w")
    padded = np.resize(planes, (len(planes) + -len(planes) % 4, *planes.shape[1:]))  # to a multiple of 4
    scaled = scale_frames(rearrange(padded, "(t c) h w -> t h w c", c=4), size)
    planes = rearrange(scaled, "t h w c -> (t c) h w")[: len(planes)]
    return rearrange(planes, "(t c) h w -> t h w c", c=channels)
