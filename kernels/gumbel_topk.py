"""Sampling without replacement from softmax(logits): the k largest of logits + Gumbel noise."""

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

MAX_TOKENS = 16384  # one program holds a row in its registers
SMALLEST_FINITE = -3.0e38  # keys of finite logits end here, above those of -inf
SMALLEST = torch.finfo(torch.float32).min
LOGITS_NOT_FINITE = "gumbel_topk: logits hold NaN or +inf, or a row of nothing but -inf"


def gumbel_topk(
    logits: Tensor, k: int, seed: int | Tensor, offset: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample k of N tokens per row -> visible_ids int64 [B, k], masked_ids int64 [B, N-k], log_probs fp32 [B, N].

    Both id lists ascend. Row b's noise depends on (seed, offset + b) only. Gradients flow through log_probs.
    A row with NaN, with +inf, or of nothing but -inf raises RuntimeError: at once on the CPU; on CUDA as a device-side
    assertion, which costs no synchronization here and ends the process at its next one.
    """
    check_shape("logits", logits, "B", "N")
    check(logits.is_floating_point(), f"logits are {logits.dtype}: give floating-point numbers")
    tokens = logits.shape[1]
    check(0 < tokens <= MAX_TOKENS, f"logits have {tokens} tokens a row: give 1 to {MAX_TOKENS}")
    check(0 <= k <= tokens, f"k is {k}: give a number from 0 to the {tokens} tokens there are")
    sample = gumbel_topk_op if runs_triton(logits) else gumbel_topk_ref
    return sample(logits, k, as_scalar("seed", seed, logits), as_scalar("offset", offset, logits))


def as_scalar(name: str, value: int | Tensor, like: Tensor) -> Tensor:
    """A 0-d int64 tensor, made by a fill rather than a copy from the host, which would wait for the device."""
    if isinstance(value, Tensor):
        fits = value.ndim == 0 and value.dtype == torch.int64 and value.device == like.device
        said = f"{name} is {value.dtype} {tuple(value.shape)} on {value.device}"
        check(fits, f"{said}: give a 0-d int64 on {like.device}")
        return value
    return torch.full((), (value + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=like.device)


def gumbel_topk_ref(
    logits: Tensor, k: int, seed: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens = logits.shape
    log_probs = torch.log_softmax(
        logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32)
    )
    with torch.no_grad():
        logits = logits.float()
        largest = logits.amax(dim=1, keepdim=True)
        torch._assert_async(torch.isfinite(largest).all(), LOGITS_NOT_FINITE)
        key = (logits - largest + gumbel(seed, offset, rows, tokens)).clamp(min=SMALLEST_FINITE)
        key = key.masked_fill(logits == -torch.inf, SMALLEST)
        visible = key.argsort(dim=1, descending=True, stable=True)[
            :, :k
        ]  # stable: the smaller index wins a tie
        is_visible = torch.zeros_like(key, dtype=torch.uint8).scatter_(1, visible, 1)
        masked_ids, visible_ids = is_visible.argsort(dim=1, stable=True).split(
            (tokens - k, k), dim=1
        )
        return visible_ids.contiguous(), masked_ids.contiguous(), log_probs


@triton.jit
def ordered_bits(key):
    """uint32 in the order of the fp32 keys."""
    bits = (key + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def kth_largest(bits, k):
    """The largest uint32 that at least k of `bits` reach, found bit by bit; 2^32 - 1 for k = 0."""
    # A function of its own for torch.compile too: torch 2.15 follows every path from a store's address to the
    # arguments to see what a kernel writes, at calls only from result to argument, and here there are 2^32 paths.
    threshold = tl.zeros((), tl.uint32)
    for position in tl.static_range(31, -1, -1):
        candidate = threshold | (1 << position)
        threshold = tl.where(
            tl.sum((bits >= candidate).to(tl.int32), axis=0) >= k, candidate, threshold
        )
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
    """One program a row: log-softmax, keys, the k-th largest key by bisection on its bits, both id lists."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, 4 * QUARTER)
    inside = n < tokens
    logits = tl.load(logits_ptr + row * stride + n, mask=inside, other=-float("inf")).to(tl.float32)
    shifted = logits - tl.max(logits, axis=0)
    total = tl.sum(tl.exp(shifted), axis=0)
    tl.store(log_probs_ptr + row * tokens + n, shifted - tl.log(total), mask=inside)
    tl.store(
        is_finite_ptr + row, total == total
    )  # NaN or +inf in the row, or a maximum of -inf, make the sum NaN

    noise = gumbel_row(tl.load(seed_ptr), tl.load(offset_ptr) + row, QUARTER)
    key = shifted + noise
    key = tl.where(key > -3.0e38, key, -3.0e38)  # SMALLEST_FINITE, also for NaN
    key = tl.where(logits == -float("inf"), -3.4028234663852886e38, key)  # SMALLEST
    bits = tl.where(inside, ordered_bits(key), 0)  # below every key there is
    threshold = kth_largest(bits, k)

    # One scan counts both: keys above the threshold in the low half, keys equal to it in the high half.
    above = (bits > threshold).to(tl.int32)
    equal = ((bits == threshold) & inside).to(tl.int32)
    counts = tl.cumsum(above + (equal << 16), axis=0)
    free = k - tl.sum(above, axis=0)  # places for those that are equal, the smaller indices first
    visible = (above != 0) | ((equal != 0) & ((counts >> 16) <= free))
    rank = (counts & 0xFFFF) + tl.minimum(counts >> 16, free)  # visible tokens up to and with n
    tl.store(visible_ptr + row * k + rank - 1, n.to(tl.int64), mask=visible)
    tl.store(
        masked_ptr + row * (tokens - k) + n - rank, n.to(tl.int64), mask=inside & (visible == 0)
    )


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
    # 8 tokens a thread up to 4,096 tokens, 16 with 8,192. Only with 32, for 16,384, a few registers spill.
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
    ctx.dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)  # zeros for the ids
    ctx.save_for_backward(output[2])


def _backward(ctx: Any, _visible: Any, _masked: Any, grad: Tensor) -> tuple:
    (log_probs,) = ctx.saved_tensors
    return (
        torch.ops.aten._log_softmax_backward_data(grad, log_probs, 1, grad.dtype).to(ctx.dtype),
        None,
        None,
        None,
    )


gumbel_topk_op.register_autograd(_backward, setup_context=_setup)
