"""Masking strategies, by the name that `model.masking` gives them.

A new one is a file with a MaskingStrategy, a line here, and its name among `model.config.Masking`.
"""

from model.config import ModelConfig
from model.masking.adaptive import AdaptiveMasking
from model.masking.frame import FrameMasking
from model.masking.mask import Mask, MaskingStrategy
from model.masking.motion import MotionMasking
from model.masking.random import RandomMasking
from model.masking.tube import TubeMasking

MASKS: dict[str, type[MaskingStrategy]] = {
    "adaptive": AdaptiveMasking,
    "random": RandomMasking,
    "tube": TubeMasking,
    "frame": FrameMasking,
    "motion": MotionMasking,
}

__all__ = ["MASKS", "Mask", "MaskingStrategy", "make_masking"]


def make_masking(config: ModelConfig) -> MaskingStrategy:
    return MASKS[config.masking](config)
