"""Casts a group of weights to another dtype, and their gradients back, by one kernel launch each.

Products under autocast read weights in bf16, and the optimizer updates them in fp32. Autocast casts
each weight by itself, and its gradient back: of the 1,100 launches of a step of ViT-Base, these
were 390. While a model is trained, its weights have copies in bf16 instead, which all are refreshed
at once:

    keep_copies(model, bf16)    gives each weight a `cast_copy`, once forward
    cast_together(weights, bf16) returns the copies, without a launch backward
    Cast gets their gradients in bf16, and casts those of a group together,
                                into `weight.bucket` where DDP has one
    optimizer.step()            changes the weights, in fp32
    refresh()                   copies all weights into their copies, by one launch

Without `keep_copies`, in evaluation, `cast_together` makes copies for a single use, by one launch a
group.
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
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def keep_copies(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Keep copies of the weights that modules return by `weights()`, for `cast_together`.

    Returns a function to be called after every update, which refreshes the copies of trained
    weights. Gradients that are there now must be views of DDP's buckets: later ones are cast
    straight into them, while DDP would copy each by a launch of its own.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "weights")]
    weights = [weight for module in modules for weight in module.weights()]
    for weight in weights:
        weight.cast_copy = weight.detach().to(dtype)
        # A CUDA graph would otherwise copy it before every replay.
        torch._dynamo.mark_static_address(weight.cast_copy)
    trained = [weight for weight in weights if weight.requires_grad]
    buckets = [(weight, weight.grad) for weight in trained if weight.grad is not None]

    @torch.no_grad()
    def refresh() -> None:
        torch._foreach_copy_([weight.cast_copy for weight in trained], trained)
        # Each takes a single gradient: that of a further micro-batch must not overwrite it.
        for weight, bucket in buckets:
            weight.bucket = bucket

    refresh()
    return refresh


def cast_together(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return weights in another dtype, or themselves if all are in it; they get the gradients."""
    if all(weight.dtype == dtype for weight in weights):
        return weights
    copies = [getattr(weight, "cast_copy", None) for weight in weights]
    # `None in copies` would compare tensors, which takes 5 ms a step.
    if any(copy is None for copy in copies):
        if torch.compiler.is_compiling():
            # The compiler fuses casts with what comes before or after.
            return [weight.to(dtype) for weight in weights]
        copies = _copy_together(weights, dtype, copies)
    return Cast.apply(*copies, *weights)


def cast_groups(groups: Sequence[Weights], dtype: torch.dtype) -> list[Weights]:
    """Cast weights of several layers as `cast_together` does, and return them layer by layer."""
    weights = [weight for group in groups for weight in group]
    cast = cast_together(weights, dtype)
    cast_groups = []
    start = 0
    for group in groups:
        end = start + len(group)
        cast_groups.append(cast[start:end])
        start = end
    return cast_groups


class Cast(torch.autograd.Function):
    """Returns copies of weights, and passes the copies' gradients on to the weights.

    Called with all copies, and then all weights in the same order.
    """

    @staticmethod
    def forward(ctx: Any, *copies_and_weights: Tensor) -> tuple[Tensor, ...]:
        half = len(copies_and_weights) // 2
        copies = copies_and_weights[:half]
        weights = copies_and_weights[half:]
        ctx.dtype = weights[0].dtype
        # A compiled graph cannot look for buckets when it runs.
        ctx.weights = () if torch.compiler.is_compiling() else weights
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        no_grads = [None] * len(grads)
        if ctx.weights:
            buckets = [vars(weight).pop("bucket", None) for weight in ctx.weights]
        else:
            buckets = no_grads
        return *no_grads, *_copy_together(grads, ctx.dtype, buckets)


@torch.no_grad()
def _copy_together(
    tensors: Weights, dtype: torch.dtype, outputs: Sequence[Tensor | None]
) -> list[Any]:
    """Copy tensors to another dtype by one launch, into new memory where an output is None."""
    copies = []
    for tensor, output in zip(tensors, outputs, strict=True):
        if output is None:
            copies.append(torch.empty_like(tensor, dtype=dtype))
        else:
            copies.append(output.detach())
    torch._foreach_copy_(copies, list(tensors))
    return copies


class Linear(nn.Linear):
    """A linear layer that casts weight and bias together."""

    def weights(self) -> Weights:
        """Return the weights that have copies while the model is trained."""
        return list(self.parameters())

    def forward(self, input: Tensor) -> Tensor:
        dtype = autocast_dtype(input, self.weight)
        return F.linear(input, *cast_together(self.weights(), dtype))
