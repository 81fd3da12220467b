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


def cast_together(weights: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """Copy the weights to another dtype, None where there is none; return them themselves where it is theirs."""
    given = [weight for weight in weights if weight is not None]
    if all(weight.dtype == dtype for weight in given):
        return list(weights)
    if torch.compiler.is_compiling():  # which fuses them as it likes
        copies = iter([weight.to(dtype) for weight in given])
    else:
        copies = iter(Cast.apply(dtype, *given))
    return [None if weight is None else next(copies) for weight in weights]


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = weights[0].dtype
        return tuple(_copies(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        copies = iter(_copies([grad for grad in grads if grad is not None], ctx.dtype))
        return None, *(None if grad is None else next(copies) for grad in grads)


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies
