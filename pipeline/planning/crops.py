"""Compute crop boxes in stored pixels as functions of uniform numbers.

Boxes are computed in samples of 4:2:0 chroma, two pixels each way, and doubled: those of whole samples look the same to
every scaler, where FFmpeg stretches chroma over odd sides by half a sample. Frames have two pixels or more each way.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

SCALES = (1.0, 0.875, 0.75, 0.66)
# The four corners and the center, then eight between them, in quarters of the free space.
OFFSETS = (
    *((0, 0), (4, 0), (0, 4), (4, 4), (2, 2)),
    *((0, 2), (4, 2), (2, 4), (2, 0), (1, 1), (3, 1), (1, 3), (3, 3)),
)
SIZE_PAIRS = [(w, h) for w in range(len(SCALES)) for h in range(len(SCALES)) if abs(w - h) <= 1]
RESIZED_ATTEMPTS = 10
DRAWS = 2 * RESIZED_ATTEMPTS + 2  # uniform numbers that a crop may need


class FrameSize(NamedTuple):
    """Of what is made of a crop, in pixels; a crop has its proportions."""

    height: int
    width: int

    @classmethod
    def of(cls, side: "int | Sequence[int]") -> "FrameSize":
        """A square of this side, or (height, width)."""
        return cls(side, side) if isinstance(side, int) else cls(*side)


class Crop(NamedTuple):
    x: int
    y: int
    width: int
    height: int

    def doubled(self) -> "Crop":
        return Crop(*(2 * value for value in self))

    def within(self, stored: tuple[int, int], frame: tuple[int, int]) -> "Crop":
        """Map from `stored` = (width, height) to those of a `frame`, which differ where pixels are not square: edges
        are at the nearest whole chroma samples."""
        starts, lengths = [], []
        for start, length, side, size in zip(self[:2], self[2:], stored, frame, strict=True):
            first, last = (round(edge * size / side / 2) for edge in (start, start + length))
            starts.append(min(first, size // 2 - 1))
            lengths.append(max(1, min(last, size // 2) - starts[-1]))
        return Crop(*starts, *lengths).doubled()


SQUARE = FrameSize(1, 1)


def largest_box(width: int, height: int, shape: FrameSize) -> tuple[int, int]:
    """Width and height of the largest box of this shape in a frame; of a square one, twice the shorter side."""
    w, h = width, width * shape.height // shape.width
    return (w, max(1, h)) if h <= height else (max(1, height * shape.width // shape.height), height)


def multiscale_crop(width: int, height: int, draws: list[float], shape: FrameSize = SQUARE) -> Crop:
    """Sides of 1, .875, .75 or .66 of the largest box of this shape, at most one step apart, at one of 13 places."""
    width, height = width // 2, height // 2
    steps = SIZE_PAIRS[int(draws[0] * len(SIZE_PAIRS))]
    w, h = (
        max(1, int(side * SCALES[step]))
        for side, step in zip(largest_box(width, height, shape), steps, strict=True)
    )
    across, down = OFFSETS[int(draws[1] * len(OFFSETS))]
    return Crop((width - w) // 4 * across, (height - h) // 4 * down, w, h).doubled()


def random_resized_crop(
    width: int, height: int, draws: list[float], min_area: float, shape: FrameSize = SQUARE
) -> Crop:
    """`min_area` to 1 of the area, 3:4 to 4:3 as wide as the shape; the largest such box in the center if none fits."""
    width, height = width // 2, height // 2
    wide = shape.width / shape.height
    for attempt in range(RESIZED_ATTEMPTS):
        area = width * height * (min_area + (1 - min_area) * draws[2 * attempt])
        ratio = wide * math.exp((2 * draws[2 * attempt + 1] - 1) * math.log(4 / 3))
        w, h = max(1, round(math.sqrt(area * ratio))), max(1, round(math.sqrt(area / ratio)))
        if w <= width and h <= height:
            return Crop(
                int(draws[-2] * (width - w + 1)), int(draws[-1] * (height - h + 1)), w, h
            ).doubled()
    w, h = (
        min(width, max(1, round(height * wide * 4 / 3))),
        min(height, max(1, round(width / wide * 4 / 3))),
    )
    return Crop((width - w) // 2, (height - h) // 2, w, h).doubled()


def view_crop(width: int, height: int, index: int, count: int, shape: FrameSize = SQUARE) -> Crop:
    """The largest box of this shape, number `index` of `count` evenly along the frame; the center if count is 1."""
    width, height = width // 2, height // 2
    w, h = largest_box(width, height, shape)
    share = index / (count - 1) if count > 1 else 0.5
    return Crop(round((width - w) * share), round((height - h) * share), w, h).doubled()
