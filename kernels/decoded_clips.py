"""Clips as planes of decoded frames, and tables that say what of them is shown: what crop_resize takes."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import launch
from kernels.launch import check

# Weights of red and blue in luma: ITU-R BT.601-7 §2.5.1, BT.709-6 §3.2, BT.2020-2 table 4 (non-constant luminance).
# By FFmpeg's names of these matrices.
LUMA_WEIGHTS = {"smpte170m": (0.299, 0.114), "bt709": (0.2126, 0.0722), "bt2020nc": (0.2627, 0.0593)}


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


def frame_bytes(height: int, width: int, sample_bytes: int) -> int:
    """Count the bytes of a frame's three planes."""
    return (height * width + 2 * ((height + 1) // 2) * ((width + 1) // 2)) * sample_bytes


def lay_out_tables(batch: int, frames: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and shape of what DecodedClips holds besides the planes."""
    return [
        (torch.int64, (batch, frames)), (torch.int32, (batch, 3)), (torch.int32, (batch, 4)),
        (torch.bool, (batch,)), (torch.float32, (batch, 3, 4)), (torch.float32, (batch, 2)),
    ]  # fmt: skip


def count_table_bytes(batch: int, frames: int) -> int:
    """Count the bytes that view_tables takes: each table begins at a multiple of 8."""
    return sum(-(-math.prod(shape) * dtype.itemsize // 8) * 8 for dtype, shape in lay_out_tables(batch, frames))


def view_tables(block: Tensor, batch: int, frames: int) -> list[Tensor]:
    """View bytes as the tables of DecodedClips, one after the other."""
    tables, start = [], 0
    for dtype, shape in lay_out_tables(batch, frames):
        size = math.prod(shape) * dtype.itemsize
        tables.append(block[start : start + size].view(dtype).view(shape))
        start += -(-size // 8) * 8
    return tables


def color_matrix(colorspace: str, full_range: bool, bits: int) -> Tensor:
    """Return fp32 [3, 4], from (Y, U, V, 1) as stored in `bits` bits to RGB from 0 to 255.

    colorspace: a key of LUMA_WEIGHTS. Raise InputError for any other, and for less than 8 or more than 16 bits.
    """
    check(colorspace in LUMA_WEIGHTS, f"colorspace is {colorspace}: give one of {', '.join(LUMA_WEIGHTS)}")
    check(8 <= bits <= 16, f"samples have {bits} bits: give 8 to 16")
    red, blue = LUMA_WEIGHTS[colorspace]
    green = 1 - red - blue
    of_chroma = [
        (0.0, 2 * (1 - red)),
        (-2 * blue * (1 - blue) / green, -2 * red * (1 - red) / green),
        (2 * (1 - blue), 0.0),
    ]
    # Rec. ITU-T H.273 §8.3: full range spans all codes; limited range is that of 8 bits, shifted.
    step, top = 2 ** (bits - 8), 2**bits - 1
    black, luma, chroma = (0, top, top) if full_range else (16 * step, 219 * step, 224 * step)
    y, middle = 255 / luma, 128 * step
    rows = [(y, 255 * u / chroma, 255 * v / chroma) for u, v in of_chroma]
    return torch.tensor([(*row, -row[0] * black - (row[1] + row[2]) * middle) for row in rows])


def check_clips(clips: DecodedClips) -> None:
    check(clips.offsets.ndim == 2, f"offsets have shape {tuple(clips.offsets.shape)}: give [B, T]")
    layout = [(torch.uint8, (clips.planes.numel(),)), *lay_out_tables(*clips.offsets.shape)]
    for name, tensor, (dtype, shape) in zip(clips._fields, clips, layout, strict=True):
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
