"""What a configuration chooses from: each choice is a file and a line here.

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
    "none": "adamae.model.targets:NoTarget",
}
DECODERS = {
    "self": "adamae.model.decoder:Decoder",
    "cross": "adamae.model.decoder:CrossDecoder",
}
# What keeps features of different videos apart where those of a video's views are drawn together.
VIEWS_LOSSES = {
    "infonce": "adamae.model.views:compute_infonce",
}


def find_class(registry: dict[str, str], name: str) -> Any:
    """Import what `name` stands for; raise InputError if the registry does not have it."""
    if name not in registry:
        names = ", ".join(registry)
        raise InputError(
            f"{name!r} is none of {names}: a new one needs a line in model/registry.py"
        )
    return resolve_name(registry[name])
