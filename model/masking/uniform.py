"""Uniformly sampled tokens, token frames, or tubes (VideoMAE, arXiv 2203.12602: the same places in every frame)."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kernels.gumbel_topk import gumbel_topk
from model.config import ModelConfig
from model.masking.mask import Mask, MaskingStrategy


class UniformMasking(MaskingStrategy):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.masking, self.unit_tokens = config.masking, config.unit_tokens
        self.num_units = config.num_tokens // config.unit_tokens

    def logits(self, clip: UInt8[Tensor, "B T H W C"], tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B U"]:
        return torch.zeros(len(clip), self.num_units, device=clip.device)

    def sample(self, logits: Float[Tensor, "B U"], seed: int | Tensor, offset: int | Tensor) -> Mask:
        visible, masked, _ = gumbel_topk(logits, self.num_visible // self.unit_tokens, seed, offset)
        return Mask(self.token_ids(visible), self.token_ids(masked), None)

    def token_ids(self, units: Int[Tensor, "B U"]) -> Int[Tensor, "B K"]:
        """List the tokens of each unit, ascending."""
        if self.masking == "random":
            return units
        within = torch.arange(self.unit_tokens, device=units.device)
        if self.masking == "tube":
            return (within[:, None] * self.num_units + units[:, None, :]).flatten(1)
        return (units[:, :, None] * self.unit_tokens + within).flatten(1)
