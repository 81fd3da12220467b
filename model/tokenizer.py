"""From pixels to tokens, and their positions in the clip."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from kernels.patchify import patchify
from model.casting import Linear, autocast_dtype
from model.config import ModelConfig


class Tokenizer(nn.Module):
    """A 3-D convolution with kernel = stride, as patchify and a matmul."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tubelet_size = config.tubelet_size
        self.patch_size = config.patch_size
        self.projection = Linear(config.patch_values, config.dimensions.encoder_width)

    def forward(
        self, clip: UInt8[Tensor, "B T H W C"], ids: Int[Tensor, "B K"] | None = None
    ) -> Float[Tensor, "B K D"]:
        """Embed the tokens at `ids`, or all N of them in (t, h, w) order."""
        dtype = autocast_dtype(clip, self.projection.weight)  # of the patches from the start: no fp32 copy of the clip
        return self.projection(patchify(clip, ids, self.tubelet_size, self.patch_size, dtype))


def position_table(
    kind: Literal["flat-1d", "separable-3d"], grid: tuple[int, int, int], width: int
) -> Float[Tensor, "N D"]:
    """Make fixed sine-cosine positions: of the flattened token index, or a third of the width for each axis."""
    time, height, row = grid
    if kind == "flat-1d":
        return _sine_cosine(range(time * height * row), width)
    side_width = width // 6 * 2
    t = _sine_cosine(range(time), width - 2 * side_width)
    h = _sine_cosine(range(height), side_width)
    w = _sine_cosine(range(row), side_width)
    axes = (
        t[:, None, None].expand(-1, height, row, -1),
        h[None, :, None].expand(time, -1, row, -1),
        w[None, None, :].expand(time, height, -1, -1),
    )
    return torch.cat(axes, dim=-1).flatten(0, 2)


def _sine_cosine(places: Sequence[int], width: int) -> Float[Tensor, "N D"]:
    """Make sines on even channels and cosines on odd ones, of the place over 10000^(2·pair/width)."""
    pair = torch.arange(0, width, 2, dtype=torch.float64)
    angle = torch.tensor(places, dtype=torch.float64)[:, None] / 10000 ** (pair / width)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()
