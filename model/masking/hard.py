"""Hides what is hard, as HPM (arXiv 2304.05919) and CL-MAE (arXiv 2308.16572): masks the tokens whose predicted error
ranks highest. Here the token sampler predicts it, which the sampling loss makes proportional to the error."""

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.gumbel_topk import gumbel_topk
from model.config import ModelConfig
from model.masking.adaptive import AdaptiveMasking
from model.masking.mask import Mask, descending_ranks

NEVER = -1e4  # as a logit, far below all noise


class HardMasking(AdaptiveMasking):
    """Masks the most probable tokens, a fraction of the masked ones, and samples the others uniformly.

    The fraction rises with the clips' positions: in evaluation, where these start from 0, hardly any are masked so.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.num_hard = round(config.hard_share * (config.num_tokens - config.num_visible))
        self.warmup_clips = config.hard_warmup_clips

    def sample(self, logits: Float[Tensor, "B N"], seed: int | Tensor, offset: int | Tensor) -> Mask:
        position = offset + torch.arange(len(logits), device=logits.device)
        progress = ((position + 1) / max(1, self.warmup_clips)).clamp(max=1)
        is_hard = descending_ranks(logits.detach()) < (progress * self.num_hard).round()[:, None]
        uniform = torch.zeros_like(logits, dtype=torch.float32).masked_fill(is_hard, NEVER)
        visible, masked, _ = gumbel_topk(uniform.detach(), self.num_visible, seed, offset)
        return Mask(visible, masked, logits.float().log_softmax(dim=1))
