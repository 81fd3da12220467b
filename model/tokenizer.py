"""From pixels to tokens, and their positions in the clip."""

from math import prod
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adamae.kernels.patchify import patchify
from adamae.model.casting import Linear, autocast_dtype
from adamae.model.channels import Clip
from adamae.model.config import Grid, ModelConfig


class Tokenizer(nn.Module):
    """A 3-D convolution whose stride is its kernel's size, as patchify and a matmul."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tubelet_size = config.tubelet_size
        self.patch_size = config.patch_size
        self.projection = Linear(config.patch_values, config.dimensions.encoder_width)

    def forward(self, clip: Clip, ids: Int[Tensor, "B K"] | None = None) -> Float[Tensor, "B K D"]:
        """Embed the tokens at `ids`, or all N of them in (t, h, w) order."""
        # Patches have this dtype from the start, without an fp32 copy of the clip.
        dtype = autocast_dtype(clip, self.projection.weight)
        patches = patchify(clip, ids, self.tubelet_size, self.patch_size, dtype)
        return self.projection(patches)


def position_table(
    kind: Literal["flat-1d", "separable-3d"], grid: Grid, width: int
) -> Float[Tensor, "N D"]:
    """Make fixed sine-cosine positions of the tokens of a grid.

    flat-1d: of the flattened index. separable-3d: about a third of the channels for each axis,
    which are 256 each of 768, and of 384 channels 128 each; time gets what a division by three
    leaves.
    """
    if kind == "flat-1d":
        return _sine_cosine(prod(grid), width)
    # An even number: channels are pairs of a sine and a cosine.
    side_width = width // 6 * 2
    time_width = width - 2 * side_width
    num_t, num_h, num_w = grid
    t = _sine_cosine(num_t, time_width)[:, None, None]
    h = _sine_cosine(num_h, side_width)[None, :, None]
    w = _sine_cosine(num_w, side_width)[None, None, :]
    channels = [axis.expand(*grid, -1) for axis in (t, h, w)]
    return torch.cat(channels, dim=-1).flatten(0, 2)


def _sine_cosine(count: int, width: int) -> Float[Tensor, "N D"]:
    """Make positions 0 to count - 1 (Vaswani et al. 2017, arXiv 1706.03762 §3.5).

    Channels 2i and 2i + 1 of position n are the sine and the cosine of n / 10000^(2i / width).
    """
    even_channels = torch.arange(0, width, 2, dtype=torch.float64)
    positions = torch.arange(count, dtype=torch.float64)[:, None]
    angles = positions / 10000 ** (even_channels / width)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()
