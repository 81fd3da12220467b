"""Choose boxes to erase, and operations of timm's "increasing" RandAugment, as VideoMAE and AdaMAE fine-tune."""

import math
from typing import NamedTuple

NAMES = (
    *(
        "autocontrast",
        "equalize",
        "invert",
        "rotate",
        "posterize",
        "solarize",
        "solarize_add",
        "color",
        "contrast",
    ),
    *("brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
MAX_MAGNITUDE = 10
APPLY_PROBABILITY = 0.5  # of the operations drawn, as timm does
NUMBERS_PER_OP = 5
ERASE_AREA, ERASE_LOG_RATIO, ERASE_ATTEMPTS = (0.02, 1 / 3), math.log(10 / 3), 10
NUMBERS_FOR_ERASING = 3 + 2 * ERASE_ATTEMPTS


class AugmentOp(NamedTuple):
    """One operation of NAMES with its strength in [-1, 1]; 0 is none at all."""

    name: str
    strength: float


class EraseBox(NamedTuple):
    """Part of a clip, in shares of its height and width."""

    top: float
    left: float
    height: float
    width: float


def sample_ops(count: int, magnitude: float, draws: list[float]) -> tuple[AugmentOp, ...]:
    """About half of `count` operations, strengths normal around `magnitude` (of 10, standard deviation 0.5)."""
    changes = []
    for start in range(0, count * NUMBERS_PER_OP, NUMBERS_PER_OP):
        which, whether, sign, radius, angle = draws[start : start + NUMBERS_PER_OP]
        normal = math.sqrt(-2 * math.log(1 - radius)) * math.cos(2 * math.pi * angle)
        strength = min(MAX_MAGNITUDE, max(0.0, magnitude + 0.5 * normal)) / MAX_MAGNITUDE
        if whether < APPLY_PROBABILITY:
            changes.append(
                AugmentOp(NAMES[int(which * len(NAMES))], strength if sign < 0.5 else -strength)
            )
    return tuple(changes)


def sample_erase_box(probability: float, draws: list[float]) -> EraseBox | None:
    """A box of 2 % to a third of the frame, height : width from 3:10 to 10:3, with `probability`."""
    if draws[0] >= probability:
        return None
    for attempt in range(3, NUMBERS_FOR_ERASING, 2):
        area = ERASE_AREA[0] + (ERASE_AREA[1] - ERASE_AREA[0]) * draws[attempt]
        ratio = math.exp((2 * draws[attempt + 1] - 1) * ERASE_LOG_RATIO)
        height, width = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if height < 1 and width < 1:
            return EraseBox(draws[1] * (1 - height), draws[2] * (1 - width), height, width)
    return None
