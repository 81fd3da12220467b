"""Philox4x32-10 (Salmon et al. 2011): noise that is a pure function of (seed, layer, row, token).

It is the same on every device, in any batch and for any number of processes, which is what lets a
run resume, and be repeated, with the same masks.

A counter of four 32-bit words and a key of two make four random words. A clip's counters are
(block, position's low half, position's high half, layer), where its position in the run is offset +
row and a block is four tokens; the key is the seed's halves. Layer 0 is what samples tokens; others
are layers with dropout (keep_mask.py). For seed 2^32 + 7, position 5 and layer 0:

    token                 0   1   2   3   4   5   6   7   8   …
    counter              (0, 5, 0, 0)    (1, 5, 0, 0)    (2, 5, 0, 0)
    key                  (7, 1)
    word of the four      0   1   2   3   0   1   2   3   0   …

Token 6 of that clip thus gets word 2 of what counter (1, 5, 0, 0) makes under the key (7, 1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamae.common.arithmetic import ceil_div

# The constants of Random123's philox.h.
ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LOW_32 = 0xFFFFFFFF


def philox(seed: Tensor, offset: Tensor, rows: int, count: int, layer: int = 0) -> Tensor:
    """Return random words, for the clips at positions offset + 0 to offset + rows - 1.

    philox(seed=0, offset=0, rows=1, count=4) is [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]].

    Args:
        seed: int64 [].
        offset: int64 [], the position of the first clip in the run.
        rows: number of clips.
        count: number of tokens of a clip.
        layer: the last word of all counters.

    Returns:
        int64 [rows, count], from 0 to 2^32 - 1.
    """
    device = seed.device
    row = (offset + torch.arange(rows, device=device))[:, None]
    block = torch.arange(ceil_div(count, 4), device=device)[None, :]
    multipliers = _make_pair(ROUND_MULTIPLIERS, device).view(2, 1, 1)
    increments = _make_pair(KEY_INCREMENTS, device)
    rounds = torch.arange(NUM_ROUNDS, device=device)[:, None]
    keys = torch.stack([seed, seed >> 32]) + rounds * increments
    # Words 0 and 2 of all counters, and words 1 and 3: int64 [2, rows, blocks]. A product of two
    # words needs 64 bits, so words are kept in int64; the upper halves of `odd` and of keys are
    # noise, which is dropped when they get into `even`.
    even = torch.stack(torch.broadcast_tensors(block, row >> 32)) & LOW_32
    odd = torch.stack(torch.broadcast_tensors(row, torch.full_like(block, layer)))
    for key in keys.view(NUM_ROUNDS, 2, 1, 1).unbind():
        # A round multiplies words 0 and 2, and swaps their products. The lower halves become words
        # 1 and 3; the upper halves, with what these were and the key, words 0 and 2.
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(LOW_32)
        odd = product
    odd &= LOW_32
    words = torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1)
    return words.flatten(-2)[:, :count]


def _make_pair(constants: tuple[int, int], device: torch.device) -> Tensor:
    """Return two constants, int64 [2], computed on a device: a copy would wait for a GPU."""
    first, second = constants
    return first + torch.arange(2, device=device) * (second - first)


def gumbel(seed: Tensor, offset: Tensor, rows: int, count: int) -> Tensor:
    """Return standard Gumbel noise -log(-log u), fp32 [rows, count]; arguments as of `philox`.

    u is (the upper 23 bits of a word + 1/2) / 2^23, exact in fp32 and never 0 or 1.
    """
    uniform = (philox(seed, offset, rows, count) >> 9).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


@triton.jit
def philox_row(seed, row, first_block, layer, QUARTER: tl.constexpr):
    """Return words of `philox` for the clip at position `row`, uint32 [4 * QUARTER].

    They are those of QUARTER blocks, from `first_block` on. A thread keeps all four words of its
    counters.
    """
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = ((row >> 32) & 0xFFFFFFFF).to(tl.uint32)
    block = (first_block + tl.arange(0, QUARTER)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block, low, high, low * 0 + layer)
    # The last dimension of the join is the faster one: words come out in the order 0, 1, 2, 3.
    even = tl.join(w0, w2)
    odd = tl.join(w1, w3)
    return tl.reshape(tl.join(even, odd), (4 * QUARTER,))


@triton.jit
def gumbel_row(seed, row, QUARTER: tl.constexpr):
    """Return the noise of `gumbel` for the clip at position `row`, fp32 [4 * QUARTER]."""
    bits = philox_row(seed, row, 0, 0, QUARTER) >> 9
    # No product is followed by a sum that rounds: whether the compiler fuses them changes nothing.
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 8388608)
    return -tl.log(-tl.log(uniform))
