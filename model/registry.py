"""What a configuration chooses from, and where it is: a new mask, target or decoder is a file and a line here.

Classes are named, not imported: configurations and --help list the names without PyTorch.
"""

from pkgutil import resolve_name
from typing import Any

MASKS = {
    "adaptive": "model.masking.adaptive:AdaptiveMasking",
    "random": "model.masking.uniform:UniformMasking",
    "tube": "model.masking.uniform:UniformMasking",
    "frame": "model.masking.uniform:UniformMasking",
    "motion": "model.masking.motion:MotionMasking",
    "motion-share": "model.masking.motion:MotionShareMasking",
}
TARGETS = {
    "pixels": "model.targets.pixels:PixelTarget",
    "teacher": "model.targets.teacher:TeacherTarget",
}
DECODERS = {
    "self": "model.decoder:Decoder",
    "cross": "model.decoder:CrossDecoder",
}


def find_class(registry: dict[str, str], name: str) -> Any:
    """Import and return the class that `name` stands for."""
    return resolve_name(registry[name])
