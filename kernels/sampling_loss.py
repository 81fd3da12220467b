"""The loss that teaches the token sampler to mask what is hard to reconstruct (arXiv 2211.09120 §3.3)."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import check, check_ids, check_shape, rows_contiguous, runs_triton, triton_op, wrap_triton


def sampling_loss(log_probs: Tensor, masked_ids: Tensor, loss_per_token: Tensor) -> Tensor:
    """log_probs fp32 [B, N], masked_ids int64 [B, M], loss_per_token fp32 [B, M] -> fp32 scalar.

    - mean over clips and masked tokens of log P_i · loss_i; loss_per_token is a constant, it gets no gradient.
    """
    check_shape("log_probs", log_probs, "B", "N")
    check_ids("masked_ids", masked_ids, log_probs)
    check(masked_ids.numel() > 0, "masked_ids are empty: there is no loss without a masked token")
    check_shape("loss_per_token", loss_per_token, *masked_ids.shape)
    if runs_triton(log_probs):
        return sampling_loss_op(log_probs, masked_ids, loss_per_token.detach())[0]
    return sampling_loss_ref(log_probs, masked_ids, loss_per_token)


def sampling_loss_ref(log_probs: Tensor, masked_ids: Tensor, loss_per_token: Tensor) -> Tensor:
    return -(log_probs.gather(1, masked_ids) * loss_per_token.detach()).mean()


@triton.jit
def sampling_loss_kernel(
    log_probs_ptr, ids_ptr, loss_ptr, partial_ptr, grad_ptr, stride, N, M, weight, BLOCK: tl.constexpr
):
    """One program per clip: its part of the loss, and the gradient of its log-probabilities."""
    b = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + b * M + m, mask=m < M, other=0)
    grad = tl.load(loss_ptr + b * M + m, mask=m < M, other=0).to(tl.float32) * weight
    log_probs = tl.load(log_probs_ptr + b * stride + ids, mask=m < M, other=0).to(tl.float32)
    tl.store(partial_ptr + b, tl.sum(log_probs * grad, axis=0))
    tl.store(grad_ptr + b * N + ids, grad, mask=m < M)


@triton_op("sampling_loss")
def sampling_loss_op(log_probs: Tensor, masked_ids: Tensor, loss_per_token: Tensor) -> tuple[Tensor, Tensor]:
    """-> the loss, a scalar, and its gradient for log_probs, fp32 [B, N]; the ids of a row are all different."""
    (batch, tokens), count = log_probs.shape, masked_ids.shape[1]
    log_probs = rows_contiguous(log_probs)
    partial = log_probs.new_empty(batch, dtype=torch.float32)
    grad = log_probs.new_zeros(batch, tokens, dtype=torch.float32)
    block = triton.next_power_of_2(count)
    wrap_triton(sampling_loss_kernel)[(batch,)](
        log_probs, masked_ids.contiguous(), loss_per_token.contiguous(), partial, grad,
        log_probs.stride(0), tokens, count, -1.0 / (batch * count),
        BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return partial.sum(), grad


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)  # zeros for the gradient
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _grad: Any) -> tuple:
    return (grad * ctx.saved_tensors[0]).to(ctx.dtype), None, None


sampling_loss_op.register_autograd(_backward, setup_context=_setup)
