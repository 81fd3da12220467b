"""Sampling without replacement from softmax(logits): the k largest of logits + Gumbel noise."""

import torch
from torch import Tensor

from errors import InputError
from kernels.noise import gumbel

SMALLEST_FINITE = -3.0e38  # keys of finite logits end here, above those of -inf
SMALLEST = torch.finfo(torch.float32).min


def gumbel_topk(logits: Tensor, k: int, seed: int | Tensor, offset: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw k of N tokens a row -> visible_ids int64 [B, k], masked_ids int64 [B, N-k], log_probs fp32 [B, N].

    Both id lists ascend. Row b's noise depends on (seed, offset + b) only. Raises where a row holds NaN or +inf, or
    nothing but -inf. Gradients flow through log_probs.
    """
    return definition(logits, k, as_scalar(seed, logits.device), as_scalar(offset, logits.device))


def as_scalar(value: int | Tensor, device: torch.device) -> Tensor:
    """A 0-d int64 tensor, made by a fill rather than a copy from the host, which would wait for the device."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), (value + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)


def definition(logits: Tensor, k: int, seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens = logits.shape
    logits = logits.float()
    log_probs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        largest = logits.amax(dim=-1, keepdim=True)
        if not torch.isfinite(largest).all():
            raise InputError("logits hold NaN or +inf, or a row of nothing but -inf: nothing can be drawn from them")
        key = (logits - largest + gumbel(seed, offset, rows, tokens)).clamp(min=SMALLEST_FINITE)
        visible = largest_keys(key.masked_fill(logits == -torch.inf, SMALLEST), k)
        ids = partition(visible, k)
    return ids[:, :k], ids[:, k:], log_probs


def largest_keys(key: Tensor, k: int) -> Tensor:
    """bool [B, N]: the k largest of each row, of equal keys those with the smaller index."""
    tokens = key.shape[1]
    if k == 0:
        return torch.zeros_like(key, dtype=torch.bool)
    bits = (key + 0.0).view(torch.int32)  # + 0 makes -0 and +0 the same
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the floats
    unique = (ordered << 32) + torch.arange(tokens - 1, -1, -1, device=key.device)  # the index decides between equals
    threshold = unique.kthvalue(tokens - k + 1, dim=-1, keepdim=True).values
    return unique >= threshold


def partition(visible: Tensor, k: int) -> Tensor:
    """int64 [B, N]: the indices of True ascending, then those of False ascending; every row holds k times True."""
    rows, tokens = visible.shape
    index = torch.arange(tokens, device=visible.device).expand(rows, tokens)
    rank = visible.cumsum(dim=-1)  # visible tokens up to and with this one
    place = torch.where(visible, rank - 1, k + index - rank)
    return torch.empty_like(place).scatter_(1, place, index)
