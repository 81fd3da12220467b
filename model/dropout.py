"""Dropout that keeps a byte a value for its backward pass, wherever it runs."""

from typing import Any

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.p):
            return input
        if torch.compiler.is_compiling():
            return drop(input, draw_kept(input, self.p), self.p)
        return Drop.apply(input, self.p)


class Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        kept = draw_kept(x, p)
        ctx.save_for_backward(kept)
        ctx.p = p
        return drop(x, kept, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return drop(grads[0], ctx.saved_tensors[0], ctx.p), None


def draw_kept(x: Tensor, p: float) -> Tensor:
    """bool, of x's shape: True with probability 1 - p (on a CPU to the nearest 65536th), by torch's generator."""
    if x.is_cuda or torch.compiler.is_compiling():
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    # Sixteen bits a value: on a CPU, bernoulli_ takes five times as long, as much as the block's matrix products.
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
    return (bits.view(torch.int16)[: x.numel()] >= round(p * 2**16) - 2**15).view(x.shape)


def drop(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """What is kept, divided by 1 - p. Linear in x: also the gradient, of the gradient."""
    if x.is_cuda or torch.compiler.is_compiling():
        return torch.ops.aten.native_dropout_backward(x, kept, 1 / (1 - p))
    return kept.view(torch.uint8).to(x.dtype).mul_(1 / (1 - p)).mul_(x)  # four times as fast as a product with bools
