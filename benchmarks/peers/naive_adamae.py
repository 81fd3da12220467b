"""The published AdaMAE's step, written afresh as the baseline to be faster than: it computes in the way of that code.

Attention matrices are materialized, tokens go the way of token_path.py, and gradients of the sampling loss reach the
tokenizer. Parameters are named as in model.AdaMAE, of which they are taken.
"""

from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from timm.models.beit import Block
from torch import Tensor, nn

from benchmarks.peers import token_path
from model.adamae import AdaMAE
from model.config import SAMPLER_HEADS, ModelConfig


def make_block(width: int, num_heads: int, qv_bias: bool = True, dropout: float = 0.0, eps: float = 1e-6) -> Block:
    """Make BEiT's block, which the published code has copied, with attention matrices that are materialized."""
    norm: Any = partial(nn.LayerNorm, eps=eps)
    block: Any = Block(width, num_heads, qkv_bias=qv_bias, proj_drop=dropout, norm_layer=norm)
    block.mlp.drop1.p = 0.0  # dropout follows the second layer only
    block.attn.fused_attn = False
    return block


class TokenSampler(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.dimensions.encoder_width
        self.num_visible = config.num_visible
        self.positions = nn.Parameter(torch.zeros(config.num_tokens, width))
        self.body = nn.Sequential(make_block(width, SAMPLER_HEADS, qv_bias=False, dropout=0.1, eps=1e-5))
        self.logit = nn.Linear(width, 1)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> tuple[Bool[Tensor, "B N"], Float[Tensor, "B N"]]:
        """Return a mask that is True where a token is masked, and the probabilities."""
        return token_path.sample_mask(self.logit(self.body(tokens + self.positions)).squeeze(-1), self.num_visible)


class Transformer(nn.Module):
    """Blocks and a norm, with the positions they work on; encoder and decoder."""

    positions: Tensor

    def __init__(self, width: int, depth: int, num_heads: int, positions: Float[Tensor, "N D"]) -> None:
        super().__init__()
        self.register_buffer("positions", positions, persistent=False)
        self.blocks = nn.ModuleList(make_block(width, num_heads) for _ in range(depth))
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
    """Adaptive masking with the paper's sampler (one attention block), with the weights of `model`, on its device."""

    def __init__(self, model: AdaMAE) -> None:
        super().__init__()
        self.config = config = model.config
        size, t, p = config.dimensions, config.tubelet_size, config.patch_size
        self.tokenizer = nn.Conv3d(3, size.encoder_width, (t, p, p), stride=(t, p, p))
        self.token_sampler = TokenSampler(config)
        positions = model.encoder.positions
        self.encoder = Transformer(size.encoder_width, size.encoder_depth, size.encoder_heads, positions)
        self.decoder = Decoder(config, model.decoder.positions)
        state = model.state_dict()
        weight = state.pop("tokenizer.projection.weight")
        state["tokenizer.weight"] = rearrange(weight, "d (t h w c) -> d c t h w", t=t, h=p, w=p)
        state["tokenizer.bias"] = state.pop("tokenizer.projection.bias")
        self.load_state_dict(state)
        self.to(weight.device)

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
