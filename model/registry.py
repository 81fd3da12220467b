"""What a configuration chooses from: a new mask, target or decoder is a file and a line here.

Classes are named, not imported: configurations and --help list the names without PyTorch.
"""

from pkgutil import resolve_name
from typing import Any

from adamae.common.errors import InputError

MASKS = {
    "adaptive": "adamae.model.masking:AdaptiveMasking",
    "random": "adamae.model.masking:UniformMasking",
    "tube": "adamae.model.masking:UniformMasking",
    "frame": "adamae.model.masking:UniformMasking",
    "motion": "adamae.model.masking:MotionMasking",
    "motion-share": "adamae.model.masking:MotionShareMasking",
}
TARGETS = {
    "pixels": "adamae.model.targets:PixelTarget",
    "motion-energy": "adamae.model.targets:MotionEnergyTarget",
    "teacher": "adamae.model.targets:TeacherTarget",
}
DECODERS = {
    "self": "adamae.model.decoder:Decoder",
    "cross": "adamae.model.decoder:CrossDecoder",
}


def find_class(registry: dict[str, str], name: str) -> Any:
    """Import the class that `name` stands for; raise InputError if the registry has none."""
    if name not in registry:
        names = ", ".join(registry)
        raise InputError(
            f"{name!r} is none of {names}: a new one needs a line in model/registry.py"
        )
    return resolve_name(registry[name])
