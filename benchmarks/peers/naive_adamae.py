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

from adamae.benchmarks.peers import token_path
from adamae.model.adamae import AdaMAE
from adamae.model.config import SAMPLER_HEADS


def make_block(
    width: int, num_heads: int, qv_bias: bool = True, dropout: float = 0.0, eps: float = 1e-6
) -> Block:
    """Make BEiT's block, which the published code has copied, with attention matrices that are materialized."""
    norm: Any = partial(nn.LayerNorm, eps=eps)
    block: Any = Block(width, num_heads, qkv_bias=qv_bias, proj_drop=dropout, norm_layer=norm)
    block.mlp.drop1.p = 0.0  # dropout follows the second layer only
    block.attn.fused_attn = False
    return block


def make_transformer(width: int, depth: int, num_heads: int) -> nn.ModuleDict:
    blocks = nn.Sequential(*(make_block(width, num_heads) for _ in range(depth)))
    return nn.ModuleDict({"blocks": blocks, "norm": nn.LayerNorm(width, eps=1e-6)})


class NaiveAdaMAE(nn.Module):
    """Adaptive masking with the paper's sampler (one attention block), with the weights of `model`, on its device."""

    token_sampler: Any
    decoder: Any

    def __init__(self, model: AdaMAE) -> None:
        super().__init__()
        self.config = config = model.config
        size, t, p = config.dimensions, config.tubelet_size, config.patch_size
        width, narrow = size.encoder_width, size.decoder_width
        self.positions = model.encoder.positions, model.decoder.positions
        self.tokenizer = nn.Conv3d(3, width, (t, p, p), stride=(t, p, p))
        sampler = nn.Sequential(
            make_block(width, SAMPLER_HEADS, qv_bias=False, dropout=0.1, eps=1e-5)
        )
        self.token_sampler = nn.ModuleDict({"body": sampler, "logit": nn.Linear(width, 1)})
        self.token_sampler.positions = nn.Parameter(torch.zeros(config.num_tokens, width))
        self.encoder = make_transformer(width, size.encoder_depth, size.encoder_heads)
        self.decoder = make_transformer(narrow, size.decoder_depth, size.decoder_heads)
        self.decoder["embed"] = nn.Linear(width, narrow, bias=False)
        self.decoder["head"] = nn.Linear(narrow, config.patch_values)
        self.decoder.mask_token = nn.Parameter(torch.zeros(narrow))
        state = model.state_dict()
        weight = state.pop("tokenizer.projection.weight")
        state["tokenizer.weight"] = rearrange(weight, "d (t h w c) -> d c t h w", t=t, h=p, w=p)
        state["tokenizer.bias"] = state.pop("tokenizer.projection.bias")
        self.load_state_dict(state)
        self.to(weight.device)

    def prepare(self, clip: Tensor) -> Float[Tensor, "B C T H W"]:
        return token_path.normalized_clip(clip).contiguous()

    def forward(
        self, pixels: Float[Tensor, "B C T H W"], mask: Bool[Tensor, "B N"] | None = None
    ) -> Tensor:
        """Return the loss. mask: mask these tokens, where it is True, instead of sampled ones."""
        config, sampler, encoder, decoder = (
            self.config,
            self.token_sampler,
            self.encoder,
            self.decoder,
        )
        tokens = self.tokenizer(pixels).flatten(2).transpose(1, 2)
        logits = sampler["logit"](sampler["body"](tokens + sampler.positions)).squeeze(-1)
        sampled, probabilities = token_path.sample_mask(logits, config.num_visible)
        mask = sampled if mask is None else mask
        visible = encoder["blocks"](token_path.gather(tokens, mask, self.positions[0]))
        features = decoder["embed"](encoder["norm"](visible))
        x = decoder["blocks"](
            token_path.scatter(features, decoder.mask_token, self.positions[1], mask)
        )
        pred = decoder["head"](decoder["norm"](x[:, visible.shape[1] :]))
        loss_per_token = token_path.patch_loss(
            pred, pixels, mask, config.tubelet_size, config.patch_size
        )
        sampling_loss = token_path.sampling_loss(probabilities, mask, loss_per_token)
        return loss_per_token.mean() + config.sampling_loss_weight * sampling_loss
