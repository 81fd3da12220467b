"""What the decoder predicts, by the name that `model.target` gives it.

A new one is a file with a Target, a line here, and its name among `model.config.Target`.
"""

from model.config import ModelConfig
from model.targets.pixels import PixelTarget
from model.targets.target import Target
from model.targets.teacher import TeacherTarget

TARGETS: dict[str, type[Target]] = {"pixels": PixelTarget, "teacher": TeacherTarget}

__all__ = ["TARGETS", "Target", "make_target"]


def make_target(config: ModelConfig) -> Target:
    return TARGETS[config.target](config)
