"""Philox4x32-10 (Salmon et al. 2011): noise that is a pure function of (seed, row, token), the same on every device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamae.common.arithmetic import ceil_div

ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LOW_32 = 0xFFFFFFFF


def philox(seed: Tensor, offset: Tensor, rows: int, count: int) -> Tensor:
    """int64 [rows, count] in [0, 2^32): word n % 4 of counter (n // 4, offset + row low, its high, 0) under key seed.

    `seed` and `offset` are 0-d int64 tensors. 32-bit words are kept in int64, where a product keeps its low 64 bits.
    """
    words = ceil_div(count, 4)
    row = (offset + torch.arange(rows, device=seed.device))[:, None]
    block = torch.arange(words, device=seed.device)[None, :]
    # Pairs of constants are computed: one that is copied to a GPU waits for it.
    multipliers, increments = (
        pair[0] + torch.arange(2, device=seed.device) * (pair[1] - pair[0])
        for pair in (ROUND_MULTIPLIERS, KEY_INCREMENTS)
    )
    rounds = torch.arange(NUM_ROUNDS, device=seed.device)[:, None]
    keys = torch.stack([seed, seed >> 32]) + rounds * increments
    even = torch.stack(torch.broadcast_tensors(block, row >> 32)) & LOW_32  # counter words 0 and 2
    odd = torch.stack(
        torch.broadcast_tensors(row, torch.zeros_like(block))
    )  # 1 and 3; `even` drops their upper halves
    for key in keys.view(NUM_ROUNDS, 2, 1, 1).unbind():
        odd, previous = (even * multipliers.view(2, 1, 1)).flip(0), odd
        even = (odd >> 32).bitwise_xor_(previous).bitwise_xor_(key).bitwise_and_(LOW_32)
    odd &= LOW_32
    return torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1).flatten(-2)[:, :count]


def gumbel(seed: Tensor, offset: Tensor, rows: int, count: int) -> Tensor:
    """Standard Gumbel noise, fp32 [rows, count]: -log(-log u) with u = (23 bits + 1/2) / 2^23, so 0 < u < 1 exactly."""
    uniform = (philox(seed, offset, rows, count) >> 9).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


@triton.jit
def philox_row(seed, row, QUARTER: tl.constexpr):
    """The same words as `philox` for one row, uint32 [4 · QUARTER]: a thread keeps the four words of its counters."""
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = ((row >> 32) & 0xFFFFFFFF).to(tl.uint32)
    block = tl.arange(0, QUARTER).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block, low, high, low * 0)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (4 * QUARTER,))


@triton.jit
def gumbel_row(seed, row, QUARTER: tl.constexpr):
    # No product is followed by a sum that rounds, so whether the compiler fuses them changes nothing.
    uniform = ((philox_row(seed, row, QUARTER) >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)
    return -tl.log(-tl.log(uniform))
