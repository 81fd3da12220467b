"""Tiny models of transformers and timm, with random weights, in folders as their libraries save."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tiny import randomize

VIDEO = {"hidden_size": 36, "num_attention_heads": 2, "intermediate_size": 40}
VISION = {**VIDEO, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
TEXT = {**VIDEO, "num_hidden_layers": 1, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
TUBELETS = {**VIDEO, "num_hidden_layers": 2, "image_size": 32, "num_frames": 4}
VJEPA2 = {
    **VIDEO,
    "num_hidden_layers": 2,
    "crop_size": 32,
    "frames_per_clip": 4,
    "pred_hidden_size": 24,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 1,
    "num_pooler_layers": 1,
}
PRISM = {
    **VIDEO,
    "num_spatial_layers": 1,
    "num_temporal_layers": 1,
    "num_auxiliary_layers": 1,
    "image_size": 32,
    "num_frames": 4,
    "tubelet_size": (1, 8, 8),
}
NAFLEX = {**VIDEO, "num_hidden_layers": 2, "num_patches": 16, "patch_size": 8}
CONVNEXT = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "image_size": 64}
SIZE = {"height": 32, "width": 32}


class Case(NamedTuple):
    """A model that is written, and what of it is the encoder."""

    model: str
    config: dict[str, Any]
    processor: str
    options: dict[str, Any]
    # Of the model, such as vision_model; "": all of it.
    part: str = ""
    # Class and register tokens.
    num_prefix: int = 0

    def write(self, folder: Path) -> Any:
        """Write the model with its processor; return the part that is the encoder."""
        torch.manual_seed(0)
        model_class: Any = getattr(transformers, self.model)
        model = model_class(model_class.config_class(**self.config)).eval()
        # Positions and norms of new models are zeros and ones.
        randomize(model)
        model.save_pretrained(folder)
        getattr(transformers, self.processor)(**self.options).save_pretrained(folder)
        return model.get_submodule(self.part)


CROPPED = {"crop_size": SIZE}
SCALED = {"size": SIZE}
UNIT = {"size": SIZE, "do_normalize": False}
VIVIT = {**TUBELETS, "tubelet_size": [2, 8, 8]}
TIMESFORMER = {**TUBELETS, "patch_size": 8}
REGISTERS = {**VISION, "hidden_size": 40, "num_register_tokens": 3}
PATCHES = {"patch_size": 8, "max_num_patches": 16}
VIDEO_CASES = {
    "vjepa2": Case("VJEPA2Model", VJEPA2, "VJEPA2VideoProcessor", CROPPED),
    "vjepa2 classifier": Case(
        "VJEPA2ForVideoClassification", VJEPA2, "VJEPA2VideoProcessor", CROPPED, "vjepa2"
    ),
    "videoprism": Case("VideoPrismVisionModel", PRISM, "LlavaOnevisionVideoProcessor", UNIT),
    "videoprism lvt": Case(
        "VideoPrismClipModel",
        {"vision_config": PRISM, "text_config": TEXT},
        "LlavaOnevisionVideoProcessor",
        UNIT,
        "video_model.vision_model",
    ),
    "vivit": Case("VivitModel", VIVIT, "VivitVideoProcessor", CROPPED, "", 1),
    "vivit classifier": Case(
        "VivitForVideoClassification", VIVIT, "VivitImageProcessor", CROPPED, "vivit", 1
    ),
    "timesformer": Case(
        "TimesformerForVideoClassification",
        TIMESFORMER,
        "VideoMAEImageProcessor",
        {**CROPPED, "image_mean": [0.45] * 3, "image_std": [0.225] * 3},
        "timesformer",
        1,
    ),
}
IMAGE_CASES = {
    "dinov2": Case("Dinov2Model", VISION, "BitImageProcessor", CROPPED, "", 1),
    "dinov2 with registers": Case(
        "Dinov2WithRegistersModel",
        {**VISION, "num_register_tokens": 3},
        "BitImageProcessor",
        CROPPED,
        "",
        4,
    ),
    "dinov3": Case("DINOv3ViTModel", REGISTERS, "DINOv3ViTImageProcessor", SCALED, "", 4),
    "dinov3 convnext": Case(
        "DINOv3ConvNextModel",
        CONVNEXT,
        "DINOv3ViTImageProcessor",
        {"size": {"height": 64, "width": 64}},
        "",
        1,
    ),
    "clip": Case(
        "CLIPModel",
        {"vision_config": VISION, "text_config": TEXT},
        "CLIPImageProcessor",
        CROPPED,
        "vision_model",
        1,
    ),
    "siglip": Case(
        "SiglipModel",
        {"vision_config": VISION, "text_config": TEXT},
        "SiglipImageProcessor",
        SCALED,
        "vision_model",
    ),
    "siglip2": Case("Siglip2VisionModel", NAFLEX, "Siglip2ImageProcessor", PATCHES),
}
