"""Compute crop boxes in stored pixels as functions of uniform numbers.

Boxes are computed in samples of 4:2:0 chroma, which are two pixels wide and high, and then doubled.
A box of whole chroma samples looks the same to every scaler, where FFmpeg stretches chroma over odd
sides by half a sample. Frames have at least two pixels each way.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

SCALES = (1.0, 0.875, 0.75, 0.66)
# Across and down, in quarters of the free space: the four corners and the center, then eight places
# between them.
OFFSETS = (
    (0, 0),
    (4, 0),
    (0, 4),
    (4, 4),
    (2, 2),
    (0, 2),
    (4, 2),
    (2, 4),
    (2, 0),
    (1, 1),
    (3, 1),
    (1, 3),
    (3, 3),
)
# Pairs of a width and a height, as indices of SCALES, that are at most one step apart.
SIZE_PAIRS = ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3))
RESIZED_ATTEMPTS = 10
# Two for each attempt of a random resized crop, and two for its position.
NUMBERS_PER_CROP = 2 * RESIZED_ATTEMPTS + 2


class FrameSize(NamedTuple):
    """The size in pixels of the frames of a clip, whose proportions its crop has."""

    height: int
    width: int

    @classmethod
    def of(cls, side: "int | Sequence[int]") -> "FrameSize":
        """Return the size of a square with this side, or of (height, width)."""
        if isinstance(side, int):
            return cls(side, side)
        return cls(*side)


class Crop(NamedTuple):
    """A box in a frame, in pixels from its left and upper edges."""

    x: int
    y: int
    width: int
    height: int

    def doubled(self) -> "Crop":
        """Return a box of chroma samples in pixels."""
        return Crop(2 * self.x, 2 * self.y, 2 * self.width, 2 * self.height)

    def within(self, stored: tuple[int, int], frame: tuple[int, int]) -> "Crop":
        """Map a box in a picture of `stored` = (width, height) to a frame of the size `frame`.

        The sizes differ where pixels are not square. Edges are rounded to whole chroma samples.
        """
        x, width = _scale_interval(self.x, self.width, stored[0], frame[0])
        y, height = _scale_interval(self.y, self.height, stored[1], frame[1])
        return Crop(x, y, width, height).doubled()


def _scale_interval(start: int, length: int, old_side: int, new_side: int) -> tuple[int, int]:
    """Map pixels along a side to chroma samples along another side; return the first and how many.

    The result has at least one sample and lies within the new side.
    """
    num_samples = new_side // 2
    first = round(start * new_side / old_side / 2)
    first = min(first, num_samples - 1)
    end = round((start + length) * new_side / old_side / 2)
    end = min(end, num_samples)
    return first, max(1, end - first)


SQUARE = FrameSize(1, 1)


def largest_box(width: int, height: int, shape: FrameSize) -> tuple[int, int]:
    """Return the width and height of the largest box with the proportions of `shape` in a frame."""
    box_height = width * shape.height // shape.width
    if box_height <= height:
        return width, max(1, box_height)
    box_width = height * shape.width // shape.height
    return max(1, box_width), height


def multiscale_crop(
    width: int, height: int, numbers: list[float], shape: FrameSize = SQUARE
) -> Crop:
    """Choose a box as VideoMAE does, after TSN (Wang et al., 2016): one of 10 sizes at 13 places.

    Its sides are 1, .875, .75 or .66 of those of the largest box with the proportions of `shape`,
    at most one step apart. The first two of `numbers` in [0, 1) are used.
    """
    width //= 2
    height //= 2
    scale_of_width, scale_of_height = SIZE_PAIRS[int(numbers[0] * len(SIZE_PAIRS))]
    largest_width, largest_height = largest_box(width, height, shape)
    box_width = max(1, int(largest_width * SCALES[scale_of_width]))
    box_height = max(1, int(largest_height * SCALES[scale_of_height]))
    across, down = OFFSETS[int(numbers[1] * len(OFFSETS))]
    x = (width - box_width) // 4 * across
    y = (height - box_height) // 4 * down
    return Crop(x, y, box_width, box_height).doubled()


def random_resized_crop(
    width: int, height: int, numbers: list[float], min_area: float, shape: FrameSize = SQUARE
) -> Crop:
    """Choose a box as torchvision's RandomResizedCrop does.

    It has a fraction of the frame's area from `min_area` to 1, and is 3:4 to 4:3 as wide as the
    shape. If none of RESIZED_ATTEMPTS such boxes fits, it is the largest in the center. `numbers`
    are NUMBERS_PER_CROP in [0, 1).
    """
    width //= 2
    height //= 2
    aspect = shape.width / shape.height
    for attempt in range(RESIZED_ATTEMPTS):
        area_number = numbers[2 * attempt]
        ratio_number = numbers[2 * attempt + 1]
        area = width * height * (min_area + (1 - min_area) * area_number)
        # Uniform in the logarithm: a box is as often wider than the shape as it is narrower.
        ratio = aspect * math.exp((2 * ratio_number - 1) * math.log(4 / 3))
        box_width = max(1, round(math.sqrt(area * ratio)))
        box_height = max(1, round(math.sqrt(area / ratio)))
        if box_width <= width and box_height <= height:
            x = int(numbers[-2] * (width - box_width + 1))
            y = int(numbers[-1] * (height - box_height + 1))
            return Crop(x, y, box_width, box_height).doubled()
    box_width = min(width, max(1, round(height * aspect * 4 / 3)))
    box_height = min(height, max(1, round(width / aspect * 4 / 3)))
    x = (width - box_width) // 2
    y = (height - box_height) // 2
    return Crop(x, y, box_width, box_height).doubled()


def view_crop(width: int, height: int, index: int, count: int, shape: FrameSize = SQUARE) -> Crop:
    """Return view `index` of `count`: the largest box with the proportions of `shape`.

    The views lie evenly along the frame's longer side; a single one lies in the center.
    """
    width //= 2
    height //= 2
    box_width, box_height = largest_box(width, height, shape)
    fraction = 0.5
    if count > 1:
        fraction = index / (count - 1)
    x = round((width - box_width) * fraction)
    y = round((height - box_height) * fraction)
    return Crop(x, y, box_width, box_height).doubled()
