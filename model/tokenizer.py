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
    """A 3-D convolution with kernel = stride, as patchify and a matmul."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tubelet_size = config.tubelet_size
        self.patch_size = config.patch_size
        self.projection = Linear(config.patch_values, config.dimensions.encoder_width)

    def forward(self, clip: Clip, ids: Int[Tensor, "B K"] | None = None) -> Float[Tensor, "B K D"]:
        """Embed the tokens at `ids`, or all N of them in (t, h, w) order."""
        dtype = autocast_dtype(
            clip, self.projection.weight
        )  # of the patches from the start: no fp32 copy of the clip
        return self.projection(patchify(clip, ids, self.tubelet_size, self.patch_size, dtype))


def position_table(
    kind: Literal["flat-1d", "separable-3d"], grid: Grid, width: int
) -> Float[Tensor, "N D"]:
    """Make fixed sine-cosine positions: of the flattened token index, or a third of the width for each axis."""
    if kind == "flat-1d":
        return _sine_cosine(prod(grid), width)
    side_width = width // 6 * 2
    widths = (width - 2 * side_width, side_width, side_width)
    t, h, w = map(_sine_cosine, grid, widths)
    axes = (t[:, None, None], h[None, :, None], w[None, None])
    return torch.cat([axis.expand(*grid, -1) for axis in axes], dim=-1).flatten(0, 2)


def _sine_cosine(count: int, width: int) -> Float[Tensor, "N D"]:
    """Make sines on even channels and cosines on odd ones, of the place over 10000^(2·pair/width)."""
    pair = torch.arange(0, width, 2, dtype=torch.float64)
    angle = torch.arange(count, dtype=torch.float64)[:, None] / 10000 ** (pair / width)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()
