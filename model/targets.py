"""What the decoder predicts; `model.registry.TARGETS` names it.

One in a file of its own subclasses Target and needs a line in the registry.
"""

from collections.abc import Callable
from itertools import chain
from math import gcd

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from common import devices
from common.errors import InputError
from kernels.masked_patch_loss import masked_patch_loss
from model.channels import STILL, Clip, measure_change
from model.config import Grid, ModelConfig
from model.registry import TARGETS, find_class

LOSSES: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "smooth-l1": F.smooth_l1_loss}


class Target(nn.Module):
    """Base class: a target sets `num_values` and defines `forward`."""

    num_values: int  # to predict per token
    is_pixels = False  # whether predictions can be shown

    def __init__(self, config: ModelConfig, teacher: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config

    def prepare(self, clip: Clip) -> Tensor:
        """Make what `forward` compares predictions with; called before the tokens are made, so that what it takes is
        free again when activations are kept."""
        return clip

    def forward(self, prepared: Tensor, pred: Float[Tensor, "B M P"], ids: Int[Tensor, "B M"]) -> Float[Tensor, "B M"]:
        """Compute the loss of the tokens at `ids`, in fp32."""
        raise NotImplementedError


def make_target(config: ModelConfig, teacher: nn.Module | None = None) -> Target:
    """Make what model.target names; teacher: what `model.weights.teachers.make_teacher` makes of model.teacher."""
    return find_class(TARGETS, config.target)(config, teacher)


class PixelTarget(Target):
    """The paper's (arXiv 2211.09120 §3.3): pixels in [0, 1], by default normalized per patch and channel.

    The targets are never stored: one kernel makes them from the uint8 clip where it compares them.
    """

    is_pixels = True

    def __init__(self, config: ModelConfig, teacher: nn.Module | None = None) -> None:
        super().__init__(config, teacher)
        self.num_values = config.patch_values

    def forward(self, prepared: Clip, pred: Float[Tensor, "B M P"], ids: Int[Tensor, "B M"]) -> Float[Tensor, "B M"]:
        """Compute the mean squared or absolute error of each token, in fp32."""
        config = self.config
        assert config.loss in ("mse", "l1")
        return masked_patch_loss(
            pred, prepared, ids, config.tubelet_size, config.patch_size, config.loss, config.normalize_target
        )


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

    def prepare(self, clip: Clip) -> Float[Tensor, "B N P"]:
        """Compute the energy of all tokens; the last frame's change is that of the one before."""
        if self.config.differences:
            change = measure_change(clip, torch.full_like(clip, STILL))
        else:
            change = measure_change(clip[:, 1:], clip[:, :-1])
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


class TeacherTarget(Target):
    """Features that a frozen teacher makes of the whole clip, by default normalized per token, as MVD (arXiv
    2212.04500), SALT (arXiv 2509.24317) and TrackMAE predict them.

    The teacher is no submodule: it is neither trained nor saved, averaged or compiled, but moves with the model. Its
    weights are kept in bf16 where the device multiplies bf16.
    """

    def __init__(self, config: ModelConfig, teacher: nn.Module | None = None) -> None:
        """teacher: uint8 [B, T, H, W, C] -> features [B, t, h, w, D], on a grid of its own."""
        super().__init__(config, teacher)
        if teacher is None:
            raise InputError("model.target=teacher needs a teacher: make it by model.weights.teachers.make_teacher")
        self.num_values = measure_width(teacher, config)
        self._unregistered = (teacher.requires_grad_(False).eval(),)

    @property
    def teacher(self) -> nn.Module:
        return self._unregistered[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TeacherTarget":
        """Move the teacher too, as `to` and `to_empty` do."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not isinstance(tensor, nn.Parameter):
                return moved  # positions stay in fp32, and so does the residual stream
            is_bf16 = devices.choose_precision(moved.device, "bf16") == "bf16"
            return moved.to(torch.bfloat16 if is_bf16 else torch.float32)

        self.teacher._apply(move)
        super()._apply(fn, recurse)
        return self

    @torch.compiler.disable
    @torch.no_grad()
    def prepare(self, clip: Clip) -> Float[Tensor, "B N D"]:
        """Compute the teacher's features, on the student's token grid."""
        dtype = next(self.teacher.parameters()).dtype
        with torch.autocast(clip.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            return fit_to_grid(self.teacher(clip), self.config.grid)

    def forward(
        self, prepared: Float[Tensor, "B N D"], pred: Float[Tensor, "B M D"], ids: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B M"]:
        with torch.autocast(pred.device.type, enabled=False):
            target = prepared.take_along_dim(ids[..., None], dim=1).float()
            if self.config.normalize_target:
                target = F.layer_norm(target, target.shape[-1:])
            if self.config.loss == "cosine":
                return 1 - F.cosine_similarity(pred.float(), target, dim=-1)
            return LOSSES[self.config.loss](pred.float(), target, reduction="none").mean(dim=-1)


def measure_width(teacher: nn.Module, config: ModelConfig) -> int:
    """Run a teacher with neither weights nor pixels, which takes no time; return the width of its features.

    Raises InputError where they are not a grid over the clip.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):  # Block takes no meta tensors
            clip = torch.zeros(1, config.num_frames, *config.frame_size, config.in_channels, dtype=torch.uint8)
            weights = chain(teacher.named_parameters(), teacher.named_buffers())
            fake = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in weights}
            shape = functional_call(teacher, fake, clip).shape
        width = shape[4]
    except (RuntimeError, ValueError, TypeError, AssertionError, LookupError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"the teacher {config.teacher} does not take clips of {config.num_frames}×{config.image_size} pixels or"
            f" gives no grid of features ({reason}): choose another one, or another model.teacher_image_size"
        ) from error
    return width


def fit_to_grid(features: Float[Tensor, "B t h w D"], grid: Grid) -> Float[Tensor, "B N D"]:
    """Average features over the tokens' cells where they are finer, and interpolate them where they are coarser."""
    if features.shape[1:4] != grid:
        volume = features.movedim(-1, 1)
        t, h, w = (min(given, wanted) for given, wanted in zip(features.shape[1:4], grid, strict=True))
        volume = F.adaptive_avg_pool3d(volume, (t, h, w))
        if (t, h, w) != grid:
            volume = F.interpolate(volume, size=grid, mode="trilinear", align_corners=False)
        features = volume.movedim(1, -1)
    return features.flatten(1, 3)
