"""The MLP of a transformer block, which keeps less for its backward pass than timm's."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import Mlp as TimmMlp
from torch import Tensor

from model.dropout import Dropout


class Mlp(TimmMlp):
    """timm's: linear, GELU, linear, dropout. Its parameters have the same names.

    As in the published code there is no dropout between the two, where timm has another one.
    """

    def __init__(self, width: int, hidden_width: int, dropout: float) -> None:
        super().__init__(width, hidden_width)
        self.drop2 = Dropout(dropout)

    def weights(self) -> list[Tensor | None]:
        """What `forward` may be given in another dtype."""
        return [self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias]

    def forward(
        self, x: Float[Tensor, "B N D"], weights: Sequence[Tensor | None] | None = None
    ) -> Float[Tensor, "B N D"]:
        weight1, bias1, weight2, bias2 = weights or self.weights()
        assert weight1 is not None
        assert weight2 is not None
        hidden = F.linear(x, weight1, bias1)
        if torch.compiler.is_compiling():  # which makes GELU once more where that is cheaper than keeping it
            return self.drop2(F.linear(F.gelu(hidden), weight2, bias2))
        return self.drop2(GeluLinear.apply(hidden, weight2, bias2, self.fc2.weight, self.fc2.bias))


class GeluLinear(torch.autograd.Function):
    """linear(gelu(x)), which makes GELU of x once more in its backward pass.

    Autograd would keep their result too: at four times the width, the largest tensor of a block. `weight` and `bias`
    may be copies in x's dtype of the other two: those are kept for the backward pass, not the copies, and the bias's
    gradient is summed in their dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, own_weight: Tensor, own_bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, own_weight)
        return F.linear(F.gelu(x), weight.to(x.dtype), bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            columns = grad.T if grad.is_cuda else grad.T.contiguous()  # a CPU's product is up to twice as fast then
            grad_weight = columns @ F.gelu(x).flatten(0, -2)
        if ctx.needs_input_grad[4]:
            grad_bias = grad.sum(dim=0, dtype=weight.dtype)
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.gelu_backward((grad @ weight.to(grad.dtype)).view_as(x), x)
        return grad_x, grad_weight, None, None, grad_bias
