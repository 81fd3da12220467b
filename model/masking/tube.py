"""Tube masking (VideoMAE, arXiv 2203.12602): the same places in every token frame."""

import torch
from jaxtyping import Int
from torch import Tensor

from model.config import Unit
from model.masking.random import RandomMasking


class TubeMasking(RandomMasking):
    unit: Unit = "tube"

    def token_ids(self, units: Int[Tensor, "B U"]) -> Int[Tensor, "B K"]:
        frame_start = torch.arange(self.time, device=units.device) * self.area
        return (frame_start[:, None] + units[:, None, :]).flatten(1)
