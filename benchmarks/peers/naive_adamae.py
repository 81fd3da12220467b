"""The published AdaMAE's step, written afresh as the baseline to be faster than: it computes in the way of that code.

Attention matrices are materialized, tokens go the way of token_path.py, and gradients of the sampling loss reach the
tokenizer. Parameters are named as in model.AdaMAE, of which `load` takes them.
"""

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from timm.layers import Mlp
from torch import Tensor, nn

from benchmarks.peers import token_path
from model.adamae import AdaMAE
from model.config import SAMPLER_HEADS, ModelConfig


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, qv_bias: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (width // num_heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width)) if qv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(width)) if qv_bias else None
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        bias = None
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        qkv = nn.functional.linear(x, self.qkv.weight, bias)
        q, k, v = rearrange(qkv, "b n (three h d) -> three b h n d", three=3, h=self.num_heads)
        attention = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj_drop(self.proj(rearrange(attention @ v, "b h n d -> b n (h d)")))


class Block(nn.Module):
    def __init__(
        self, width: int, num_heads: int, qv_bias: bool = True, dropout: float = 0.0, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, num_heads, qv_bias, dropout)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, 4 * width, drop=(0.0, dropout))

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokenSampler(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.dimensions.encoder_width
        self.num_visible = config.num_visible
        self.positions = nn.Parameter(torch.zeros(config.num_tokens, width))
        self.body = nn.Sequential(Block(width, SAMPLER_HEADS, qv_bias=False, dropout=0.1, eps=1e-5))
        self.logit = nn.Linear(width, 1)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> tuple[Bool[Tensor, "B N"], Float[Tensor, "B N"]]:
        """Return a mask that is True where a token is hidden, and the probabilities."""
        return token_path.sample_mask(self.logit(self.body(tokens + self.positions)).squeeze(-1), self.num_visible)


class Transformer(nn.Module):
    """Blocks and a norm, with the positions they work on; encoder and decoder."""

    positions: Tensor

    def __init__(self, width: int, depth: int, num_heads: int, positions: Float[Tensor, "N D"]) -> None:
        super().__init__()
        self.register_buffer("positions", positions, persistent=False)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        for block in self.blocks:
            x = block(x)
        return x


class Decoder(Transformer):
    def __init__(self, config: ModelConfig, positions: Float[Tensor, "N E"]) -> None:
        size = config.dimensions
        super().__init__(size.decoder_width, size.decoder_depth, size.decoder_heads, positions)
        self.embed = nn.Linear(size.encoder_width, size.decoder_width, bias=False)
        self.mask_token = nn.Parameter(torch.zeros(size.decoder_width))
        self.head = nn.Linear(size.decoder_width, config.patch_values)


class NaiveAdaMAE(nn.Module):
    """Adaptive masking with the paper's sampler (one attention block)."""

    def __init__(self, config: ModelConfig, positions: Tensor, decoder_positions: Tensor) -> None:
        super().__init__()
        size = config.dimensions
        self.config = config
        kernel = (config.tubelet_size, config.patch_size, config.patch_size)
        self.tokenizer = nn.Conv3d(3, size.encoder_width, kernel, stride=kernel)
        self.token_sampler = TokenSampler(config)
        self.encoder = Transformer(size.encoder_width, size.encoder_depth, size.encoder_heads, positions)
        self.decoder = Decoder(config, decoder_positions)

    @classmethod
    def load(cls, model: AdaMAE) -> "NaiveAdaMAE":
        """Copy the weights of `model`, on its device."""
        naive = cls(model.config, model.encoder.positions, model.decoder.positions)
        state = model.state_dict()
        t, p = model.config.tubelet_size, model.config.patch_size
        weight = state.pop("tokenizer.projection.weight")
        state["tokenizer.weight"] = rearrange(weight, "d (t h w c) -> d c t h w", t=t, h=p, w=p)
        state["tokenizer.bias"] = state.pop("tokenizer.projection.bias")
        naive.load_state_dict(state)
        return naive.to(weight.device)

    def forward(self, pixels: Float[Tensor, "B C T H W"], mask: Bool[Tensor, "B N"] | None = None) -> Tensor:
        """Return the loss. pixels: ImageNet-normalized; mask: mask these tokens instead of sampled ones."""
        config, decoder = self.config, self.decoder
        tokens = self.tokenizer(pixels).flatten(2).transpose(1, 2)
        sampled, probabilities = self.token_sampler(tokens)
        mask = sampled if mask is None else mask
        visible = self.encoder(token_path.gather(tokens, mask, self.encoder.positions))
        features = decoder.embed(self.encoder.norm(visible))
        x = decoder(token_path.scatter(features, decoder.mask_token, decoder.positions, mask))
        pred = decoder.head(decoder.norm(x[:, visible.shape[1] :]))
        loss_per_token = token_path.patch_loss(pred, pixels, mask, config.tubelet_size, config.patch_size)
        sampling_loss = token_path.sampling_loss(probabilities, mask, loss_per_token)
        return loss_per_token.mean() + config.sampling_loss_weight * sampling_loss
