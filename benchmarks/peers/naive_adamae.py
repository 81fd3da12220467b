"""The published AdaMAE's step, written afresh as the baseline to be faster than.

It computes in the way of that code: attention matrices are materialized, tokens go the way of
token_path.py, and gradients of the sampling loss reach the tokenizer. Parameters have the names of
model.AdaMAE's, from which they are loaded.
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
    """Make BEiT's block with materialized attention matrices, as the published code has copied it.

    The arguments are those in which the blocks of the published code differ.
    """
    norm: Any = partial(nn.LayerNorm, eps=eps)
    block: Any = Block(width, num_heads, qkv_bias=qv_bias, proj_drop=dropout, norm_layer=norm)
    # Dropout follows the second layer only.
    block.mlp.drop1.p = 0.0
    # PyTorch's fused attention would not write the matrices to memory. With 64 clips, those of the
    # sampler's 8 heads and 1,568 tokens take 2.5 GB in bf16.
    block.attn.fused_attn = False
    return block


def make_transformer(width: int, depth: int, num_heads: int) -> nn.ModuleDict:
    """Make the blocks of an encoder or a decoder, and the norm behind them."""
    blocks = nn.Sequential(*(make_block(width, num_heads) for _ in range(depth)))
    return nn.ModuleDict({"blocks": blocks, "norm": nn.LayerNorm(width, eps=1e-6)})


class NaiveAdaMAE(nn.Module):
    """Adaptive masking with the paper's sampler, which is one attention block."""

    token_sampler: Any
    decoder: Any

    def __init__(self, model: AdaMAE) -> None:
        """Take the weights of `model`, on its device."""
        super().__init__()
        config = model.config
        size = config.dimensions
        t = config.tubelet_size
        p = config.patch_size
        self.config = config
        self.encoder_positions = model.encoder.positions
        assert model.decoder is not None
        self.decoder_positions = model.decoder.positions
        self.tokenizer = nn.Conv3d(3, size.encoder_width, (t, p, p), stride=(t, p, p))
        self.token_sampler = self._make_sampler(size.encoder_width)
        self.encoder = make_transformer(size.encoder_width, size.encoder_depth, size.encoder_heads)
        self.decoder = self._make_decoder()
        # The tokenizer is a convolution here, and a product with a matrix in model.AdaMAE.
        state = model.state_dict()
        weight = state.pop("tokenizer.projection.weight")
        state["tokenizer.weight"] = rearrange(weight, "d (t h w c) -> d c t h w", t=t, h=p, w=p)
        state["tokenizer.bias"] = state.pop("tokenizer.projection.bias")
        self.load_state_dict(state)
        self.to(weight.device)

    def _make_sampler(self, width: int) -> nn.ModuleDict:
        # Unlike the encoder's blocks, the sampler's has dropout, PyTorch's epsilon, and no biases
        # of q and v.
        block = make_block(width, SAMPLER_HEADS, qv_bias=False, dropout=0.1, eps=1e-5)
        parts: dict[str, nn.Module] = {"body": nn.Sequential(block), "logit": nn.Linear(width, 1)}
        sampler = nn.ModuleDict(parts)
        # Zeros here and below, until the weights of the model are loaded.
        sampler.positions = nn.Parameter(torch.zeros(self.config.num_tokens, width))
        return sampler

    def _make_decoder(self) -> nn.ModuleDict:
        size = self.config.dimensions
        width = size.decoder_width
        decoder = make_transformer(width, size.decoder_depth, size.decoder_heads)
        decoder["embed"] = nn.Linear(size.encoder_width, width, bias=False)
        decoder["head"] = nn.Linear(width, self.config.patch_values)
        decoder.mask_token = nn.Parameter(torch.zeros(width))
        return decoder

    def prepare(self, clip: Tensor) -> Float[Tensor, "B C T H W"]:
        """Return what the published loader makes of a uint8 clip [B, T, H, W, C]."""
        return token_path.normalized_clip(clip).contiguous()

    def forward(
        self, pixels: Float[Tensor, "B C T H W"], mask: Bool[Tensor, "B N"] | None = None
    ) -> Tensor:
        """Return the loss. mask: tokens to mask, where it is True, in place of sampled ones."""
        config = self.config
        tokens = self.tokenizer(pixels).flatten(2).transpose(1, 2)
        sampler = self.token_sampler
        attended = sampler["body"](tokens + sampler.positions)
        logits = sampler["logit"](attended).squeeze(-1)
        sampled, probabilities = token_path.sample_mask(logits, config.num_visible)
        if mask is None:
            mask = sampled
        visible = token_path.gather(tokens, mask, self.encoder_positions)
        features = self.encoder["norm"](self.encoder["blocks"](visible))
        decoder = self.decoder
        embedded = decoder["embed"](features)
        x = token_path.scatter(embedded, decoder.mask_token, self.decoder_positions, mask)
        # All blocks compute all tokens; the visible ones, which come first, are dropped at the end.
        masked = decoder["blocks"](x)[:, visible.shape[1] :]
        pred = decoder["head"](decoder["norm"](masked))
        loss_per_token = token_path.patch_loss(
            pred, pixels, mask, config.tubelet_size, config.patch_size
        )
        sampling_loss = token_path.sampling_loss(probabilities, mask, loss_per_token)
        return loss_per_token.mean() + config.sampling_loss_weight * sampling_loss
