"""Frame masking: whole token frames."""

import torch
from jaxtyping import Int
from torch import Tensor

from model.config import Unit
from model.masking.random import RandomMasking


class FrameMasking(RandomMasking):
    unit: Unit = "frame"

    def token_ids(self, units: Int[Tensor, "B U"]) -> Int[Tensor, "B K"]:
        return (units[:, :, None] * self.area + torch.arange(self.area, device=units.device)).flatten(1)
