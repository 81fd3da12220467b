"""What every masking strategy gives, and what it says of itself."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from kernels.gumbel_topk import gumbel_topk
from model.config import ModelConfig
from model.registry import MASKS, find_class


class Mask(NamedTuple):
    """Ids are int64 and ascending."""

    visible_ids: Int[Tensor, "B K"]
    masked_ids: Int[Tensor, "B M"]
    log_probs: Float[Tensor, "B N"] | None  # fp32; None where tokens have no probabilities of their own


class MaskingStrategy(nn.Module):
    """Base class: a strategy sets these and defines `logits`, the probabilities that tokens are sampled by.

    One whose noise decides about more than single tokens (tubes, blocks, a number of them) overrides `sample`, as
    UniformMasking does: its noise is a function of (seed, offset + row), see kernels/noise.py, and every clip has
    `num_visible` visible tokens.
    """

    needs_tokens = False  # whether it reads the embeddings of all tokens; they are not made for others
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


def make_masking(config: ModelConfig) -> MaskingStrategy:
    return find_class(MASKS, config.masking)(config)
