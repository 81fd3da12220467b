"""From decoded pixels to what an encoder was trained on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.model.weights.tensor_files import read_json

# Files beside the weights of transformers. A model of videos may have both of the first two.
PROCESSOR_FILES = (
    "video_preprocessor_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
# Under these keys, processor_config.json holds what the other files hold at the top.
NESTED_KEYS = ("video_processor", "image_processor")


class Normalization(nn.Module):
    """(pixel · factor + offset − mean) / standard deviation, as one multiplication and one sum."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], factor: float = 1 / 255, offset: int = 0
    ) -> None:
        """mean, std: of the three channels, after pixels of 0 to 255 were rescaled."""
        super().__init__()
        # Buffers that are part of the state: a hash of an encoder is one of its normalization, too.
        deviation = torch.tensor(std, dtype=torch.float64)
        scale = factor / deviation
        shift = (offset - torch.tensor(mean, dtype=torch.float64)) / deviation
        self.register_buffer("scale", scale.float().view(3, 1, 1))
        self.register_buffer("shift", shift.float().view(3, 1, 1))

    def forward(self, frames: UInt8[Tensor, "*B H W C"]) -> Float[Tensor, "*B C H W"]:
        """Normalize frames, and put channels before pixels."""
        return frames.movedim(-1, -3) * self.scale + self.shift


class Processor:
    """What a folder of transformers says about the input of its model."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's file. Raise InputError if there is none, or it says too little."""
        file = find_processor(folder)
        if file is None:
            raise InputError(
                f"{folder} does not say how its model's frames are normalized: add the"
                f" {PROCESSOR_FILES[1]} of the model's repository, or save its processor there, too"
            )
        self.file = file
        self.options = read_json(file, file, dict[str, Any])
        for key in NESTED_KEYS:
            self.options = self.options.get(key, self.options)

    def make_normalization(self) -> Normalization:
        """Make the normalization that transformers' processor would apply."""
        options = self.options
        factor = 1.0
        if options.get("do_rescale", True):
            factor = options.get("rescale_factor", 1 / 255)
        # ViViT's pixels lie between −1 and 1 before they are normalized; its processor of videos,
        # unlike the one of images, does not say so.
        is_centered = options.get("offset", "Vivit" in options.get("video_processor_type", ""))
        offset = -1 if is_centered else 0
        if not options.get("do_normalize", True):
            return Normalization([0, 0, 0], [1, 1, 1], factor, offset)
        mean = options.get("image_mean")
        std = options.get("image_std")
        if mean is None or std is None:
            raise InputError(
                f"{self.file} does not say image_mean and image_std: take the file of the model's"
                " repository"
            )
        return Normalization(mean, std, factor, offset)

    def image_size(self, default: Any) -> tuple[int, int]:
        """Return height and width of the frames that the model gets.

        default: what the model's configuration says, a side or both, if the file says nothing.
        """
        size = self.options.get("size", default)
        if self.options.get("do_center_crop", "crop_size" in self.options):
            size = self.options.get("crop_size", size)
        if isinstance(size, dict):
            if "height" in size:
                return size["height"], size["width"]
            size = size.get("shortest_edge", default)
        if isinstance(size, int):
            return size, size
        height, width = size
        return height, width


def find_processor(folder: Path) -> Path | None:
    """Return the file that describes the input of a folder's model; None if there is none."""
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            return folder / name
    return None
