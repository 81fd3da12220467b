"""Image models of transformers: DINOv2, DINOv3, SigLIP, SigLIP 2 and CLIP."""

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from einops import rearrange
from jaxtyping import UInt8
from torch import Tensor

from adamae.model.encoder import Features
from adamae.model.encoders.encoder import count_patches
from adamae.model.encoders.images import DEFAULT_FRAMES, FrameEncoder
from adamae.model.encoders.normalization import Processor
from adamae.model.encoders.transformers_models import load_model, read_model_config


class ImageEncoder(FrameEncoder):
    """Base class: a model whose patch tokens come last, behind class and register tokens.

    Takes frames of any size that its patches divide: positions are interpolated, or rotary.
    """

    # In transformers.
    name_of_model: str
    name_of_config: str
    # Of each call of the model.
    options: ClassVar[dict[str, bool]] = {}

    def __init__(
        self, path: Path, num_frames: int | None, image_size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        processor = Processor(path)
        self.normalize = processor.make_normalization()
        config = read_model_config(self.name_of_config, path)
        self.dim, self.patch_size, trained_size = self.read_dimensions(config)
        self.num_frames = num_frames or DEFAULT_FRAMES
        self.image_size = image_size or processor.image_size(trained_size)
        patch = (1, self.patch_size, self.patch_size)
        self.grid = count_patches(self.num_frames, self.image_size, patch)
        self.model = load_model(self.name_of_model, path, config)

    def read_dimensions(self, config: Any) -> tuple[int, int, Any]:
        """Return width, side of a patch, and the image size that positions are trained for."""
        return config.hidden_size, config.patch_size, config.image_size

    def encode_images(self, images: UInt8[Tensor, "B H W 3"]) -> Features:
        output = self.model(self.normalize(images), **self.options)
        _, height, width = self.grid
        patches = output.last_hidden_state[:, -height * width :]
        return Features(output.pooler_output, patches)


class Dinov2Encoder(ImageEncoder):
    """DINOv2 (arXiv 2304.07193)."""

    name_of_model = "Dinov2Model"
    name_of_config = "Dinov2Config"


class Dinov2RegistersEncoder(ImageEncoder):
    """DINOv2 with register tokens (arXiv 2309.16588)."""

    name_of_model = "Dinov2WithRegistersModel"
    name_of_config = "Dinov2WithRegistersConfig"


class Dinov3Encoder(ImageEncoder):
    """DINOv3 (arXiv 2508.10104), a vision transformer."""

    name_of_model = "DINOv3ViTModel"
    name_of_config = "DINOv3ViTConfig"


class Dinov3ConvNextEncoder(ImageEncoder):
    """DINOv3, a ConvNeXt."""

    name_of_model = "DINOv3ConvNextModel"
    name_of_config = "DINOv3ConvNextConfig"

    def read_dimensions(self, config: Any) -> tuple[int, int, Any]:
        # A stem that divides by 4, and three stages that halve.
        return config.hidden_sizes[-1], 32, config.image_size


class ClipEncoder(ImageEncoder):
    """The image part of CLIP (arXiv 2103.00020), in front of its projection."""

    name_of_model = "CLIPVisionModel"
    name_of_config = "CLIPVisionConfig"
    options: ClassVar = {"interpolate_pos_encoding": True}


class SiglipEncoder(ImageEncoder):
    """The image part of SigLIP (arXiv 2303.15343), and of SigLIP 2 with a fixed size."""

    name_of_model = "SiglipVisionModel"
    name_of_config = "SiglipVisionConfig"
    options: ClassVar = {"interpolate_pos_encoding": True}


class Siglip2Encoder(ImageEncoder):
    """The image part of SigLIP 2 for any size (NaFlex; arXiv 2502.14786)."""

    name_of_model = "Siglip2VisionModel"
    name_of_config = "Siglip2VisionConfig"

    def read_dimensions(self, config: Any) -> tuple[int, int, Any]:
        return (
            config.hidden_size,
            config.patch_size,
            math.isqrt(config.num_patches) * config.patch_size,
        )

    def encode_images(self, images: UInt8[Tensor, "B H W 3"]) -> Features:
        side = self.patch_size
        patches = rearrange(
            self.normalize(images), "b c (h p) (w q) -> b (h w) (p q c)", p=side, q=side
        )
        # No patch is padding.
        is_patch = torch.ones(patches.shape[:2], dtype=torch.int32, device=patches.device)
        # The model reads these on the host, one by one: from a GPU, each would wait for it.
        shapes = np.tile(self.grid[1:], (len(images), 1))
        output = self.model(patches, pixel_attention_mask=is_patch, spatial_shapes=shapes)
        return Features(output.pooler_output, output.last_hidden_state)
