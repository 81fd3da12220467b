"""Which hidden tokens are reconstructed, where not all are: VideoMAE v2's decoder masking (Wang et al. 2023)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kernels import gumbel_topk
from model.config import Grid, ModelConfig
from model.token_samplers import Draw

STREAM = 0x5DEC0DE5  # apart from the noise that chooses the visible tokens
FIRST = 1e4  # as a logit, far above all noise


def reconstructed(draw: Draw, config: ModelConfig, seed: int | Tensor, offset: int | Tensor) -> Int[Tensor, "B R"]:
    """Ids of the hidden tokens that the decoder is to predict, ascending; the loss over those drawn evenly is an
    unbiased estimate of the loss over all."""
    wanted = _logits(draw, config).gather(1, draw.masked_ids)
    chosen, _, _ = gumbel_topk(wanted, config.num_reconstructed, seed ^ STREAM, offset)
    return draw.masked_ids.gather(1, chosen)


def _logits(draw: Draw, config: ModelConfig) -> Float[Tensor, "B N"]:
    if config.decoder_choice == "probability":
        assert draw.log_probs is not None
        return draw.log_probs.detach()
    even = torch.zeros(len(draw.masked_ids), config.num_tokens, device=draw.masked_ids.device)
    if config.decoder_choice == "running-cell":
        return even + FIRST * running_cell(config.grid, even.device)
    return even


def running_cell(grid: Grid, device: torch.device) -> Float[Tensor, " N"]:
    """1 on every other token, as on a chessboard that changes its colours from one token frame to the next."""
    time, height, width = (torch.arange(side, device=device) for side in grid)
    return ((time[:, None, None] + height[:, None] + width) % 2 == 0).float().flatten()
