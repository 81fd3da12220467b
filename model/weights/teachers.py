"""Frozen encoders as teachers: of runs and files of weights, and image encoders of timm and transformers, from local
folders. Nothing is downloaded, and no code in a folder is run."""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from common.atomic_io import hash_file
from common.errors import InputError
from kernels.patchify import IMAGENET_MEAN, IMAGENET_STD
from model.config import ModelConfig
from model.encoder import VideoEncoder
from model.weights import pretrained
from model.weights.weight_files import read_json

Encode = Callable[[Tensor], Tensor]  # images [b, 3, H, W] -> features [b, h, w, D]
WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt")


class VideoTeacher(nn.Module):
    """Tokenizer and encoder of a run or file, on whole clips."""

    def __init__(self, config: ModelConfig) -> None:
        """Raise InputError where it was trained on clips of another shape."""
        super().__init__()
        state, trained, *_ = pretrained.load(Path(config.teacher), config.num_frames)
        for key in ("num_frames", "image_size", "in_channels"):
            wanted, given = getattr(config, key), getattr(trained, key)
            if wanted != given:
                raise InputError(f"it takes clips of {key} {given}, and model.{key} is {wanted}: make them equal")
        self.encoder = VideoEncoder(trained, has_norm="encoder.norm.weight" in state)
        if not _is_structure_only():
            self.encoder.load_state_dict({name: state[name] for name in self.encoder.state_dict()})

    def forward(self, clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B t h w D"]:
        return self.encoder(clip).tokens.unflatten(1, self.encoder.config.grid)


class ImageTeacher(nn.Module):
    """An image encoder, on the first frame of every token frame (as MVD's image teacher, arXiv 2212.04500)."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, config: ModelConfig, encoder: nn.Module, encode: Encode, size: tuple[int, int], mean: Any, std: Any
    ) -> None:
        """encode: what calls `encoder`, on normalized images of `size`."""
        super().__init__()
        if config.in_channels != 3:
            raise InputError(f"it takes RGB, and model.in_channels is {config.in_channels}")
        self.encoder, self.encode, self.size, self.tubelet_size = encoder, encode, size, config.tubelet_size
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1))

    def forward(self, clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B t h w D"]:
        images = rearrange(clip[:, :: self.tubelet_size], "b t h w c -> (b t) c h w").float() / 255
        if images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        return self.encode((images - self.mean) / self.std).unflatten(0, (len(clip), -1))


def make_timm_teacher(config: ModelConfig) -> ImageTeacher:
    """Make any model of timm, from a folder as `huggingface_hub` downloads it."""
    import timm

    side = config.teacher_image_size
    size: dict[str, Any] = {} if side is None else {"img_size": side}
    name = f"local-dir:{config.teacher}"
    encoder: Any = timm.create_model(name, pretrained=not _is_structure_only(), num_classes=0, **size)
    known = encoder.pretrained_cfg
    height, width = (side, side) if side else known["input_size"][1:]

    def encode(images: Tensor) -> Tensor:
        features = encoder.forward_features(images)
        if features.ndim == 4:  # of a convolutional network, or of one with windows
            return features if getattr(encoder, "output_fmt", "NCHW") == "NHWC" else features.movedim(1, -1)
        tokens = features[:, encoder.num_prefix_tokens :]
        return tokens.unflatten(1, (math.isqrt(tokens.shape[1]), -1))

    return ImageTeacher(config, encoder, encode, (height, width), known["mean"], known["std"])


def make_transformers_teacher(config: ModelConfig) -> ImageTeacher:
    """Make a vision transformer of transformers, or that of a pair with a text encoder, from a folder."""
    try:
        from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise InputError("it is of transformers: pip install 'adamae[transformers]'") from error
    folder = Path(config.teacher)
    known = AutoConfig.from_pretrained(folder, local_files_only=True)
    vision = getattr(known, "vision_config", known)
    if not hasattr(vision, "patch_size") or not hasattr(vision, "image_size"):
        raise InputError(f"{known.model_type} is no vision transformer")
    if _is_structure_only():
        model = AutoModel.from_config(known)
    else:
        model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    encoder = getattr(model, "vision_model", model)
    side = config.teacher_image_size or vision.image_size
    height, width = (side, side) if isinstance(side, int) else side
    grid = height // vision.patch_size, width // vision.patch_size
    # DINO always interpolates its positions.
    interpolates = config.teacher_image_size is not None and not known.model_type.startswith("dino")
    options = {"interpolate_pos_encoding": True} if interpolates else {}

    def encode(images: Tensor) -> Tensor:
        tokens = encoder(pixel_values=images, **options).last_hidden_state
        return tokens[:, -math.prod(grid) :].unflatten(1, grid)  # after class and register tokens

    file = folder / "preprocessor_config.json"
    pixels = read_json(file, file, dict[str, Any]) if file.is_file() else {}
    mean, std = pixels.get("image_mean", IMAGENET_MEAN), pixels.get("image_std", IMAGENET_STD)
    return ImageTeacher(config, encoder, encode, (height, width), mean, std)


def make_teacher(config: ModelConfig) -> nn.Module | None:
    """Make the encoder at model.teacher: uint8 [B, T, H, W, C] -> features [B, t, h, w, D], on a grid of its own; None
    where model.teacher is "".

    Under `torch.device("meta")` its weights are not read. Raises InputError where it is missing or does not fit.
    """
    if not config.teacher:
        return None
    path = Path(config.teacher)
    if not path.exists():
        raise InputError(f"the teacher {path} does not exist: set model.teacher to where it is")
    try:
        return _choose_kind(path)(config)
    except InputError as error:
        raise InputError(f"model.teacher={path} cannot be taken: {error}") from error
    except Exception as error:  # the libraries raise whatever their folders' contents lead to
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"the teacher {path} cannot be loaded ({reason}): choose another one") from error


def hash_teacher(config: ModelConfig) -> str:
    """Hash a teacher's weights and what describes them, wherever they are; "" where there is none."""
    if not config.teacher:
        return ""
    path = Path(config.teacher)
    if _choose_kind(path) is VideoTeacher:
        files = [pretrained.find_file(path)]
    else:
        files = sorted(file for pattern in ("*.json", *WEIGHTS) for file in path.glob(pattern))
    return hashlib.sha256("".join(map(hash_file, files)).encode()).hexdigest()


def _choose_kind(path: Path) -> Callable[[ModelConfig], nn.Module]:
    """Tell by config.json, which folders of timm and transformers have."""
    file = path / "config.json"
    described = read_json(file, file, dict[str, Any]) if file.is_file() else {}
    if "architecture" in described:
        return make_timm_teacher
    # A VideoMAE has this project's architecture.
    return VideoTeacher if described.get("model_type", "videomae") == "videomae" else make_transformers_teacher


def _is_structure_only() -> bool:
    return torch.get_default_device().type == "meta"
