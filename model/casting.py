"""Casts all weights of a block by one kernel launch, and their gradients by another.

Autocast casts every weight by itself, and its gradient back: of the 1,100 launches that a step of ViT-Base took, 390.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which `x` and `weight` are multiplied: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def cast_together(weights: Sequence[Tensor | None], dtype: torch.dtype) -> Sequence[Tensor | None]:
    """Copy the weights to another dtype, None where there is none; return them themselves where it is theirs."""
    if all(weight is None or weight.dtype == dtype for weight in weights):
        return weights
    if torch.compiler.is_compiling():  # which fuses them as it likes
        return [None if weight is None else weight.to(dtype) for weight in weights]
    return Cast.apply(dtype, *weights)


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = next(weight.dtype for weight in weights if weight is not None)
        return _copy_together(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_copy_together(grads, ctx.dtype)


def _copy_together(tensors: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    given = [tensor for tensor in tensors if tensor is not None]
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in given]
    if given:
        torch._foreach_copy_(copies, given)
    rest = iter(copies)
    return tuple(None if tensor is None else next(rest) for tensor in tensors)
