"""Frozen encoders as teachers: of runs and files of weights, and image encoders of timm.

They are read from local folders. Nothing is downloaded, and no code in a folder is run.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from adamae.common import devices
from adamae.common.atomic_io import hash_file
from adamae.common.errors import InputError
from adamae.common.locations import local_path
from adamae.model.config import ModelConfig
from adamae.model.encoder import VideoEncoder
from adamae.model.weights import pretrained
from adamae.model.weights.find_weights import find_file
from adamae.model.weights.tensor_files import read_json


class Teacher:
    """A frozen encoder, called like a function.

    It is no nn.Module, so that a model that learns from it does not hold its weights. These move to
    where the clips are; parameters are kept in bf16 where the device multiplies bf16.
    """

    def __init__(self, encoder: "VideoTeacher | ImageTeacher") -> None:
        self.encoder = encoder.eval()
        self.width = encoder.width
        self.move_to(next(encoder.parameters()).device)

    @torch.no_grad()
    def __call__(self, clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B t h w D"]:
        """Compute the features of clips, in fp32 or bf16, on the teacher's own grid."""
        if clip.device != self.device:
            self.move_to(clip.device)
        is_bf16 = self.dtype == torch.bfloat16
        with torch.autocast(clip.device.type, torch.bfloat16, enabled=is_bf16):
            return self.encoder(clip)

    def move_to(self, device: torch.device) -> None:
        """Move the encoder to a device, with parameters of the type that is multiplied there."""
        self.device = device
        is_bf16 = devices.choose_precision(device, "bf16") == "bf16"
        self.dtype = torch.bfloat16 if is_bf16 else torch.float32
        for module in self.encoder.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                moved = parameter.to(device, self.dtype)
                setattr(module, name, nn.Parameter(moved, requires_grad=False))
        # Buffers stay in fp32: added positions make the residual stream fp32 too.
        self.encoder.to(device)


