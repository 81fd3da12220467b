"""The vision transformer that pre-training is for, alone or as a part of AdaMAE."""

from dataclasses import replace
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.kernels.gumbel_topk import as_scalar
from adamae.kernels.noise import gumbel
from adamae.model.blocks import Block, LayerNorm
from adamae.model.channels import Clip, prepare_clip
from adamae.model.config import ModelConfig
from adamae.model.masking import AdaptiveMasking, make_masking
from adamae.model.tokenizer import Tokenizer, position_table

Selection = Literal["adaptive", "motion", "random"]
SELECTIONS: tuple[Selection, ...] = get_args(Selection)


class Features(NamedTuple):
    pooled: Float[Tensor, "B D"]  # mean over tokens
    tokens: Float[Tensor, "B K D"]  # all N where none was left out


class Encoder(nn.Module):
    """A vision transformer on the visible tokens; it has no class token."""

    positions: Tensor

    def __init__(self, config: ModelConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        size = config.dimensions
        table = position_table(config.positions, config.grid, size.encoder_width)
        self.register_buffer("positions", table, persistent=False)
        self.blocks = nn.ModuleList(
            Block(
                size.encoder_width,
                size.encoder_heads,
                drop_path=drop_path * i / max(1, size.encoder_depth - 1),
            )
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

    def __init__(
        self, config: ModelConfig, has_norm: bool = True, has_sampler: bool = False
    ) -> None:
        """`has_norm`: pre-trained encoders end in a LayerNorm, fine-tuned ones do not."""
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
        """Encode clips without gradients: whole, or only the tokens that `select_tokens` chooses."""
        return encode(self, clip, None if keep == 1 else self.select_tokens(clip, keep, by))

    @torch.no_grad()
    def select_tokens(self, clip: Clip, keep: float, by: Selection) -> Int[Tensor, "B K"]:
        """Sample a fraction of the tokens, as pre-training does; return their ids, ascending.

        by: the pre-trained sampler's probabilities, temporal difference, or none. All clips get the same noise, so that
        what is chosen of one does not depend on its batch. Raises InputError where there is no sampler.
        """
        config = self.config
        num_kept = round(keep * config.num_tokens)
        if not 0 < num_kept <= config.num_tokens:
            raise InputError(
                f"keep is {keep}, {num_kept} of {config.num_tokens} tokens: must be above 0 and at most 1"
            )
        clip = prepare_clip(clip, config)
        masking = (
            self.token_sampler if by == "adaptive" else make_masking(replace(config, masking=by))
        )
        if masking is None:
            raise InputError(
                "these weights have no token sampler to select tokens by: take those of a pre-training with"
                " model.masking=adaptive, or choose random or motion"
            )
        logits = masking.logits(clip, self.tokenizer(clip) if masking.needs_tokens else None)
        zero = as_scalar("seed", 0, logits)
        return (
            (logits + gumbel(zero, zero, 1, config.num_tokens)).topk(num_kept).indices.sort().values
        )


class EncoderModel(Protocol):
    config: ModelConfig
    tokenizer: Tokenizer
    encoder: Encoder


def encode(model: EncoderModel, clip: Clip, ids: Int[Tensor, "B K"] | None = None) -> Features:
    """Encode the whole clip, nothing masked, or only the tokens at `ids`."""
    clip = prepare_clip(clip, model.config)
    positions = model.encoder.positions
    tokens = model.encoder(
        model.tokenizer(clip, ids) + (positions if ids is None else positions[ids])
    )
    return Features(tokens.mean(dim=1), tokens)
