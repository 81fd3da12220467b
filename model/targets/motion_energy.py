"""How much every part of a clip moves: a target that a small model learns from a few hundred videos."""

from math import gcd

import torch
from einops import rearrange, reduce
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from model.channels import STILL
from model.config import ModelConfig
from model.targets.target import Target


class MotionEnergyTarget(Target):
    """Predicts the motion energy of the four quarters of a patch in each of its frames, standardized per clip.

    It is log(1 + mean absolute change of a pixel to the next frame). Changes themselves are mostly noise: of those of a
    patch, normalized, a tiny model predicts 9 % of the variance, of their energy 45 %
    (docs/results.md#a-few-hundred-labeled-clips).
    """

    def __init__(self, config: ModelConfig, teacher: None = None) -> None:
        super().__init__(config, teacher)
        self.per_side = gcd(config.patch_size, 2)
        self.num_values = config.tubelet_size * self.per_side**2

    def prepare(self, clip: UInt8[Tensor, "B T H W C"]) -> Float[Tensor, "B N P"]:
        """Compute the energy of all tokens; the last frame's change is that of the one before."""
        if self.config.differences:
            now, then = clip, torch.full_like(clip, STILL)
        else:
            now, then = clip[:, :-1], clip[:, 1:]
        change = (torch.maximum(now, then) - torch.minimum(now, then)).sum(dim=4, dtype=torch.int32)
        if not self.config.differences:
            change = torch.cat((change, change[:, -1:]), dim=1)
        side = self.config.patch_size // self.per_side
        energy = reduce(change, "b t (h y) (w x) -> b t h w", "sum", y=side, x=side).float()
        energy = (energy / (side**2 * clip.shape[4])).log1p()
        std, mean = torch.std_mean(energy, dim=(1, 2, 3), correction=0, keepdim=True)
        energy = (energy - mean) / std.clamp_min(1e-3)  # a still clip has no energy to predict
        return rearrange(
            energy, "b (t p) (h y) (w x) -> b (t h w) (p y x)",
            p=self.config.tubelet_size, y=self.per_side, x=self.per_side,
        )  # fmt: skip

    def forward(
        self, prepared: Float[Tensor, "B N P"], pred: Float[Tensor, "B M P"], ids: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B M"]:
        residual = pred.float() - prepared.take_along_dim(ids[..., None], dim=1)
        return (residual.square() if self.config.loss == "mse" else residual.abs()).mean(dim=2)
