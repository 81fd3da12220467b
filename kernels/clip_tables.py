"""What of decoded planes a clip shows: the tables of DecodedClips, without PyTorch, since decode workers write them."""

import math
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float32

from adamae.common.arithmetic import round_up
from adamae.common.errors import InputError

# Weights of red and blue in luma: ITU-R BT.601-7 §2.5.1, BT.709-6 §3.2, BT.2020-2 table 4 (non-constant luminance).
# By FFmpeg's names of these matrices.
LUMA_WEIGHTS = {
    "smpte170m": (0.299, 0.114),
    "bt709": (0.2126, 0.0722),
    "bt2020nc": (0.2627, 0.0593),
}


def frame_bytes(height: int, width: int, sample_bytes: int) -> int:
    """Count the bytes of a frame's three planes."""
    return (height * width + 2 * ((height + 1) // 2) * ((width + 1) // 2)) * sample_bytes


def lay_out_tables(batch: int, frames: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return type and shape of what DecodedClips holds besides the planes."""
    return [
        ("int64", (batch, frames)),
        ("int32", (batch, 3)),
        ("int32", (batch, 4)),
        ("bool", (batch,)),
        ("float32", (batch, 3, 4)),
        ("float32", (batch, 2)),
    ]


def slice_tables(batch: int, frames: int) -> list[slice]:
    """Return where in a block of bytes each table lies: one after the other, at multiples of 8."""
    sizes = [
        math.prod(shape) * np.dtype(name).itemsize for name, shape in lay_out_tables(batch, frames)
    ]
    starts = accumulate((round_up(size, 8) for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def count_table_bytes(batch: int, frames: int) -> int:
    return slice_tables(batch, frames)[-1].stop


def view_tables(block: Any, batch: int, frames: int, library: ModuleType = np) -> list[Any]:
    """View bytes, an array or tensor of `library`, as the tables of DecodedClips."""
    tables = zip(slice_tables(batch, frames), lay_out_tables(batch, frames), strict=True)
    return [
        block[place].view(getattr(library, name)).reshape(shape) for place, (name, shape) in tables
    ]


def color_matrix(colorspace: str, full_range: bool, bits: int) -> Float32[np.ndarray, "3 4"]:
    """Return the matrix from (Y, U, V, 1) as stored in `bits` bits to RGB from 0 to 255.

    colorspace: a key of LUMA_WEIGHTS. Raise InputError for any other, and for less than 8 or more than 16 bits.
    """
    if colorspace not in LUMA_WEIGHTS:
        raise InputError(f"colorspace is {colorspace}: give one of {', '.join(LUMA_WEIGHTS)}")
    if not 8 <= bits <= 16:
        raise InputError(f"samples have {bits} bits: give 8 to 16")
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
    return np.array(
        [(*row, -row[0] * black - (row[1] + row[2]) * middle) for row in rows], np.float32
    )