class VideoTeacher(nn.Module):
    """Tokenizer and encoder of a run or file, on whole clips."""

    def __init__(self, config: ModelConfig) -> None:
        """Load the encoder; raise InputError if it was trained on clips of another shape."""
        super().__init__()
        state, trained, *_ = pretrained.load(Path(config.teacher), config.num_frames)
        for key in ("num_frames", "image_size", "in_channels"):
            student_value = getattr(config, key)
            teacher_value = getattr(trained, key)
            if student_value != teacher_value:
                raise InputError(
                    f"it takes clips of {key} {teacher_value}, and model.{key} is {student_value}:"
                    " make them equal"
                )
        self.encoder = VideoEncoder(trained, has_norm="encoder.norm.weight" in state)
        self.width = trained.dimensions.encoder_width
        if not _is_structure_only():
            # A pre-training's weights include a decoder's.
            weights = {name: state[name] for name in self.encoder.state_dict()}
            self.encoder.load_state_dict(weights)

    def forward(self, clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B t h w D"]:
        """Encode clips on the encoder's grid of tokens."""
        return self.encoder(clip).tokens.unflatten(1, self.encoder.config.grid)


class ImageTeacher(nn.Module):
    """Any image encoder of timm, on the first frame of every token frame.

    As MVD's image teacher, arXiv 2212.04500. Its folder is one as `huggingface_hub` downloads it.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: ModelConfig) -> None:
        """Load the encoder; raise InputError if it does not take the clips or gives no grid."""
        # timm takes seconds to import, and few runs have a teacher.
        import timm

        super().__init__()
        if config.in_channels != 3:
            raise InputError(f"it takes RGB, and model.in_channels is {config.in_channels}")
        side = config.teacher_image_size
        size: dict[str, Any] = {} if side is None else {"img_size": side}
        name_in_timm = f"local-dir:{config.teacher}"
        self.encoder: Any = timm.create_model(
            name_in_timm, pretrained=not _is_structure_only(), num_classes=0, **size
        )
        trained: Any = self.encoder.pretrained_cfg
        self.size = (side, side) if side else tuple(trained["input_size"][1:])
        self.tubelet_size = config.tubelet_size
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(trained[name]).view(3, 1, 1))
        self.width = self._measure_width(name_in_timm, size)

    def _measure_width(self, name: str, size: dict[str, Any]) -> int:
        """Return the width of the features.

        A copy without memory computes a black image, which takes no time. Raise InputError if the
        encoder does not take such images or gives no grid.
        """
        import timm

        try:
            with torch.device("meta"):
                structure: Any = timm.create_model(name, num_classes=0, **size).eval()
                return encode_images(structure, torch.zeros(1, 3, *self.size)).shape[3]
        except (RuntimeError, ValueError, TypeError, AssertionError, LookupError) as error:
            height, width = self.size
            raise InputError(
                f"it does not take images of {width}×{height} pixels or gives no grid of features"
                f" ({_shorten(error)}): choose another one, or another model.teacher_image_size"
            ) from error

    def forward(self, clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B t h w D"]:
        """Encode the first frame of every tubelet, scaled and normalized as in its training."""
        frames = clip[:, :: self.tubelet_size]
        images = rearrange(frames, "b t h w c -> (b t) c h w").float() / 255
        if images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        features = encode_images(self.encoder, (images - self.mean) / self.std)
        return features.unflatten(0, (len(clip), -1))


def encode_images(encoder: Any, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B h w D"]:
    """Return the features of an image encoder of timm before it pools them.

    Without its class and register tokens.
    """
    features = encoder.forward_features(images)
    if features.ndim == 3:
        tokens = features[:, encoder.num_prefix_tokens :]
        side = math.isqrt(tokens.shape[1])
        return tokens.unflatten(1, (side, -1))
    # A transformer with windows puts channels last already.
    if getattr(encoder, "output_fmt", "NCHW") == "NCHW":
        return features.movedim(1, -1)
    return features


def make_teacher(config: ModelConfig) -> Teacher | None:
    """Make the encoder at model.teacher; return None if that is "".

    It takes clips, uint8 [B, T, H, W, C], and returns features [B, t, h, w, D] on a grid of its
    own. Under `torch.device("meta")` its weights are not read. Raise InputError if it is missing or
    does not fit.
    """
    if not config.teacher:
        return None
    path = local_path(config.teacher, "model.teacher")
    if not path.exists():
        raise InputError(f"the teacher {path} does not exist: set model.teacher to where it is")
    try:
        make_encoder = _choose_kind(path)
        return Teacher(make_encoder(config))
    except InputError as error:
        raise InputError(f"model.teacher={path} cannot be taken: {error}") from error
    except Exception as error:
        # timm raises whatever its folders' contents lead to.
        raise InputError(
            f"the teacher {path} cannot be loaded ({_shorten(error)}): choose another one"
        ) from error


def _shorten(error: Exception) -> str:
    """Return the text of another library's error on one line, as far as a sentence can hold it."""
    return " ".join(str(error).split())[:300]


def hash_teacher(config: ModelConfig) -> str:
    """Hash a teacher's weights and what describes them, but not its path; return "" for none."""
    if not config.teacher:
        return ""
    path = Path(config.teacher)
    if _choose_kind(path) is VideoTeacher:
        files = [find_file(path)]
    else:
        patterns = ("*.json", "*.safetensors", "*.bin", "*.pth", "*.pt")
        files = []
        for pattern in patterns:
            files += path.glob(pattern)
        files.sort()
    hashes = "".join(map(hash_file, files))
    return hashlib.sha256(hashes.encode()).hexdigest()


def _choose_kind(path: Path) -> type[VideoTeacher | ImageTeacher]:
    """Choose by config.json, which folders of timm and transformers have.

    A VideoMAE has this project's architecture. Raise InputError for any other model of
    transformers.
    """
    file = path / "config.json"
    description = read_json(file, file, dict[str, Any]) if file.is_file() else {}
    kind = description.get("model_type", "videomae")
    if kind != "videomae":
        raise InputError(
            f"it is a {kind} of transformers: take that encoder from timm, `hf download timm/…`"
        )
    return ImageTeacher if "architecture" in description else VideoTeacher


def _is_structure_only() -> bool:
    """Return whether models are made without memory, so that weights need not be read."""
    return torch.get_default_device().type == "meta"
