"""Frozen encoders as teachers: of runs and files of weights, and image encoders of timm, from local folders. Nothing is
downloaded, and no code in a folder is run."""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from common.atomic_io import hash_file
from common.errors import InputError
from model.config import ModelConfig
from model.encoder import VideoEncoder
from model.weights import pretrained
from model.weights.weight_files import read_json


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
    """Any image encoder of timm, from a folder as `huggingface_hub` downloads it, on the first frame of every token
    frame (as MVD's image teacher, arXiv 2212.04500)."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: ModelConfig) -> None:
        import timm

        super().__init__()
        if config.in_channels != 3:
            raise InputError(f"it takes RGB, and model.in_channels is {config.in_channels}")
        side = config.teacher_image_size
        size: dict[str, Any] = {} if side is None else {"img_size": side}
        name = f"local-dir:{config.teacher}"
        self.encoder: Any = timm.create_model(name, pretrained=not _is_structure_only(), num_classes=0, **size)
        known: Any = self.encoder.pretrained_cfg
        self.size = (side, side) if side else tuple(known["input_size"][1:])
        self.tubelet_size = config.tubelet_size
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(known[name]).view(3, 1, 1))

    def forward(self, clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B t h w D"]:
        images = rearrange(clip[:, :: self.tubelet_size], "b t h w c -> (b t) c h w").float() / 255
        if images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        features = self.encoder.forward_features((images - self.mean) / self.std)
        if features.ndim == 3:
            tokens = features[:, self.encoder.num_prefix_tokens :]
            features = tokens.unflatten(1, (math.isqrt(tokens.shape[1]), -1))
        elif getattr(self.encoder, "output_fmt", "NCHW") == "NCHW":  # not of a transformer with windows
            features = features.movedim(1, -1)
        return features.unflatten(0, (len(clip), -1))


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
    except Exception as error:  # timm raises whatever its folders' contents lead to
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
        patterns = ("*.json", "*.safetensors", "*.bin", "*.pth", "*.pt")
        files = sorted(file for pattern in patterns for file in path.glob(pattern))
    return hashlib.sha256("".join(map(hash_file, files)).encode()).hexdigest()


def _choose_kind(path: Path) -> type[VideoTeacher | ImageTeacher]:
    """Tell by config.json, which folders of timm and transformers have; a VideoMAE has this project's architecture."""
    file = path / "config.json"
    described = read_json(file, file, dict[str, Any]) if file.is_file() else {}
    if (kind := described.get("model_type", "videomae")) != "videomae":
        raise InputError(f"it is a {kind} of transformers: take that encoder from timm, `hf download timm/…`")
    return ImageTeacher if "architecture" in described else VideoTeacher


def _is_structure_only() -> bool:
    return torch.get_default_device().type == "meta"
