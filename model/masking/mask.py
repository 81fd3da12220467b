"""What every masking strategy gives, and what it says of itself."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from kernels.gumbel_topk import as_scalar, gumbel_topk
from kernels.noise import gumbel
from model.config import ModelConfig


class Mask(NamedTuple):
    """Ids are int64 and ascending."""

    visible_ids: Int[Tensor, "B K"]
    masked_ids: Int[Tensor, "B M"]
    log_probs: Float[Tensor, "B N"] | None  # fp32; None where tokens have no probabilities of their own


class MaskingStrategy(nn.Module):
    """Base class: a strategy sets these and defines `logits`."""

    needs_tokens = False  # whether it reads the embeddings of all tokens; they are not made for others
    reads_motion = False  # whether it is given maps of true motion in place of clips
    learns = False  # whether the sampling loss trains it
    has_probabilities = False  # whether its masks have log_probs

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_visible = config.num_visible

    def forward(
        self,
        clip: UInt8[Tensor, "B T H W C"],
        tokens: Float[Tensor, "B N D"] | None,
        seed: int | Tensor,
        offset: int | Tensor,
    ) -> Mask:
        """Choose the visible tokens of each clip.

        `offset` is the global position of the batch's first clip: a clip gets the same noise in any batch or rank.
        """
        return self.sample(self.logits(clip, tokens), seed, offset)

    def logits(self, clip: UInt8[Tensor, "B T H W C"], tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
        """Give each token a sampling probability, of which this is the logarithm up to a constant."""
        raise NotImplementedError

    def sample(self, logits: Float[Tensor, "B N"], seed: int | Tensor, offset: int | Tensor) -> Mask:
        """Sample the visible tokens without replacement from softmax(logits), in fp32."""
        with torch.autocast(logits.device.type, enabled=False):
            return Mask(*gumbel_topk(logits, self.num_visible, seed, offset))


@torch.no_grad()
def sample_in_groups(
    logits: Float[Tensor, "B N"],
    in_first: Bool[Tensor, "B N"],
    num_first: int,
    num_visible: int,
    seed: int | Tensor,
    offset: int | Tensor,
) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B M"]]:
    """Sample num_first of the visible tokens from the first group and the others from the second, without replacement.

    Where a group has fewer tokens than that, all of them are visible, and more of the other.
    """
    zero = in_first.new_zeros((), dtype=torch.int64)
    noise = gumbel(as_scalar("seed", seed, zero), as_scalar("offset", offset, zero), *in_first.shape)
    keys = logits.float() + noise
    size = in_first.sum(dim=1, keepdim=True)
    wanted = torch.full_like(size, num_first).clamp_(max=size).maximum(num_visible - (in_first.shape[1] - size))
    is_visible = torch.zeros_like(in_first)
    for group, count in ((in_first, wanted), (~in_first, num_visible - wanted)):
        is_visible |= group & (descending_ranks(keys.masked_fill(~group, -torch.inf)) < count)
    ids = (~is_visible).byte().argsort(dim=1, stable=True)  # visible first, each ascending
    visible, masked = ids.split((num_visible, in_first.shape[1] - num_visible), dim=1)
    return visible.contiguous(), masked.contiguous()


def descending_ranks(values: Float[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Return 0 for the largest value of a row, 1 for the next; of equal ones the first is the larger."""
    return values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
