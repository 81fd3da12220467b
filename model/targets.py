"""What the decoder predicts; `model.registry.TARGETS` names it.

To add one, subclass Target in a new file and add a line to `TARGETS`.
"""

from collections.abc import Callable
from math import gcd
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.kernels.masked_patch_loss import masked_patch_loss
from adamae.model.channels import STILL, Clip, measure_change
from adamae.model.config import Grid, ModelConfig
from adamae.model.registry import TARGETS, find_class

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth-l1": F.smooth_l1_loss,
}


class FrozenTeacher(Protocol):
    """A function from clips to features, on a grid of tokens of its own."""

    # Of the features, D.
    width: int

    def __call__(self, clip: Clip) -> Float[Tensor, "B t h w D"]: ...


class Target(nn.Module):
    """Base class: a target sets `num_values` and defines `forward`."""

    # To predict per token, P.
    num_values: int
    # Whether predictions can be shown.
    is_pixels = False

    def __init__(self, config: ModelConfig, teacher: FrozenTeacher | None = None) -> None:
        super().__init__()
        self.config = config

    def prepare(self, clip: Clip) -> Tensor:
        """Make what `forward` compares predictions with.

        Called before the tokens are made, so that the memory it takes is free again when
        activations are kept.
        """
        return clip

    def forward(
        self, prepared: Tensor, pred: Float[Tensor, "B M P"], ids: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B M"]:
        """Compute the loss of the tokens at `ids`, in fp32."""
        raise NotImplementedError


def make_target(config: ModelConfig, teacher: FrozenTeacher | None = None) -> Target:
    """Make the target that model.target names.

    teacher: what `model.encoders.teacher.make_teacher` makes of model.teacher.
    """
    return find_class(TARGETS, config.target)(config, teacher)


class PixelTarget(Target):
    """Pixels in [0, 1], by default normalized per patch and channel, as in the paper.

    arXiv 2211.09120 §3.3. The targets are never stored: one kernel makes them from the uint8 clip
    where it compares them.
    """

    is_pixels = True

    def __init__(self, config: ModelConfig, teacher: FrozenTeacher | None = None) -> None:
        super().__init__(config, teacher)
        self.num_values = config.patch_values

    def forward(
        self, prepared: Clip, pred: Float[Tensor, "B M P"], ids: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B M"]:
        """Compute the mean squared or absolute error of each token, in fp32."""
        config = self.config
        assert config.loss in ("mse", "l1")
        return masked_patch_loss(
            pred,
            prepared,
            ids,
            config.tubelet_size,
            config.patch_size,
            config.loss,
            config.normalize_target,
        )


class MotionEnergyTarget(Target):
    """The motion energy of a patch's four quarters in each of its frames, standardized per clip.

    It is log(1 + mean absolute change of a pixel to the next frame). Changes themselves are mostly
    noise: a tiny model predicts 9 % of the variance of a patch's normalized changes, and 45 % of
    that of their energy (docs/results.md#a-few-hundred-labeled-clips).
    """

    def __init__(self, config: ModelConfig, teacher: FrozenTeacher | None = None) -> None:
        super().__init__(config, teacher)
        self.per_side = gcd(config.patch_size, 2)
        self.num_values = config.tubelet_size * self.per_side**2

    def prepare(self, clip: Clip) -> Float[Tensor, "B N P"]:
        """Compute the energy of all tokens; the last frame's change is that of the one before."""
        if self.config.differences:
            # The frames are differences already, as levels around that of no change.
            change = measure_change(clip, torch.full_like(clip, STILL))
        else:
            change = measure_change(clip[:, 1:], clip[:, :-1])
            change = torch.cat((change, change[:, -1:]), dim=1)
        side = self.config.patch_size // self.per_side
        energy = reduce(change, "b t (h y) (w x) -> b t h w", "sum", y=side, x=side).float()
        energy = (energy / (side**2 * clip.shape[4])).log1p()
        std, mean = torch.std_mean(energy, dim=(1, 2, 3), correction=0, keepdim=True)
        # A still clip has no deviation, and its energy stays 0.
        energy = (energy - mean) / std.clamp_min(1e-3)
        return rearrange(
            energy,
            "b (t p) (h y) (w x) -> b (t h w) (p y x)",
            p=self.config.tubelet_size,
            y=self.per_side,
            x=self.per_side,
        )

    def forward(
        self,
        prepared: Float[Tensor, "B N P"],
        pred: Float[Tensor, "B M P"],
        ids: Int[Tensor, "B M"],
    ) -> Float[Tensor, "B M"]:
        """Compute the mean squared or absolute error of each token, in fp32."""
        target = prepared.take_along_dim(ids[..., None], dim=1)
        residual = pred.float() - target
        errors = residual.square() if self.config.loss == "mse" else residual.abs()
        return errors.mean(dim=2)


class TeacherTarget(Target):
    """Features that a frozen teacher makes of the whole clip, by default normalized per token.

    MVD (arXiv 2212.04500), SALT (arXiv 2509.24317) and TrackMAE predict such features. The teacher
    is a function, not a submodule: it is neither trained nor saved, averaged or compiled with the
    model.
    """

    def __init__(self, config: ModelConfig, teacher: FrozenTeacher | None = None) -> None:
        """Raise InputError if there is no teacher."""
        super().__init__(config, teacher)
        if teacher is None:
            raise InputError(
                "model.target=teacher needs a teacher: make it by"
                " model.encoders.teacher.make_teacher"
            )
        self.num_values = teacher.width
        self.teacher = teacher

    @torch.compiler.disable
    def prepare(self, clip: Clip) -> Float[Tensor, "B N D"]:
        """Compute the teacher's features, on the student's token grid."""
        return fit_to_grid(self.teacher(clip), self.config.grid)

    def forward(
        self,
        prepared: Float[Tensor, "B N D"],
        pred: Float[Tensor, "B M D"],
        ids: Int[Tensor, "B M"],
    ) -> Float[Tensor, "B M"]:
        """Compute the error of each token's features, in fp32."""
        with torch.autocast(pred.device.type, enabled=False):
            target = prepared.take_along_dim(ids[..., None], dim=1).float()
            if self.config.normalize_target:
                target = F.layer_norm(target, target.shape[-1:])
            # Only now, when the raw target is free again.
            pred = pred.float()
            if self.config.loss == "cosine":
                return 1 - F.cosine_similarity(pred, target, dim=-1)
            errors = LOSSES[self.config.loss](pred, target, reduction="none")
            return errors.mean(dim=-1)


class NoTarget(Target):
    """Nothing is predicted, so there is no decoder: views alone train the encoder."""

    num_values = 0


def fit_to_grid(features: Float[Tensor, "B t h w D"], grid: Grid) -> Float[Tensor, "B N D"]:
    """Bring a teacher's features to the student's grid of tokens.

    Along axes on which they are finer, they are averaged; along others they are interpolated: from
    (8, 16, 16) to (16, 8, 8), first to (8, 8, 8).
    """
    t, h, w = features.shape[1:4]
    if (t, h, w) == grid:
        return features.flatten(1, 3)
    coarser = (min(t, grid[0]), min(h, grid[1]), min(w, grid[2]))
    volume = F.adaptive_avg_pool3d(features.movedim(-1, 1), coarser)
    if coarser != grid:
        volume = F.interpolate(volume, size=grid, mode="trilinear", align_corners=False)
    return volume.movedim(1, -1).flatten(1, 3)
