"""Image models of timm, from a folder as `huggingface_hub` downloads it."""

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from adamae.common.devices import is_structure_only
from adamae.common.errors import InputError
from adamae.model.encoder import Features
from adamae.model.encoders.folders import (
    explain_damage,
    first_words,
    require_safetensors,
)
from adamae.model.encoders.images import DEFAULT_FRAMES, FrameEncoder
from adamae.model.encoders.normalization import Normalization


class TimmEncoder(FrameEncoder):
    """Any model that timm builds, a transformer or a convolutional network, on single frames."""

    def __init__(
        self, path: Path, num_frames: int | None, image_size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        require_safetensors(path)
        with explain_damage(path, "timm"), torch.device("meta"):
            trained: Any = create_model(path).pretrained_cfg
        self.num_frames = num_frames or DEFAULT_FRAMES
        self.image_size = image_size or tuple(trained["input_size"][1:])
        self.normalize = Normalization(trained["mean"], trained["std"])
        options: dict[str, Any] = {}
        # Others, such as convolutional networks, take any size, and no such argument.
        if trained["fixed_input_size"]:
            options["img_size"] = self.image_size
        height, width, self.dim = measure_grid(path, options, self.image_size)
        self.grid = (self.num_frames, height, width)
        with explain_damage(path, "timm"):
            self.model: Any = create_model(path, pretrained=not is_structure_only(), **options)

    def encode_images(self, images: UInt8[Tensor, "B H W 3"]) -> Features:
        features = self.model.forward_features(self.normalize(images))
        tokens = to_grid(self.model, features, self.image_size).flatten(1, 2)
        return Features(self.model.forward_head(features, pre_logits=True), tokens)


def create_model(folder: Path, **options: Any) -> Any:
    """Create the model of a folder, without a classifier."""
    # timm takes seconds to import.
    import timm

    return timm.create_model(f"local-dir:{folder}", num_classes=0, **options).eval()


def measure_grid(
    folder: Path, options: dict[str, Any], image_size: tuple[int, int]
) -> tuple[int, int, int]:
    """Return height, width and depth of the features that a model gives of an image.

    A copy without memory computes a black image, in no time. Raise InputError if the model does not
    take such images, or gives no grid.
    """
    try:
        with torch.device("meta"):
            model = create_model(folder, **options)
            features = model.forward_features(torch.zeros(1, 3, *image_size))
            grid = to_grid(model, features, image_size)
    except (RuntimeError, ValueError, TypeError, AssertionError, LookupError) as error:
        height, width = image_size
        raise InputError(
            f"{folder} does not take images of {width}×{height} pixels or gives no grid of features"
            f" ({first_words(error)}): choose another size, or another model"
        ) from error
    return grid.shape[1], grid.shape[2], grid.shape[3]


def to_grid(model: Any, features: Tensor, image_size: tuple[int, int]) -> Float[Tensor, "B h w D"]:
    """Bring what a model's `forward_features` returns into a grid, without prefix tokens."""
    if features.ndim == 3:
        tokens = features[:, model.num_prefix_tokens :]
        height, width = image_size
        # Patches are square: 18 of a frame of 48×96 pixels are 3×6.
        num_rows = math.isqrt(tokens.shape[1] * height // width)
        return tokens.unflatten(1, (num_rows, -1))
    # A transformer with windows puts channels last already.
    if getattr(model, "output_fmt", "NCHW") == "NCHW":
        return features.movedim(1, -1)
    return features
