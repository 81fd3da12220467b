"""Which part of a frame is shown: crop boxes in stored pixels as functions of uniform numbers."""

import math
from typing import NamedTuple

SCALES = (1.0, 0.875, 0.75, 0.66)
# The four corners and the centre, then eight between them, in quarters of the free space (SPEC §6).
OFFSETS = (
    *((0, 0), (4, 0), (0, 4), (4, 4), (2, 2)),
    *((0, 2), (4, 2), (2, 4), (2, 0), (1, 1), (3, 1), (1, 3), (3, 3)),
)
SIZE_PAIRS = [(w, h) for w in range(len(SCALES)) for h in range(len(SCALES)) if abs(w - h) <= 1]
RESIZED_ATTEMPTS = 10
DRAWS = 2 * RESIZED_ATTEMPTS + 2  # uniform numbers that a crop may need


class Crop(NamedTuple):
    x: int
    y: int
    width: int
    height: int


def multiscale(width: int, height: int, draws: list[float]) -> Crop:
    """Sides of 1, .875, .75 or .66 of the shorter side, at most one step apart, at one of 13 places."""
    shorter = min(width, height)
    w, h = (max(1, int(shorter * SCALES[step])) for step in SIZE_PAIRS[int(draws[0] * len(SIZE_PAIRS))])
    across, down = OFFSETS[int(draws[1] * len(OFFSETS))]
    return Crop((width - w) // 4 * across, (height - h) // 4 * down, w, h)


def random_resized(width: int, height: int, draws: list[float], min_area: float) -> Crop:
    """`min_area` to 1 of the area, width : height from 3:4 to 4:3; the largest such box in the centre if none fits."""
    for attempt in range(RESIZED_ATTEMPTS):
        area = width * height * (min_area + (1 - min_area) * draws[2 * attempt])
        ratio = math.exp((2 * draws[2 * attempt + 1] - 1) * math.log(4 / 3))
        w, h = max(1, round(math.sqrt(area * ratio))), max(1, round(math.sqrt(area / ratio)))
        if w <= width and h <= height:
            return Crop(int(draws[-2] * (width - w + 1)), int(draws[-1] * (height - h + 1)), w, h)
    w, h = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    return Crop((width - w) // 2, (height - h) // 2, w, h)


def across(width: int, height: int, index: int, count: int) -> Crop:
    """Square of the shorter side, number `index` of `count` evenly along the longer side; the centre if count is 1."""
    side = min(width, height)
    share = index / (count - 1) if count > 1 else 0.5
    return Crop(round((width - side) * share), round((height - side) * share), side, side)
