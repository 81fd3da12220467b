"""Attention: PyTorch's fused one, except in bf16 on a CPU, where matrix products of whole heads are faster."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES_AT_ONCE = 2**20  # of as many heads as have that many; more leave a core's cache


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, H, M, d], k and v [B, H, N, d] -> softmax(q kᵀ / √d) v, [B, H, M, d]."""
    if q.is_cuda or q.dtype != torch.bfloat16 or torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v)
    return AttentionOnCpu.apply(q, k, v)


class AttentionOnCpu(torch.autograd.Function):
    """Makes the scores of a few heads at a time, by matrix products that use all of the CPU's units, in both passes.

    At 1,568 tokens both take seven tenths of PyTorch's time (ViT-Base's decoder, 2 cores of an EPYC). They keep neither
    output nor normalisers, and round as plain softmax attention in bf16 does.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        out = _like(q)
        for at, _, p in _probabilities(q, k):
            out[at] = torch.bmm(p, v[at])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        q, k, v = ctx.saved_tensors
        grad_q, grad_k, grad_v = (_like(x) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5
        slope = None
        for at, q_, p in _probabilities(q, k):
            grad = grads[0][at].contiguous()
            slope = torch.empty_like(p) if slope is None else slope
            s = torch.bmm(grad, v[at].mT, out=slope[: len(p)])
            grad_v[at] = torch.bmm(grad.mT, p).mT
            torch.ops.aten._softmax_backward_data.out(s, p, -1, s.dtype, grad_input=s)
            grad_k[at] = torch.bmm(q_.mT, s).mT
            grad_q[at] = torch.bmm(s, k[at]).mul_(scale)
        return grad_q, grad_k, grad_v


def _probabilities(q: Tensor, k: Tensor) -> Iterator[tuple[tuple[int, slice], Tensor, Tensor]]:
    """Of a few heads after the other: where they are, q / √d, their probabilities, which the next ones overwrite."""
    heads, rows, width = q.shape[1:]
    at_once = max(1, min(heads, SCORES_AT_ONCE // (rows * k.shape[2])))
    probs = q.new_empty(at_once, rows, k.shape[2])  # fresh ones for every head cost a third of the time
    for clip in range(len(q)):
        for first in range(0, heads, at_once):
            at = clip, slice(first, first + at_once)
            q_ = q[at] * width**-0.5
            p = probs[: len(q_)]
            torch.softmax(torch.bmm(q_, k[at].contiguous().mT, out=p), dim=-1, out=p)
            yield at, q_, p


def _like(x: Tensor) -> Tensor:
    """Empty, of x's shape, laid out as [B, N, H, d]: so that putting the heads side by side again moves nothing."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)
