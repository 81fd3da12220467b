"""Masking strategies, by the name that `model.masking` gives them.

A new one is a file with a MaskingStrategy, a line here, and its name among `model.config.Masking`.
"""

from model.config import ModelConfig
from model.masking.adaptive import AdaptiveMasking
from model.masking.mask import Mask, MaskingStrategy
from model.masking.motion import MotionMasking
from model.masking.uniform import UniformMasking

MASKS: dict[str, type[MaskingStrategy]] = {
    "adaptive": AdaptiveMasking,
    "random": UniformMasking,
    "tube": UniformMasking,
    "frame": UniformMasking,
    "motion": MotionMasking,
}

__all__ = ["MASKS", "Mask", "MaskingStrategy", "make_masking"]


def make_masking(config: ModelConfig) -> MaskingStrategy:
    return MASKS[config.masking](config)
