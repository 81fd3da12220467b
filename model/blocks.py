"""The transformer block of encoder, decoder and token sampler, with attention as VideoMAE has it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import DropPath
from torch import Tensor, nn

from kernels import attention
from model.casting import cast, product_dtype
from model.dropout import Dropout
from model.mlp import Mlp


class LayerNorm(nn.LayerNorm):
    """Autocast would copy its input to fp32 and keep the copy for the backward; the op's own statistics are fp32.

    On a CPU it is copied all the same: in bf16, PyTorch sums the gradients of weight and bias there in bf16, and at
    25,000 rows they are off by 11 and 21 %, instead of .2 %.
    """

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype if x.is_cuda else torch.float32
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x.to(dtype), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Self-attention with a bias on queries and values but not on keys, in which the first tokens may ask nothing.

    A bias on keys would add the same to all scores of a query and so change nothing but Adam's state (SPEC §3).
    """

    k_bias: Tensor

    def __init__(self, width: int, num_heads: int, qv_bias: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width)) if qv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(width)) if qv_bias else None
        self.register_buffer("k_bias", torch.zeros(width) if qv_bias else None, persistent=False)
        self.proj = nn.Linear(width, width)
        self.proj_drop = Dropout(dropout)

    def weights(self) -> list[Tensor | None]:
        """What `forward` is to be given, perhaps in another dtype."""
        bias = None
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return [self.qkv.weight, bias, self.proj.weight, self.proj.bias]

    def forward(
        self, x: Float[Tensor, "B N D"], weights: Sequence[Tensor | None], num_silent: int = 0
    ) -> Float[Tensor, "B N-num_silent D"]:
        """The first `num_silent` tokens are looked at, but get no output."""
        width, (weight, bias, proj_weight, proj_bias) = x.shape[-1], weights
        assert weight is not None
        assert proj_weight is not None
        if num_silent:
            q = F.linear(x[:, num_silent:], weight[:width], None if bias is None else bias[:width])
            k, v = F.linear(x, weight[width:], None if bias is None else bias[width:]).chunk(2, dim=-1)
        else:
            q, k, v = F.linear(x, weight, bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        x = attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj_drop(F.linear(x, proj_weight, proj_bias))


class Block(nn.Module):
    """Pre-norm transformer block, MLP ratio 4."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        qv_bias: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, eps=norm_eps)
        self.attn = Attention(width, num_heads, qv_bias, dropout)
        self.norm2 = LayerNorm(width, eps=norm_eps)
        self.mlp = Mlp(width, 4 * width, dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Float[Tensor, "B N D"], num_silent: int = 0) -> Float[Tensor, "B N-num_silent D"]:
        """The first `num_silent` tokens are looked at, but get no output: for a last block that is not read whole."""
        of_attn, of_mlp = self.attn.weights(), self.mlp.weights()
        weights = cast([*of_attn, *of_mlp], product_dtype(x, self.mlp.fc1.weight))
        x = x[:, num_silent:] + self.drop_path(self.attn(self.norm1(x), weights[: len(of_attn)], num_silent))
        return x + self.drop_path(self.mlp(self.norm2(x), weights[len(of_attn) :]))


def initialize(module: nn.Module) -> None:
    """SPEC §3: Linear weights Xavier-uniform, biases 0, LayerNorm (1, 0). For `nn.Module.apply`.

    The tokenizer too, which is a Linear here. The published code leaves its convolution as PyTorch makes it, half as
    large, with which `make demo` ended at a loss of 0.72 instead of 0.67.
    """
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
