"""What every target gives."""

from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from model.config import ModelConfig
from model.registry import TARGETS, find_class


class Target(nn.Module):
    """Base class: a target sets `num_values` and defines `forward`."""

    num_values: int  # to predict per token
    is_pixels = False  # whether predictions can be shown

    def __init__(self, config: ModelConfig, teacher: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config

    def prepare(self, clip: UInt8[Tensor, "B T H W C"]) -> Tensor:
        """Make what `forward` compares predictions with; called before the tokens are made, so that what it takes is
        free again when activations are kept."""
        return clip

    def forward(self, prepared: Tensor, pred: Float[Tensor, "B M P"], ids: Int[Tensor, "B M"]) -> Float[Tensor, "B M"]:
        """Compute the loss of the tokens at `ids`, in fp32."""
        raise NotImplementedError


def make_target(config: ModelConfig, teacher: nn.Module | None = None) -> Target:
    """Make what model.target names; teacher: what `model.weights.teachers.make_teacher` makes of model.teacher."""
    return find_class(TARGETS, config.target)(config, teacher)
