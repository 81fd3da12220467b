"""The paper's target: the pixels of the masked patches (arXiv 2211.09120 §3.3)."""

from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from kernels.masked_patch_loss import masked_patch_loss
from model.config import ModelConfig
from model.targets.target import Target


class PixelTarget(Target):
    """Pixels in [0, 1], or normalized per patch and channel with `model.normalize_target`.

    The targets are never stored: one kernel makes them from the uint8 clip where it compares them.
    """

    is_pixels = True

    def __init__(self, config: ModelConfig, teacher: nn.Module | None = None) -> None:
        super().__init__(config, teacher)
        self.num_values = config.patch_values

    def forward(
        self, prepared: UInt8[Tensor, "B T H W C"], pred: Float[Tensor, "B M P"], ids: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B M"]:
        """Compute the mean squared or absolute error of each token, in fp32."""
        config = self.config
        assert config.loss in ("mse", "l1")
        return masked_patch_loss(
            pred, prepared, ids, config.tubelet_size, config.patch_size, config.loss, config.normalize_target
        )
