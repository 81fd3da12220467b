"""The interface of frozen encoders."""

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.model.channels import Clip, adapt_channels
from adamae.model.config import Grid
from adamae.model.encoder import Features


class Encoder(nn.Module):
    """A frozen encoder of clips, uint8 [B, T, H, W, C] as decoded; it scales and normalizes them.

    Its tokens are those that the library of the model returns last, in the order (t, h, w).
    """

    # What messages and tables call it.
    name: str
    # T, H and W of the clips that it takes.
    num_frames: int
    image_size: tuple[int, int]
    # C: 3 for RGB, 1 for its grayscale, which is made of RGB.
    channels: int = 3
    # Of the tokens of a clip: their numbers along t, h and w, and their width D.
    grid: Grid
    dim: int
    # What it was trained at: {"frame_stride": 4} or {"fps": 8.0}; None if nothing says.
    frame_rate: dict[str, Any] | None = None

    @abstractmethod
    def encode(self, clip: Clip) -> Features:
        """Compute the tokens [B, N, D] of clips of the right shape, and one vector per clip."""

    @torch.no_grad()
    def forward(self, clip: Clip) -> Features:
        """Encode clips without gradients; raise InputError if they have another shape."""
        expected = (self.num_frames, *self.image_size)
        if clip.shape[1:4] != expected:
            raise InputError(
                f"{self.name} takes clips of {_describe_shape(*expected)}, and these have"
                f" {_describe_shape(*clip.shape[1:4])}: open it for such clips"
            )
        return self.encode(adapt_channels(clip, self.channels))

    def tokens(self, clip: Clip) -> Float[Tensor, "B N D"]:
        """Compute the tokens of clips."""
        return self(clip).tokens

    def pooled(self, clip: Clip) -> Float[Tensor, "B D"]:
        """Compute a vector per clip: the mean over its tokens, unless a subclass says otherwise."""
        return self(clip).pooled


def count_patches(num_frames: int, image_size: tuple[int, int], patch: tuple[int, ...]) -> Grid:
    """Count the patches [t, h, w] that a clip is divided into; raise InputError if some are cut."""
    height, width = image_size
    if num_frames % patch[0] or height % patch[1] or width % patch[2]:
        raise InputError(
            f"clips of {_describe_shape(num_frames, height, width)} cannot be divided into patches"
            f" of {_describe_shape(*patch)}: choose multiples of these"
        )
    return num_frames // patch[0], height // patch[1], width // patch[2]


def check_fixed_shape(
    encoder: Encoder, kind: str, num_frames: int | None, image_size: tuple[int, int] | None
) -> None:
    """Raise InputError if clips are requested for which the encoder has no positions."""
    trained = (encoder.num_frames, encoder.image_size)
    requested = (num_frames or encoder.num_frames, image_size or encoder.image_size)
    if requested != trained:
        raise InputError(
            f"{kind} takes clips of the shape that it was trained on:"
            f" {_describe_shape(encoder.num_frames, *encoder.image_size)}"
        )


def _describe_shape(num_frames: int, height: int, width: int) -> str:
    noun = "frame" if num_frames == 1 else "frames"
    return f"{num_frames} {noun} of {width}×{height} pixels"
