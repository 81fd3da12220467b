"""Motion-guided masking, without learning: sampling probability by temporal difference (EVEREST, arXiv 2211.10636)."""

import torch
from einops import reduce
from jaxtyping import Float, UInt8
from torch import Tensor

from common.errors import InputError
from kernels.gumbel_topk import gumbel_topk
from model.config import ModelConfig
from model.masking.mask import Mask, MaskingStrategy


class MotionMasking(MaskingStrategy):
    has_probabilities = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tubelet_size, self.patch_size = config.tubelet_size, config.patch_size
        if config.grid[0] < 2:
            raise InputError(
                f"model.masking=motion compares neighboring token frames, and a clip of {config.num_frames} frames in"
                f" tubelets of {config.tubelet_size} has only one: raise model.num_frames"
            )

    def logits(self, clip: UInt8[Tensor, "B T H W C"], tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
        return log_motion(clip, self.tubelet_size, self.patch_size)


class MotionShareMasking(MotionMasking):
    """Half of the visible tokens come from the fifth of the tokens that changes most, uniformly, the others from the
    rest."""

    has_probabilities = False

    def sample(self, logits: Float[Tensor, "B N"], seed: int | Tensor, offset: int | Tensor) -> Mask:
        num_tokens, half = logits.shape[1], self.num_visible // 2
        num_moving = max(half, num_tokens // 5)
        ranked = logits.argsort(dim=1, descending=True, stable=True)
        groups = ranked.split((num_moving, num_tokens - num_moving), dim=1)
        chosen = []
        for stream, (ids, count) in enumerate(zip(groups, (half, self.num_visible - half), strict=True)):
            kept, left, _ = gumbel_topk(torch.zeros_like(ids, dtype=torch.float32), count, seed ^ stream, offset)
            chosen.append((ids.gather(1, kept), ids.gather(1, left)))
        visible, masked = (torch.cat(ids, dim=1).sort(dim=1).values for ids in zip(*chosen, strict=True))
        return Mask(visible, masked, None)


def log_motion(clip: UInt8[Tensor, "B T H W C"], tubelet_size: int, patch_size: int) -> Float[Tensor, "B N"]:
    """Compute the logarithm of 1 + the mean absolute difference, in 0…255, to the neighboring token frames.

    The 1, about what a sensor's noise makes, leaves static tokens a chance. The first and the last token frame have one
    neighbor.
    """
    later, earlier = clip[:, tubelet_size:], clip[:, :-tubelet_size]
    change = torch.maximum(later, earlier) - torch.minimum(later, earlier)  # bytes: floats would take four times them
    step = reduce(
        # A sum of bytes needs no copy of them in another type.
        change.sum(dim=4, dtype=torch.int32), "b (t pt) (h ph) (w pw) -> b t h w", "sum",
        pt=tubelet_size, ph=patch_size, pw=patch_size,
    )  # fmt: skip
    step = step.float() / (clip.shape[4] * tubelet_size * patch_size**2)
    to_next, to_previous = torch.cat((step, step[:, -1:]), dim=1), torch.cat((step[:, :1], step), dim=1)
    return ((to_next + to_previous) / 2).log1p().flatten(1)
