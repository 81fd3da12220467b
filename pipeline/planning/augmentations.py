"""Choose operations of timm's "increasing" RandAugment and boxes to erase.

VideoMAE and AdaMAE fine-tune with both.
"""

import math
from typing import NamedTuple

NAMES = (
    "autocontrast",
    "equalize",
    "invert",
    "rotate",
    "posterize",
    "solarize",
    "solarize_add",
    "color",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
MAX_MAGNITUDE = 10
# timm applies each of the chosen operations with this probability.
APPLY_PROBABILITY = 0.5
NUMBERS_PER_OP = 5
# Of the frame's area, as in Random Erasing (Zhong et al., 2020).
MIN_ERASE_AREA = 0.02
MAX_ERASE_AREA = 1 / 3
MAX_ERASE_LOG_RATIO = math.log(10 / 3)
ERASE_ATTEMPTS = 10
# One for whether to erase, two for the position, and two for each attempt at a size.
NUMBERS_FOR_ERASING = 3 + 2 * ERASE_ATTEMPTS


class AugmentOp(NamedTuple):
    """One operation of NAMES with its strength in [-1, 1]; a strength of 0 changes nothing."""

    name: str
    strength: float


class EraseBox(NamedTuple):
    """A part of a clip, in fractions of its height and width."""

    top: float
    left: float
    height: float
    width: float


def sample_ops(count: int, magnitude: float, numbers: list[float]) -> tuple[AugmentOp, ...]:
    """Choose `count` operations and keep about half of them, as timm does.

    Their strengths are normal around `magnitude` (of 10, standard deviation 0.5), with either sign.
    NUMBERS_PER_OP of `numbers` in [0, 1) are used for each.
    """
    ops = []
    for start in range(0, count * NUMBERS_PER_OP, NUMBERS_PER_OP):
        name, apply, sign, radius, angle = numbers[start : start + NUMBERS_PER_OP]
        if apply >= APPLY_PROBABILITY:
            continue
        # Box and Muller's transform of two uniform numbers to a normal one.
        normal = math.sqrt(-2 * math.log(1 - radius)) * math.cos(2 * math.pi * angle)
        strength = min(MAX_MAGNITUDE, max(0.0, magnitude + 0.5 * normal)) / MAX_MAGNITUDE
        if sign >= 0.5:
            strength = -strength
        ops.append(AugmentOp(NAMES[int(name * len(NAMES))], strength))
    return tuple(ops)


def sample_erase_box(probability: float, numbers: list[float]) -> EraseBox | None:
    """Choose, with `probability`, a box of 2 % to a third of the frame.

    Its height is 3:10 to 10:3 of its width. `numbers` are NUMBERS_FOR_ERASING in [0, 1).
    """
    if numbers[0] >= probability:
        return None
    for index in range(3, NUMBERS_FOR_ERASING, 2):
        area = MIN_ERASE_AREA + (MAX_ERASE_AREA - MIN_ERASE_AREA) * numbers[index]
        ratio = math.exp((2 * numbers[index + 1] - 1) * MAX_ERASE_LOG_RATIO)
        height = math.sqrt(area * ratio)
        width = math.sqrt(area / ratio)
        if height < 1 and width < 1:
            top = numbers[1] * (1 - height)
            left = numbers[2] * (1 - width)
            return EraseBox(top, left, height, width)
    return None
