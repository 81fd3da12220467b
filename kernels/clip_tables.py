"""The tables of DecodedClips: which bytes of decoded planes a clip shows, where, in which colors.

Without PyTorch, since decode workers write them into shared memory.
"""

import math
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float32

from adamae.common.arithmetic import ceil_div, round_up
from adamae.common.errors import InputError

# Weights of red and blue in luma: ITU-R BT.601-7 §2.5.1, BT.709-6 §3.2, BT.2020-2 table 4
# (non-constant luminance). By FFmpeg's names of these matrices.
LUMA_WEIGHTS = {
    "smpte170m": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020nc": (0.2627, 0.0593),
}
# For tensors of each type to begin where its values may lie, tables begin at multiples of 8 bytes.
ALIGNMENT = 8


def frame_bytes(height: int, width: int, sample_bytes: int) -> int:
    """Count the bytes of a frame's planes Y, U and V: 640 x 360 pixels of 8 bits take 345,600."""
    luma = height * width
    chroma = ceil_div(height, 2) * ceil_div(width, 2)
    return (luma + 2 * chroma) * sample_bytes


def lay_out_tables(batch: int, frames: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return type and shape of the fields of DecodedClips, besides the planes, in its order.

    For a single clip of three frames, which shows 480 x 360 pixels of a video of 640 x 360 pixels
    and 8 bits, BT.709, limited range, and repeats the video's second frame:

        offsets   0, 345600, 345600       the second frame lies behind the first, and is there once
        sizes     360, 640, 1             height, width, bytes a sample
        boxes     80, 0, 480, 360         x, y, width, height
        flips     False
        matrices  1.164, 0.000, 1.793, -248.1    red from Y, U, V and 1
                  1.164, -0.213, -0.533, 76.9    green
                  1.164, 2.112, 0.000, -289.0    blue
        siting    0.0, 0.5                as H.264 has it: left, between two rows
    """
    return [
        ("int64", (batch, frames)),
        ("int32", (batch, 3)),
        ("int32", (batch, 4)),
        ("bool", (batch,)),
        ("float32", (batch, 3, 4)),
        ("float32", (batch, 2)),
    ]


def slice_tables(batch: int, frames: int) -> list[slice]:
    """Return the bytes of each table in a block, where they lie one after the other.

    For 2 clips of 16 frames: 0 to 256, 256 to 280, 280 to 312, 312 to 314, 320 to 416, 416 to 432.
    """
    slices = []
    start = 0
    for type_name, shape in lay_out_tables(batch, frames):
        size = math.prod(shape) * np.dtype(type_name).itemsize
        slices.append(slice(start, start + size))
        start += round_up(size, ALIGNMENT)
    return slices


def count_table_bytes(batch: int, frames: int) -> int:
    """Count the bytes of a block of tables: 432 for 2 clips of 16 frames."""
    return slice_tables(batch, frames)[-1].stop


def view_tables(block: Any, batch: int, frames: int, library: ModuleType = np) -> list[Any]:
    """View bytes as the tables of DecodedClips, without a copy.

    block: uint8, an array or tensor of `library`, of `count_table_bytes` in all.
    """
    slices = slice_tables(batch, frames)
    tables = []
    for part, (type_name, shape) in zip(slices, lay_out_tables(batch, frames), strict=True):
        table = block[part].view(getattr(library, type_name))
        tables.append(table.reshape(shape))
    return tables


def color_matrix(colorspace: str, full_range: bool, bits: int) -> Float32[np.ndarray, "3 4"]:
    """Return the matrix from (Y, U, V, 1), as stored in `bits` bits, to RGB from 0 to 255.

    colorspace: a key of LUMA_WEIGHTS. Raise InputError for any other, and for less than 8 or more
    than 16 bits.
    """
    if colorspace not in LUMA_WEIGHTS:
        raise InputError(f"colorspace is {colorspace}: give one of {', '.join(LUMA_WEIGHTS)}")
    if not 8 <= bits <= 16:
        raise InputError(f"samples have {bits} bits: give 8 to 16")
    red, blue = LUMA_WEIGHTS[colorspace]
    green = 1 - red - blue
    # How much of U and V, from -0.5 to 0.5, is in red, green and blue: Rec. ITU-T H.273 §8.3 solved
    # for them, where E'PB = 0.5 * (E'B - E'Y) / (1 - KB), and E'PR alike.
    chroma_weights = [
        (0.0, 2 * (1 - red)),
        (-2 * blue * (1 - blue) / green, -2 * red * (1 - red) / green),
        (2 * (1 - blue), 0.0),
    ]
    # Rec. ITU-T H.273 §8.3: full range spans all codes; limited range is that of 8 bits, shifted.
    step = 2 ** (bits - 8)
    if full_range:
        black = 0
        luma_range = chroma_range = 2**bits - 1
    else:
        black = 16 * step
        luma_range = 219 * step
        chroma_range = 224 * step
    middle = 128 * step
    y = 255 / luma_range
    rows = []
    for u_weight, v_weight in chroma_weights:
        u = 255 * u_weight / chroma_range
        v = 255 * v_weight / chroma_range
        rows.append((y, u, v, -y * black - (u + v) * middle))
    return np.array(rows, np.float32)
