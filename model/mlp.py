"""The MLP of a transformer block, which keeps less for its backward pass than timm's."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import Mlp as TimmMlp
from torch import Tensor

from model.dropout import Dropout, draw_kept, drop


class Mlp(TimmMlp):
    """timm's: linear, GELU, dropout, linear, dropout. Its parameters have the same names."""

    def __init__(self, width: int, hidden_width: int, dropout: float) -> None:
        super().__init__(width, hidden_width)
        self.drop1, self.drop2 = Dropout(dropout), Dropout(dropout)

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        dropout = self.drop1.p if self.training else 0.0
        return self.drop2(GeluLinear.apply(self.fc1(x), self.fc2.weight, self.fc2.bias, dropout))


class GeluLinear(torch.autograd.Function):
    """linear(dropout(gelu(x))), which makes GELU and dropout of x once more in its backward pass.

    Autograd would keep their result too: at four times the width, the largest tensor of a block. The weight is kept
    as it is, not as the copy that autocast makes of it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dropout: float) -> Tensor:
        kept = draw_kept(x, dropout) if dropout else None
        ctx.save_for_backward(x, weight, kept)
        ctx.dropout = dropout
        return F.linear(_dropped(F.gelu(x), kept, dropout), weight.to(x.dtype), bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        x, weight, kept = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            columns = grad.T if grad.is_cuda else grad.T.contiguous()  # a CPU's product is up to twice as fast then
            grad_weight = (columns @ _dropped(F.gelu(x), kept, ctx.dropout).flatten(0, -2)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(dim=0, dtype=weight.dtype)
        if ctx.needs_input_grad[0]:
            grad_hidden = _dropped((grad @ weight.to(grad.dtype)).view_as(x), kept, ctx.dropout)
            grad_x = torch.ops.aten.gelu_backward(grad_hidden, x)
        return grad_x, grad_weight, grad_bias, None


def _dropped(x: Tensor, kept: Tensor | None, dropout: float) -> Tensor:
    return x if kept is None else drop(x, kept, dropout)
