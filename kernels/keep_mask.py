"""Dropout's mask: which values are kept, as a pure function of (seed, position, layer, value).

PyTorch's own dropout depends on the shape of what it drops, so that a clip alone and the same clip
in a batch are dropped differently. The token sampler must not: its logits choose the mask.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamae.common.arithmetic import ceil_div
from adamae.kernels.gumbel_topk import as_scalar
from adamae.kernels.launch import check, runs_triton, triton_op, wrap_triton
from adamae.kernels.noise import philox, philox_row

# A value gets 16 bits, half a word: a probability is rounded to a multiple of 1/65536.
HALF_WORD = 2**16
# Counters of a program, each of which makes 8 values: 16 bytes a thread, with 4 warps.
COUNTERS = 256


def keep_mask(x: Tensor, p: float, seed: int | Tensor, offset: int | Tensor, layer: int) -> Tensor:
    """Return which values of x dropout keeps.

    Args:
        x: [B, …], of which only shape and device are read.
        p: the probability to drop a value, below 1.
        seed: of the noise; a number, or int64 [] on x's device.
        offset: the position of the first clip in the run; likewise a number or tensor.
        layer: from 1 on. Layers have independent masks; 0 is the noise that samples tokens.

    Returns:
        bool, of x's shape.

    Raises:
        InputError: if p, the layer, or the type of seed or offset does not fit.
    """
    check(0 <= p < 1, f"p is {p}: give a probability below 1")
    check(layer > 0, f"the layer is {layer}: count from 1 on")
    count = x[0].numel()
    threshold = round(p * HALF_WORD)
    seed = as_scalar("seed", seed, x)
    offset = as_scalar("offset", offset, x)
    make_mask = keep_mask_op if runs_triton(x) else keep_mask_ref
    return make_mask(seed, offset, len(x), count, threshold, layer).view(x.shape)


def keep_mask_ref(
    seed: Tensor, offset: Tensor, rows: int, count: int, threshold: int, layer: int
) -> Tensor:
    """Return bool [rows, count]: False where half a word is below the threshold, low halves first.

    A whole word a value would take a CPU twice as long.
    """
    words = philox(seed, offset, rows, ceil_div(count, 2), layer)
    # As signed integers, halves ascend from -32768 on once their upper bit is inverted.
    halves = words.int().view(torch.int16) ^ -(HALF_WORD // 2)
    return halves[:, :count] >= threshold - HALF_WORD // 2


@triton.jit
def keep_mask_kernel(
    seed_ptr, offset_ptr, kept_ptr, count, threshold, layer, COUNTERS: tl.constexpr
):
    """Write the values that COUNTERS counters of a clip make."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COUNTERS
    words = philox_row(tl.load(seed_ptr), tl.load(offset_ptr) + row, first, layer, COUNTERS)
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (8 * COUNTERS,))
    n = first * 8 + tl.arange(0, 8 * COUNTERS)
    tl.store(kept_ptr + row * count + n, halves >= threshold, mask=n < count)


@triton_op("keep_mask")
def keep_mask_op(
    seed: Tensor, offset: Tensor, rows: int, count: int, threshold: int, layer: int
) -> Tensor:
    kept = seed.new_empty(rows, count, dtype=torch.bool)
    grid = rows, ceil_div(count, 8 * COUNTERS)
    wrap_triton(keep_mask_kernel)[grid](
        seed, offset, kept, count, threshold, layer, COUNTERS=COUNTERS
    )
    return kept
