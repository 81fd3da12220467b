"""The vision transformer that pre-training is for, alone or as a part of AdaMAE."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from model.blocks import Block, LayerNorm
from model.channels import adapt_channels
from model.config import ModelConfig
from model.tokenizer import Tokenizer, position_table
from model.weights.loading import load_weights


class Features(NamedTuple):
    pooled: Float[Tensor, "B D"]  # mean over tokens
    tokens: Float[Tensor, "B N D"]


class Encoder(nn.Module):
    """A vision transformer on the visible tokens; it has no class token."""

    positions: Tensor

    def __init__(self, config: ModelConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        size = config.dimensions
        table = position_table(config.positions, config.grid, size.encoder_width)
        self.register_buffer("positions", table, persistent=False)
        self.blocks = nn.ModuleList(
            Block(size.encoder_width, size.encoder_heads, drop_path=drop_path * i / max(1, size.encoder_depth - 1))
            for i in range(size.encoder_depth)  # deeper blocks are dropped more often
        )
        self.norm: nn.Module = LayerNorm(size.encoder_width, eps=1e-6)

    def forward(self, x: Float[Tensor, "B K D"]) -> Float[Tensor, "B K D"]:
        """`x`: tokens to which `positions` are added already; its dtype is that of the residual stream."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class VideoEncoder(nn.Module):
    """Tokenizer and encoder of a pre-trained or fine-tuned model, for features."""

    def __init__(self, config: ModelConfig, has_norm: bool = True) -> None:
        """`has_norm`: pre-trained encoders end in a LayerNorm, fine-tuned ones do not."""
        super().__init__()
        self.config = config
        self.tokenizer = Tokenizer(config)
        self.encoder = Encoder(config)
        if not has_norm:
            self.encoder.norm = nn.Identity()

    def forward(self, clip: UInt8[Tensor, "B T H W C"]) -> Features:
        """Encode whole clips, nothing masked; gradients reach all weights."""
        return encode(self, clip)

    @torch.no_grad()
    def encode(self, clip: UInt8[Tensor, "B T H W C"]) -> Features:
        """Encode whole clips without gradients."""
        return self(clip)

    @classmethod
    def from_pretrained(cls, path: str | Path, **changes: Any) -> "VideoEncoder":
        """Load the encoder of a run, a checkpoint, an export or another project's file, for inference, on the CPU.

        `changes`: num_frames, image_size and in_channels of other clips than it was trained with. Raises InputError
        where weights are missing.
        """
        from model.weights.pretrained import ENCODER_PARTS, load
        from model.weights.warm_start import adapt_weights

        state, config, *_ = load(path)
        encoder = cls(replace(config, **changes), has_norm="encoder.norm.weight" in state)
        state = adapt_weights(state, config, encoder.config)
        load_weights(encoder, {k: v for k, v in state.items() if k.startswith(ENCODER_PARTS)})
        return encoder.eval()


class EncoderModel(Protocol):
    config: ModelConfig
    tokenizer: Tokenizer
    encoder: Encoder


def encode(model: EncoderModel, clip: UInt8[Tensor, "B T H W C"]) -> Features:
    """Encode the whole clip, nothing masked."""
    clip = adapt_channels(clip, model.config.in_channels, model.config.motion_channel)
    tokens = model.encoder(model.tokenizer(clip) + model.encoder.positions)
    return Features(tokens.mean(dim=1), tokens)
