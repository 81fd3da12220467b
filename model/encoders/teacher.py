"""Frozen encoders as teachers, whose features a student predicts (model.target=teacher)."""

import hashlib

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from adamae.common import devices
from adamae.common.atomic_io import hash_file
from adamae.common.devices import Precision
from adamae.common.errors import InputError
from adamae.model.config import ModelConfig
from adamae.model.encoder import Features
from adamae.model.encoders.encoder import Encoder
from adamae.model.encoders.images import FrameEncoder
from adamae.model.encoders.open_encoder import (
    choose_kind,
    find_encoder,
    list_files,
    open_encoder,
)


class Teacher:
    """A frozen encoder, called like a function.

    It is no nn.Module, so that a model that learns from it does not hold its weights. These move to
    where the clips are; parameters are kept in bf16 where the device multiplies bf16.
    """

    def __init__(
        self, encoder: Encoder, frame_step: int = 1, precision: Precision = "bf16"
    ) -> None:
        """frame_step: the encoder sees every so many frames of a clip."""
        self.encoder = encoder
        self.frame_step = frame_step
        self.precision = precision
        self.width = encoder.dim
        self.move_to(next(encoder.parameters()).device)

    def __deepcopy__(self, memo: object) -> "Teacher":
        """Return the same teacher: copies of a model, such as its average, share it."""
        return self

    def __call__(self, clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B t h w D"]:
        """Compute the features of clips, in fp32 or bf16, on the teacher's own grid."""
        return self.encode(clip).tokens.unflatten(1, self.encoder.grid)

    @torch.compiler.disable
    @torch.no_grad()
    def encode(self, clip: UInt8[Tensor, "B T H W C"]) -> Features:
        """Compute the tokens of clips, and one vector per clip, in fp32 or bf16."""
        if clip.device != self.device:
            self.move_to(clip.device)
        frames = scale_frames(clip[:, :: self.frame_step], self.encoder.image_size)
        is_bf16 = self.dtype == torch.bfloat16
        with torch.autocast(clip.device.type, torch.bfloat16, enabled=is_bf16):
            return self.encoder(frames)

    def move_to(self, device: torch.device) -> None:
        """Move the encoder to a device, with parameters of the type that is multiplied there."""
        self.device = device
        is_bf16 = devices.choose_precision(device, self.precision) == "bf16"
        self.dtype = torch.bfloat16 if is_bf16 else torch.float32
        for module in self.encoder.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                moved = parameter.to(device, self.dtype)
                setattr(module, name, nn.Parameter(moved, requires_grad=False))
            # Buffers stay in fp32: added positions make the residual stream fp32 too.
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))


def scale_frames(
    clip: UInt8[Tensor, "B T H W C"], size: tuple[int, int]
) -> UInt8[Tensor, "B T h w C"]:
    """Scale the frames of clips to height and width, bilinearly and with antialiasing."""
    if clip.shape[2:4] == size:
        return clip
    images = rearrange(clip, "b t h w c -> (b t) c h w").float()
    scaled = F.interpolate(images, size, mode="bilinear", antialias=True)
    return rearrange(scaled.round().byte(), "(b t) c h w -> b t h w c", b=len(clip))


def make_teacher(config: ModelConfig) -> Teacher | None:
    """Make the encoder at model.teacher; return None if that is "".

    It takes clips, uint8 [B, T, H, W, C], and returns features [B, t, h, w, D] on a grid of its
    own. An image model sees the first frame of every token frame, as MVD's image teacher (arXiv
    2212.04500). Under `torch.device("meta")` weights are not read. Raise InputError if it is
    missing or does not fit.
    """
    if not config.teacher:
        return None
    try:
        path = find_encoder(config.teacher)
        is_image_model = issubclass(choose_kind(path), FrameEncoder)
        frame_step = config.tubelet_size if is_image_model else 1
        encoder = open_encoder(
            config.teacher,
            num_frames=config.num_frames // frame_step,
            image_size=config.teacher_image_size,
        )
        if encoder.channels != config.in_channels:
            raise InputError(
                f"it takes {encoder.channels} channels, and model.in_channels is"
                f" {config.in_channels}"
            )
        return Teacher(encoder, frame_step)
    except InputError as error:
        raise InputError(f"model.teacher={config.teacher} cannot be used: {error}") from error


def hash_teacher(config: ModelConfig) -> str:
    """Hash a teacher's weights and what describes them, but not its path; return "" for none."""
    if not config.teacher:
        return ""
    return hash_encoder(config.teacher)


def hash_encoder(spec: str) -> str:
    """Hash the files that an encoder is read from."""
    hashes = "".join(map(hash_file, list_files(find_encoder(spec))))
    return hashlib.sha256(hashes.encode()).hexdigest()
