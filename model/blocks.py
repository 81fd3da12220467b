"""The transformer block of encoder, decoder and token sampler, with VideoMAE's attention."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from adamae.kernels.keep_mask import keep_mask
from adamae.model.casting import Weights, autocast_dtype, cast_groups, cast_together


class LayerNorm(nn.LayerNorm):
    """A LayerNorm that normalizes bf16 as it is; the op's own statistics are fp32.

    Autocast would copy the input to fp32, and keep the copy for the backward pass.
    """

    def weights(self) -> Weights:
        """Return the weights that `forward` takes in another dtype."""
        return [self.weight, self.bias]

    def forward(self, x: Tensor, weights: Weights | None = None) -> Tensor:
        # On a CPU the input is copied all the same: PyTorch sums the gradients of weight and bias
        # there in bf16, and at 25,000 rows they are off by 11 and 21 %, instead of 0.2 %.
        dtype = x.dtype if x.is_cuda else torch.float32
        if weights is None:
            weights = cast_together(self.weights(), dtype)
        weight, bias = weights
        with torch.autocast(x.device.type, enabled=False):
            y = F.layer_norm(x.to(dtype), self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype)


# A tensor is 0-d, int64, on the clip's device.
Seed = int | Tensor


class Noise(NamedTuple):
    """What masks and dropout are functions of, beside the token and the layer."""

    seed: Seed
    # The global position of the batch's first clip.
    offset: Seed


class Dropout(nn.Module):
    """Dropout by which a clip loses the same values in any batch and rank.

    It keeps a byte a value for the backward pass.
    """

    def __init__(self, p: float, layer: int) -> None:
        """layer: a number from 1 on, which no other dropout of the model has."""
        super().__init__()
        self.p = p
        self.layer = layer

    def forward(self, x: Float[Tensor, "B N D"], noise: Noise | None) -> Float[Tensor, "B N D"]:
        """Drop values in training, which takes noise."""
        if not self.training or self.p == 0:
            return x
        assert noise is not None
        kept = keep_mask(x, self.p, noise.seed, noise.offset, self.layer)
        return DropValues.apply(x, kept, 1 / (1 - self.p))


class DropValues(torch.autograd.Function):
    """x · kept · scale, by one launch each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        # This op is what dropout does forward, too. Were it not in a function of its own, autograd
        # would keep x.
        return torch.ops.aten.native_dropout_backward(x, kept, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (kept,) = ctx.saved_tensors
        (grad_output,) = grads
        grad = torch.ops.aten.native_dropout_backward(grad_output, kept, ctx.scale)
        return grad, None, None


class DropPath(nn.Module):
    """Stochastic depth: in training, drops a whole clip's residual branch with probability p."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(x.new_ones(len(x), 1, 1), self.p)


class Attention(nn.Module):
    """Self-attention with a bias on queries and values but not on keys.

    A bias on keys would add the same number to all scores of a query, which softmax cancels, and so
    change nothing but Adam's state. Zeros take its place, for one product to make all three.
    """

    k_bias: Tensor

    def __init__(self, width: int, num_heads: int, qv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width)) if qv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(width)) if qv_bias else None
        k_bias = torch.zeros(width) if qv_bias else None
        self.register_buffer("k_bias", k_bias, persistent=False)
        self.proj = nn.Linear(width, width)

    def weights(self) -> Weights:
        """Return the weights that `forward` takes in another dtype."""
        biases = [bias for bias in (self.q_bias, self.k_bias, self.v_bias) if bias is not None]
        return [self.qkv.weight, self.proj.weight, self.proj.bias, *biases]

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        weights: Weights,
        context: Float[Tensor, "B K D"] | None = None,
        num_kv_only: int = 0,
    ) -> Float[Tensor, "B N-num_kv_only D"]:
        """Attend to x itself, or to `context`, whose tokens then give keys and values.

        weights: those of `self.weights()`, in the dtype of the products. The first `num_kv_only`
        tokens of x give keys and values, but get no output.
        """
        weight, proj_weight, proj_bias, *biases = weights
        bias = torch.cat(biases) if biases else None
        if context is None:
            q, k, v = F.linear(x, weight, bias).chunk(3, dim=-1)
            # Cut after the product: rows of what a product reads would be cut by a copy.
            q = q[:, num_kv_only:]
        else:
            width = x.shape[-1]
            q_bias = None if bias is None else bias[:width]
            kv_bias = None if bias is None else bias[width:]
            q = F.linear(x, weight[:width], q_bias)
            k, v = F.linear(context, weight[width:], kv_bias).chunk(2, dim=-1)
        q = self.split_heads(q)
        k = self.split_heads(k)
        v = self.split_heads(v)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.linear(x, proj_weight, proj_bias)

    def split_heads(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B h N D/h"]:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Mlp(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden_width)
        self.fc2 = nn.Linear(hidden_width, width)

    def weights(self) -> Weights:
        """Return the weights that `forward` takes in another dtype."""
        return [self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias]

    def forward(self, x: Float[Tensor, "B N D"], weights: Weights) -> Float[Tensor, "B N D"]:
        weight1, bias1, weight2, bias2 = weights
        hidden = F.linear(x, weight1, bias1)
        if torch.compiler.is_compiling():
            # The compiler recomputes GELU by itself where that is cheaper than to keep it.
            return F.linear(F.gelu(hidden), weight2, bias2)
        return GeluLinear.apply(hidden, weight2, bias2)


class GeluLinear(torch.autograd.Function):
    """linear(gelu(x)), which recomputes gelu(x) in its backward pass.

    Autograd would keep it too: at four times the width, the largest tensor of a block.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        (grad_output,) = grads
        grad = grad_output.flatten(0, -2)
        grad_weight = grad.T @ F.gelu(x).flatten(0, -2)
        grad_bias = grad.sum(dim=0)
        grad_gelu = (grad @ weight).view_as(x)
        return torch.ops.aten.gelu_backward(grad_gelu, x), grad_weight, grad_bias


class Block(nn.Module):
    """Pre-norm transformer block, MLP ratio 4."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        qv_bias: bool = True,
        dropout: float = 0.0,
        first_layer: int = 1,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        """first_layer: the number of the first of its two layers with dropout."""
        super().__init__()
        self.norm1 = LayerNorm(width, eps=norm_eps)
        self.attn = Attention(width, num_heads, qv_bias)
        self.attn_drop = Dropout(dropout, first_layer)
        self.norm2 = LayerNorm(width, eps=norm_eps)
        self.mlp = Mlp(width, 4 * width)
        self.mlp_drop = Dropout(dropout, first_layer + 1)
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        context: Float[Tensor, "B K D"] | None = None,
        num_kv_only: int = 0,
        noise: Noise | None = None,
    ) -> Float[Tensor, "B N-num_kv_only D"]:
        """Attend to x itself, or only to `context`. A block with dropout takes noise in training.

        The first `num_kv_only` tokens give keys and values, but get no output, for a last block
        whose output is not read whole.
        """
        dtype = autocast_dtype(x, self.mlp.fc1.weight)
        groups = [self.attn.weights(), self.mlp.weights()]
        # A LayerNorm that computes in this dtype has its weights cast by the same launch.
        if x.is_cuda and x.dtype == dtype:
            groups += [self.norm1.weights(), self.norm2.weights()]
        attn, mlp, *norms = cast_groups(groups, dtype)
        norm1, norm2 = norms if norms else (None, None)
        y = self.norm1(x, norm1)
        if context is not None:
            context = self.norm1(context, norm1)
        y = self.attn_drop(self.attn(y, attn, context, num_kv_only), noise)
        x = x[:, num_kv_only:] + self.drop_path(y)
        y = self.mlp_drop(self.mlp(self.norm2(x, norm2), mlp), noise)
        return x + self.drop_path(y)


def initialize(module: nn.Module) -> None:
    """Set Linear weights Xavier-uniform, biases 0, LayerNorm (1, 0). For `nn.Module.apply`.

    This includes the tokenizer, which is a Linear here. The authors' code leaves its convolution as
    PyTorch makes it, half as large, with which `make demo` ended at a loss of 0.72 instead of 0.67.
    """
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
