"""Clips as planes of decoded frames, and tables that say what of them is shown: what crop_resize takes."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import launch
from kernels.clip_tables import frame_bytes, lay_out_tables
from kernels.launch import check


class DecodedClips(NamedTuple):
    """What the loader hands over: B clips of T frames; all tensors on one device, contiguous, perhaps of one upload.

    Frames are upright, planar 4:2:0, of 8 bits, or of 9 to 16 in the low bits of two bytes, low byte first. A frame, or
    a part of one that begins with a whole chroma sample, is its planes Y, U, V, one after the other without padding,
    the latter two of (height + 1) // 2 rows of (width + 1) // 2 samples: `frame_bytes` in all. A frame that several
    clips show, or one shows twice, is there once.
    """

    planes: Tensor  # uint8 [bytes]: all distinct frames of the batch, in any order
    offsets: Tensor  # int64 [B, T]: the byte in `planes` at which each frame begins, at no multiple of anything
    sizes: Tensor  # int32 [B, 3]: height and width of the stored frames, bytes a sample (1 or 2)
    boxes: Tensor  # int32 [B, 4]: x, y, width, height of the crop in pixels of luma, inside the frame; odd ones too
    flips: Tensor  # bool [B]: whether the crop is mirrored left to right
    matrices: Tensor  # float32 [B, 3, 4]: color_matrix(…), which takes (Y, U, V, 1) as stored to RGB from 0 to 255
    siting: Tensor  # float32 [B, 2]: pixels right of and below the first luma sample at which the first of chroma lies:
    #   left (MPEG-2, H.264's default) 0, .5; center (MPEG-1, JPEG) .5, .5; top left (BT.2020) 0, 0; bottom left 0, 1


def check_clips(clips: DecodedClips) -> None:
    check(clips.offsets.ndim == 2, f"offsets have shape {tuple(clips.offsets.shape)}: give [B, T]")
    layout = [("uint8", (clips.planes.numel(),)), *lay_out_tables(*clips.offsets.shape)]
    for name, tensor, (type_name, shape) in zip(clips._fields, clips, layout, strict=True):
        dtype = getattr(torch, type_name)
        fits = tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous()
        check(fits, f"{name} are {tensor.dtype} {tuple(tensor.shape)}: give {dtype} {shape}, contiguous")
        check(tensor.device == clips.planes.device, f"{name} are on {tensor.device}, planes on {clips.planes.device}")
    if launch.DEBUG or clips.planes.device.type == "cpu":
        check_tables(clips)


def check_tables(clips: DecodedClips) -> None:
    """Every box must lie in its frame, and every frame in the planes."""
    tables = zip(clips.offsets.tolist(), clips.sizes.tolist(), clips.boxes.tolist(), strict=True)
    for b, (offsets, (height, width, sample_bytes), (x, y, w, h)) in enumerate(tables):
        check(sample_bytes in (1, 2), f"samples of clip {b} have {sample_bytes} bytes: give 1 or 2")
        inside = min(x, y) >= 0 and min(w, h) > 0 and x + w <= width and y + h <= height
        check(inside, f"the box of clip {b}, {w}x{h} at {x}, {y}, does not lie in its frames of {width}x{height}")
        end = len(clips.planes) - frame_bytes(height, width, sample_bytes)
        fit = all(0 <= start <= end for start in offsets)
        check(fit, f"frames of clip {b} do not lie at its offsets {offsets} in {len(clips.planes)} bytes of planes")
