"""Shows a set share of what truly moves, to measure which share is best; for synthetic videos with maps of motion."""

from einops import reduce
from jaxtyping import Float, UInt8
from torch import Tensor

from model.config import ModelConfig
from model.masking.mask import Mask, MaskingStrategy, sample_in_groups


class OracleMasking(MaskingStrategy):
    """Samples moving and still tokens uniformly, a set number of each; moving are those that moving objects
    cover by more than half.

    Where fewer tokens move than are asked for, all of them are visible.
    """

    reads_motion = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.num_moving = round(config.oracle_share * config.num_visible)
        self.tubelet_size, self.patch_size = config.tubelet_size, config.patch_size

    def logits(self, clip: UInt8[Tensor, "B T H W 1"], tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
        """Return the mean of each token's part of the motion map, 0 to 255."""
        sizes = {"pt": self.tubelet_size, "ph": self.patch_size, "pw": self.patch_size}
        return reduce(clip.float(), "b (t pt) (h ph) (w pw) 1 -> b (t h w)", "mean", **sizes)

    def sample(self, logits: Float[Tensor, "B N"], seed: int | Tensor, offset: int | Tensor) -> Mask:
        moving = logits > 127.5
        ids = sample_in_groups(logits.new_zeros(logits.shape), moving, self.num_moving, self.num_visible, seed, offset)
        return Mask(*ids, None)
