"""What a configuration chooses from, and where it is: a new mask, target or decoder is a file and a line here.

Classes are named, not imported: configurations and --help list the names without PyTorch.
"""

from pkgutil import resolve_name
from typing import Any

from common.errors import InputError

MASKS = {
    "adaptive": "model.masking:AdaptiveMasking",
    "random": "model.masking:UniformMasking",
    "tube": "model.masking:UniformMasking",
    "frame": "model.masking:UniformMasking",
    "motion": "model.masking:MotionMasking",
    "motion-share": "model.masking:MotionShareMasking",
}
TARGETS = {
    "pixels": "model.targets:PixelTarget",
    "motion-energy": "model.targets:MotionEnergyTarget",
    "teacher": "model.targets:TeacherTarget",
}
DECODERS = {
    "self": "model.decoder:Decoder",
    "cross": "model.decoder:CrossDecoder",
}


def find_class(registry: dict[str, str], name: str) -> Any:
    """Import and return the class that `name` stands for; raise InputError if the registry has no such line."""
    if name not in registry:
        raise InputError(f"{name!r} is none of {', '.join(registry)}: a new one needs a line in model/registry.py")
    return resolve_name(registry[name])
