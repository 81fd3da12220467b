"""Decoder masking (VideoMAE V2, arXiv 2303.16727): reconstruct only a fraction of the masked tokens in training."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kernels.gumbel_topk import gumbel_topk
from model.config import Grid, ModelConfig
from model.masking import Mask

STREAM = 0x5DEC0DE5  # apart from the noise that chooses the visible tokens
FIRST = 1e4  # as a logit, far above all noise


def select_decoder_targets(
    mask: Mask, config: ModelConfig, seed: int | Tensor, offset: int | Tensor
) -> Int[Tensor, "B R"]:
    """Choose the masked tokens to reconstruct, ids ascending.

    The loss over uniformly sampled ones is an unbiased estimate of the loss over all.
    """
    if config.decoder_choice == "probability":
        assert mask.log_probs is not None
        logits = mask.log_probs.detach()
    else:
        logits = torch.zeros(len(mask.masked_ids), config.num_tokens, device=mask.masked_ids.device)
    if config.decoder_choice == "running-cell":
        logits = logits + FIRST * running_cell(config.grid, logits.device)
    chosen, _, _ = gumbel_topk(logits.gather(1, mask.masked_ids), config.num_reconstructed, seed ^ STREAM, offset)
    return mask.masked_ids.gather(1, chosen)


def running_cell(grid: Grid, device: torch.device) -> Float[Tensor, " N"]:
    """Mark every other token, as on a chessboard that swaps its colors from one token frame to the next."""
    time, height, width = (torch.arange(side, device=device) for side in grid)
    return ((time[:, None, None] + height[:, None] + width) % 2 == 0).float().flatten()
