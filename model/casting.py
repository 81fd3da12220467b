"""Gives a group of weights in another dtype, without a kernel launch, and casts their gradients by one.

Autocast casts every weight by itself, and its gradient back: of the 1,100 launches that a step of ViT-Base took, 390.
While a model is trained, its weights have copies instead, which are refreshed together after each update.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = Sequence[Tensor]


def autocast_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which `x` and `weight` are multiplied: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def keep_copies(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Keep copies of what modules name by `weights()`, which `cast_together` then returns.

    The function returned refreshes those of trained weights, by one launch, and is to be called after every update.
    Gradients that are there now must be views of DDP's buckets: later ones are cast straight into them, while DDP would
    copy each by a launch of its own.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "weights")]
    weights = [weight for module in modules for weight in module.weights()]
    for weight in weights:
        weight.cast_copy = weight.detach().to(dtype)
        torch._dynamo.mark_static_address(weight.cast_copy)  # CUDA graphs would copy it otherwise
    trained = [weight for weight in weights if weight.requires_grad]
    buckets = [(weight, weight.grad) for weight in trained if weight.grad is not None]

    @torch.no_grad()
    def refresh() -> None:
        torch._foreach_copy_([weight.cast_copy for weight in trained], trained)
        for weight, bucket in buckets:
            weight.bucket = bucket  # for one gradient; what comes after it must not overwrite it

    refresh()
    return refresh


def cast_together(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return the weights in another dtype; the same where they are in it."""
    if all(weight.dtype == dtype for weight in weights):
        return weights
    copies = [getattr(weight, "cast_copy", None) for weight in weights]
    if any(copy is None for copy in copies):  # `in` would compare tensors: 5 ms a step
        if torch.compiler.is_compiling():  # which fuses them as it likes
            return [weight.to(dtype) for weight in weights]
        copies = _copy_together(weights, dtype, copies)
    return Cast.apply(*copies, *weights)


class Cast(torch.autograd.Function):
    """Passes gradients of copies on to the weights."""

    @staticmethod
    def forward(ctx: Any, *copies_and_weights: Tensor) -> tuple[Tensor, ...]:
        half = len(copies_and_weights) // 2
        copies, weights = copies_and_weights[:half], copies_and_weights[half:]
        ctx.dtype = weights[0].dtype
        ctx.weights = () if torch.compiler.is_compiling() else weights
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places = [vars(weight).pop("bucket", None) for weight in ctx.weights] or [None] * len(grads)
        return *[None] * len(grads), *_copy_together(grads, ctx.dtype, places)


@torch.no_grad()
def _copy_together(
    tensors: Weights, dtype: torch.dtype, places: Sequence[Tensor | None]
) -> list[Any]:
    copies = [
        torch.empty_like(tensor, dtype=dtype) if place is None else place.detach()
        for tensor, place in zip(tensors, places, strict=True)
    ]
    torch._foreach_copy_(copies, list(tensors))
    return copies


class Linear(nn.Linear):
    def weights(self) -> Weights:
        return list(self.parameters())

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *cast_together(self.weights(), autocast_dtype(input, self.weight)))
