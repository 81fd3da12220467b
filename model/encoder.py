"""The vision transformer that pre-training is for, alone or as a part of AdaMAE."""

from dataclasses import replace
from typing import Literal, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.kernels.gumbel_topk import as_scalar
from adamae.kernels.noise import gumbel
from adamae.model.blocks import Block, LayerNorm
from adamae.model.channels import Clip, prepare_clip
from adamae.model.config import ModelConfig
from adamae.model.masking import AdaptiveMasking, MaskingStrategy, make_masking
from adamae.model.tokenizer import Tokenizer, position_table

Selection = Literal["adaptive", "motion", "random"]


class Features(NamedTuple):
    """What an encoder makes of clips."""

    # The mean over tokens.
    pooled: Float[Tensor, "B D"]
    # All N, unless some were selected.
    tokens: Float[Tensor, "B K D"]


class Encoder(nn.Module):
    """A vision transformer on the visible tokens; it has no class token."""

    positions: Tensor

    def __init__(self, config: ModelConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        size = config.dimensions
        table = position_table(config.positions, config.grid, size.encoder_width)
        self.register_buffer("positions", table, persistent=False)
        self.blocks = nn.ModuleList()
        for i in range(size.encoder_depth):
            # Deeper blocks are dropped more often: from 0 to `drop_path`.
            rate = drop_path * i / max(1, size.encoder_depth - 1)
            self.blocks.append(Block(size.encoder_width, size.encoder_heads, drop_path=rate))
        self.norm: nn.Module = LayerNorm(size.encoder_width, eps=1e-6)

    def forward(self, x: Float[Tensor, "B K D"]) -> Float[Tensor, "B K D"]:
        """Encode tokens to which `positions` are added; their dtype is the residual stream's."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class VideoEncoder(nn.Module):
    """Tokenizer and encoder of a pre-trained or fine-tuned model, for features."""

    def __init__(
        self, config: ModelConfig, has_norm: bool = True, has_sampler: bool = False
    ) -> None:
        """Make an encoder, without weights.

        has_norm: whether it ends in a LayerNorm, as pre-trained encoders do and fine-tuned ones do
            not.
        """
        super().__init__()
        self.config = config
        self.tokenizer = Tokenizer(config)
        self.encoder = Encoder(config)
        if not has_norm:
            self.encoder.norm = nn.Identity()
        self.token_sampler = AdaptiveMasking(config) if has_sampler else None

    def forward(self, clip: Clip) -> Features:
        """Encode whole clips, nothing masked; gradients reach all weights."""
        return encode(self, clip)

    @torch.no_grad()
    def encode(self, clip: Clip, keep: float = 1.0, by: Selection = "adaptive") -> Features:
        """Encode clips without gradients: whole, or the tokens that `select_tokens` chooses."""
        ids = None if keep == 1 else self.select_tokens(clip, keep, by)
        return encode(self, clip, ids)

    @torch.no_grad()
    def select_tokens(self, clip: Clip, keep: float, by: Selection) -> Int[Tensor, "B K"]:
        """Sample the fraction `keep` of the tokens as in pre-training; return their ids, ascending.

        by: whether by the pre-trained sampler's probabilities, by temporal difference, or
        uniformly. All clips get the same noise, so that the choice for one does not depend on its
        batch. Raise InputError if there is no sampler.
        """
        config = self.config
        num_kept = round(keep * config.num_tokens)
        if not 0 < num_kept <= config.num_tokens:
            raise InputError(
                f"keep is {keep}, {num_kept} of {config.num_tokens} tokens: must be above 0 and at"
                " most 1"
            )
        clip = prepare_clip(clip, config)
        masking: MaskingStrategy | None
        if by == "adaptive":
            masking = self.token_sampler
        else:
            masking = make_masking(replace(config, masking=by))
        if masking is None:
            raise InputError(
                "these weights have no token sampler to select tokens by: take those of a"
                " pre-training with model.masking=adaptive, or choose random or motion"
            )
        tokens = self.tokenizer(clip) if masking.needs_tokens else None
        logits = masking.logits(clip, tokens)
        zero = as_scalar("seed", 0, logits)
        # A row of noise for all clips.
        noise = gumbel(zero, zero, 1, config.num_tokens)
        ids = (logits + noise).topk(num_kept).indices
        return ids.sort().values


class EncoderModel(Protocol):
    """What `encode` asks for: AdaMAE, VideoEncoder and the classifiers have it."""

    config: ModelConfig
    tokenizer: Tokenizer
    encoder: Encoder


def encode(model: EncoderModel, clip: Clip, ids: Int[Tensor, "B K"] | None = None) -> Features:
    """Encode the whole clip, nothing masked, or only the tokens at `ids`."""
    clip = prepare_clip(clip, model.config)
    positions = model.encoder.positions
    if ids is not None:
        positions = positions[ids]
    tokens = model.encoder(model.tokenizer(clip, ids) + positions)
    return Features(tokens.mean(dim=1), tokens)
