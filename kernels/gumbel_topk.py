"""Sampling without replacement from softmax(logits): the k largest of logits + Gumbel noise.

Kool et al. 2019, arXiv 1903.06059. The smaller index wins a tie; a token with a logit of -inf is
chosen only where there are fewer than k others.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamae.kernels.launch import (
    check,
    check_shape,
    rows_contiguous,
    runs_triton,
    triton_op,
    wrap_triton,
)
from adamae.kernels.noise import gumbel, gumbel_row

# The kernel counts tokens in two halves of an int32, so a row must have fewer than 2^15. And one
# program holds a row in its registers, of which a few spill with 2^14 tokens already.
MAX_TOKENS = 2**14
# Smaller keys of finite logits are raised to MIN_KEY, so that all are above the key of -inf.
MIN_KEY = -3.0e38
KEY_OF_MINUS_INF = torch.finfo(torch.float32).min
LOGITS_NOT_FINITE = "gumbel_topk: logits hold NaN or +inf, or a row of nothing but -inf"


def gumbel_topk(
    logits: Tensor, k: int, seed: int | Tensor, offset: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample k of N tokens of each row, without replacement.

    Gradients flow through log_probs alone.

    Args:
        logits: of any floating-point type, [B, N], with N of at most MAX_TOKENS.
        k: number of tokens to sample, from 0 to N.
        seed: of the noise; a number, or int64 [] on the logits' device.
        offset: the position of the first row in the run; likewise a number or tensor. Row b's noise
            depends on seed and offset + b.

    Returns:
        visible_ids: those sampled, int64 [B, k], ascending.
        masked_ids: all others, int64 [B, N - k], ascending.
        log_probs: log-softmax of the logits, fp32 [B, N] (of fp64 logits on a CPU, fp64).

    Raises:
        InputError: if types, shapes or k do not fit.
        RuntimeError: if a row has NaN, +inf, or nothing but -inf. At once on the CPU; on CUDA as a
            device-side assertion, which does not synchronize, but ends the process at its next
            synchronization.
    """
    check_shape("logits", logits, "B", "N")
    check(logits.is_floating_point(), f"logits are {logits.dtype}: give floating-point numbers")
    tokens = logits.shape[1]
    check(0 < tokens <= MAX_TOKENS, f"logits have {tokens} tokens a row: give 1 to {MAX_TOKENS}")
    check(0 <= k <= tokens, f"k is {k}: give a number from 0 to the {tokens} tokens there are")
    sample = gumbel_topk_op if runs_triton(logits) else gumbel_topk_ref
    return sample(logits, k, as_scalar("seed", seed, logits), as_scalar("offset", offset, logits))


def as_scalar(name: str, value: int | Tensor, like: Tensor) -> Tensor:
    """Return a number as int64 [] on `like`'s device, and a tensor as it is.

    Numbers beyond 64 bits wrap around: 2^64 + 3 is 3, and 2^63 is -2^63. Raise InputError if a
    tensor has another type, shape or device.
    """
    if isinstance(value, Tensor):
        is_number = value.ndim == 0 and value.dtype == torch.int64
        fits = is_number and value.device == like.device
        description = f"{name} is {value.dtype} {tuple(value.shape)} on {value.device}"
        check(fits, f"{description}: give a 0-d int64 on {like.device}")
        return value
    wrapped = (value + 2**63) % 2**64 - 2**63
    # A fill: a copy from the host would wait for the device.
    return torch.full((), wrapped, dtype=torch.int64, device=like.device)


