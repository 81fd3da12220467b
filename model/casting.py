"""Gives a group of weights in another dtype, without a kernel launch, and casts their gradients by one.

Autocast casts every weight by itself, and its gradient back: of the 1,100 launches that a step of ViT-Base took, 390.
While a model is trained, its weights have copies instead, which are refreshed together after each update.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = Sequence[Tensor | None]


def autocast_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which `x` and `weight` are multiplied: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def keep_copies(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Keep copies of what modules name by `weights()`, which `cast_together` then returns.

    The function returned refreshes those of trained weights, by one launch, and is to be called after every update.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "weights")]
    weights = [weight for module in modules for weight in module.weights() if weight is not None]
    for weight in weights:
        weight.cast_copy = weight.detach().to(dtype)
        torch._dynamo.mark_static_address(weight.cast_copy)  # CUDA graphs would copy it otherwise
    trained = [weight for weight in weights if weight.requires_grad]

    @torch.no_grad()
    def refresh() -> None:
        torch._foreach_copy_([weight.cast_copy for weight in trained], trained)

    return refresh


def cast_together(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return the weights in another dtype, None where there is none; themselves where it is theirs."""
    given = [weight for weight in weights if weight is not None]
    if all(weight.dtype == dtype for weight in given):
        return weights
    copies = [getattr(weight, "cast_copy", None) for weight in given]
    if None not in copies:
        cast = iter(Cast.apply(*copies, *given))
    elif torch.compiler.is_compiling():  # which fuses them as it likes
        cast = iter([weight.to(dtype) for weight in given])
    else:
        cast = iter(Cast.apply(*_copy_together(given, dtype), *given))
    return [None if weight is None else next(cast) for weight in weights]


class Cast(torch.autograd.Function):
    """Passes gradients of copies on to the weights."""

    @staticmethod
    def forward(ctx: Any, *copies_and_weights: Tensor) -> tuple[Tensor, ...]:
        copies = copies_and_weights[: len(copies_and_weights) // 2]
        ctx.dtype = copies_and_weights[-1].dtype
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *[None] * len(grads), *_copy_together(grads, ctx.dtype)


@torch.no_grad()
def _copy_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies


class Linear(nn.Linear):
    def weights(self) -> Weights:
        return [self.weight, self.bias]

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = cast_together(self.weights(), autocast_dtype(input, self.weight))
        assert weight is not None
        return F.linear(input, weight, bias)
