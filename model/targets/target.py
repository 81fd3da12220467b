"""What every target gives."""

from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from model.config import ModelConfig


class Target(nn.Module):
    """Base class: a target sets `num_values` and defines `forward`."""

    num_values: int  # to predict per token

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, clip: UInt8[Tensor, "B T H W C"], pred: Float[Tensor, "B M P"], masked_ids: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B M"]:
        """Compute the loss of every masked token, in fp32."""
        raise NotImplementedError