def gumbel_topk_ref(
    logits: Tensor, k: int, seed: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `gumbel_topk` returns, by sorting all keys."""
    rows, tokens = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs = torch.log_softmax(logits, dim=1, dtype=dtype)
    with torch.no_grad():
        logits = logits.float()
        largest = logits.amax(dim=1, keepdim=True)
        torch._assert_async(torch.isfinite(largest).all(), LOGITS_NOT_FINITE)
        key = (logits - largest + gumbel(seed, offset, rows, tokens)).clamp(min=MIN_KEY)
        key = key.masked_fill(logits == -torch.inf, KEY_OF_MINUS_INF)
        # Stable, so that the smaller index wins a tie.
        visible = key.argsort(dim=1, descending=True, stable=True)[:, :k]
        is_visible = torch.zeros_like(key, dtype=torch.uint8).scatter_(1, visible, 1)
        # A stable sort of zeros and ones lists masked ids, then visible ones, each ascending.
        ids = is_visible.argsort(dim=1, stable=True)
        masked_ids, visible_ids = ids.split((tokens - k, k), dim=1)
        return visible_ids.contiguous(), masked_ids.contiguous(), log_probs


@triton.jit
def ordered_bits(key):
    """Return uint32 in the order of the fp32 keys: the smaller key has the smaller number.

    As integers, floats ascend while they are positive and descend while they are negative. So all
    bits of a negative one are inverted, and of a positive one the sign alone: -1.0, 0xBF800000,
    becomes 0x407FFFFF, and 1.0, 0x3F800000, becomes 0xBF800000.
    """
    # -0.0 + 0.0 is 0.0: equal keys have equal bits.
    bits = (key + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def kth_largest(bits, k):
    """Find the k-th largest by setting bits from the top.

    A bit stays set if at least k of `bits` reach the number; with k = 0, all stay: 2^32 - 1. Of 9,
    12, 5 and 3 with k = 2, in four bits: 8 is reached by two numbers and stays, 8 + 4 by one and
    does not, 8 + 2 by one and does not, 8 + 1 by two and stays: 9.
    """
    # Inlined, this loop makes torch 2.15's mutation analysis walk 2^32 paths; a call is one edge.
    threshold = tl.zeros((), tl.uint32)
    for position in tl.static_range(31, -1, -1):
        candidate = threshold | (1 << position)
        count = tl.sum((bits >= candidate).to(tl.int32), axis=0)
        threshold = tl.where(count >= k, candidate, threshold)
    return threshold


@triton.jit
def gumbel_topk_kernel(
    logits_ptr,
    seed_ptr,
    offset_ptr,
    visible_ptr,
    masked_ptr,
    log_probs_ptr,
    is_finite_ptr,
    stride,
    tokens,
    k,
    QUARTER: tl.constexpr,
):
    """Sample k tokens of a row: log-softmax, keys, the k-th largest of them, both id lists."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, 4 * QUARTER)
    inside = n < tokens
    logits = tl.load(logits_ptr + row * stride + n, mask=inside, other=-float("inf")).to(tl.float32)
    shifted = logits - tl.max(logits, axis=0)
    total = tl.sum(tl.exp(shifted), axis=0)
    tl.store(log_probs_ptr + row * tokens + n, shifted - tl.log(total), mask=inside)
    # NaN or +inf in the row, or a maximum of -inf, make the sum NaN, which is not equal to itself.
    tl.store(is_finite_ptr + row, total == total)

    noise = gumbel_row(tl.load(seed_ptr), tl.load(offset_ptr) + row, QUARTER)
    key = shifted + noise
    # MIN_KEY, written out, as kernels cannot read globals. NaN fails the comparison and gets it,
    # too.
    key = tl.where(key > -3.0e38, key, -3.0e38)
    # KEY_OF_MINUS_INF.
    key = tl.where(logits == -float("inf"), -3.4028234663852886e38, key)
    # Lanes behind the row are below every key that there is.
    bits = tl.where(inside, ordered_bits(key), 0)
    threshold = kth_largest(bits, k)

    # One scan counts both: keys above the threshold in the low halves, equal keys in the high ones.
    above = (bits > threshold).to(tl.int32)
    equal = ((bits == threshold) & inside).to(tl.int32)
    counts = tl.cumsum(above + (equal << 16), axis=0)
    # What is left of k goes to keys that are equal, the smaller indices first.
    free = k - tl.sum(above, axis=0)
    visible = (above != 0) | ((equal != 0) & ((counts >> 16) <= free))
    # rank = visible tokens in 0..n. Visible n goes to rank - 1, masked n to n - rank.
    rank = (counts & 0xFFFF) + tl.minimum(counts >> 16, free)
    tl.store(visible_ptr + row * k + rank - 1, n.to(tl.int64), mask=visible)
    masked = inside & (visible == 0)
    tl.store(masked_ptr + row * (tokens - k) + n - rank, n.to(tl.int64), mask=masked)


@triton_op("gumbel_topk")
def gumbel_topk_op(
    logits: Tensor, k: int, seed: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens = logits.shape
    logits = rows_contiguous(logits)
    visible_ids = logits.new_empty(rows, k, dtype=torch.int64)
    masked_ids = logits.new_empty(rows, tokens - k, dtype=torch.int64)
    log_probs = logits.new_empty(rows, tokens, dtype=torch.float32)
    is_finite = logits.new_empty(rows, dtype=torch.bool)
    size = triton.next_power_of_2(tokens)
    # 8 tokens a thread up to 4,096 tokens, 16 with 8,192. Only with 32, for 16,384, a few registers
    # spill.
    num_warps = min(16, max(1, size // 256))
    wrap_triton(gumbel_topk_kernel)[(rows,)](
        logits,
        seed,
        offset,
        visible_ids,
        masked_ids,
        log_probs,
        is_finite,
        logits.stride(0),
        tokens,
        k,
        QUARTER=max(1, size // 4),
        num_warps=num_warps,
    )
    torch._assert_async(is_finite.all(), LOGITS_NOT_FINITE)
    return visible_ids, masked_ids, log_probs


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what `_backward` needs."""
    logits, *_ = inputs
    *_, log_probs = output
    ctx.dtype = logits.dtype
    # Otherwise zeros would be filled in as gradients of the ids.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(log_probs)


def _backward(ctx: Any, _visible: Any, _masked: Any, grad: Tensor) -> tuple:
    """Compute the gradient of the logits, which is that of log-softmax; the others have none."""
    (log_probs,) = ctx.saved_tensors
    grad_logits = torch.ops.aten._log_softmax_backward_data(grad, log_probs, 1, grad.dtype)
    return grad_logits.to(ctx.dtype), None, None, None


gumbel_topk_op.register_autograd(_backward, setup_context=_setup)
