"""Uniformly sampled tokens."""

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kernels import gumbel_topk
from model.config import ModelConfig
from model.masking.mask import Mask, MaskingStrategy


class RandomMasking(MaskingStrategy):
    """Also the base of tube and frame masking, which sample larger units."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        time, height, width = config.grid
        self.time, self.area = time, height * width
        self.num_units = {"token": time * self.area, "tube": self.area, "frame": time}[self.unit]
        self.num_visible_units = config.num_visible * self.num_units // config.num_tokens

    def logits(self, clip: UInt8[Tensor, "B T H W C"], tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B U"]:
        return torch.zeros(len(clip), self.num_units, device=clip.device)

    def sample(self, logits: Float[Tensor, "B U"], seed: int | Tensor, offset: int | Tensor) -> Mask:
        visible, masked, _ = gumbel_topk(logits, self.num_visible_units, seed, offset)
        return Mask(self.token_ids(visible), self.token_ids(masked), None)

    def token_ids(self, units: Int[Tensor, "B U"]) -> Int[Tensor, "B K"]:
        """List the tokens of each unit, ascending."""
        return units
