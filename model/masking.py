"""Masking strategies, which choose the visible tokens; `model.registry.MASKS` names them.

One in a file of its own subclasses MaskingStrategy and needs a line in the registry.
"""

from functools import partial
from typing import NamedTuple

import torch
from einops import reduce
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adamae.common.errors import InputError
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.model.blocks import Block
from adamae.model.casting import Linear
from adamae.model.channels import Clip, measure_change
from adamae.model.config import SAMPLER_HEADS, ModelConfig
from adamae.model.registry import MASKS, find_class

Seed = int | Tensor  # a tensor is 0-d, int64, on the clip's device
CLIPS_AT_ONCE = 8  # recomputed together under activation checkpointing: 78 MiB per clip at ViT-Base, while it lasts


class Mask(NamedTuple):
    """Ids are int64 and ascending."""

    visible_ids: Int[Tensor, "B K"]
    masked_ids: Int[Tensor, "B M"]
    log_probs: (
        Float[Tensor, "B N"] | None
    )  # fp32; None where tokens have no probabilities of their own


class MaskingStrategy(nn.Module):
    """Base class: a strategy sets these and defines `logits`, the probabilities that tokens are sampled by.

    One whose noise decides about more than single tokens (tubes, blocks, a number of them) overrides `sample`, as
    UniformMasking does: its noise is a function of (seed, offset + row), see kernels/noise.py, and every clip has
    `num_visible` visible tokens.
    """

    needs_tokens = (
        False  # whether it reads the embeddings of all tokens; they are not made for others
    )
    learns = False  # whether the sampling loss trains it

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_visible = config.num_visible

    def forward(
        self, clip: Clip, tokens: Float[Tensor, "B N D"] | None, seed: Seed, offset: Seed
    ) -> Mask:
        """Choose the visible tokens of each clip.

        `offset` is the global position of the batch's first clip: a clip gets the same noise in any batch or rank.
        """
        return self.sample(self.logits(clip, tokens), seed, offset)

    def logits(self, clip: Clip, tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
        """Give each token a sampling probability, of which this is the logarithm up to a constant."""
        raise NotImplementedError

    def sample(self, logits: Float[Tensor, "B N"], seed: Seed, offset: Seed) -> Mask:
        """Sample the visible tokens without replacement from softmax(logits), in fp32."""
        with torch.autocast(logits.device.type, enabled=False):
            return Mask(*gumbel_topk(logits, self.num_visible, seed, offset))


def make_masking(config: ModelConfig) -> MaskingStrategy:
    return find_class(MASKS, config.masking)(config)


class AdaptiveMasking(MaskingStrategy):
    """Samples by probabilities that a small network learns from the embeddings of all tokens (the paper's §3.2)."""

    needs_tokens = True
    learns = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        token_width, width = config.dimensions.encoder_width, config.sampler_dimension
        self.activation_checkpointing = config.activation_checkpointing
        self.positions = nn.Parameter(torch.zeros(config.num_tokens, token_width))
        self.projection = nn.Identity() if width == token_width else Linear(token_width, width)
        if config.sampler == "mlp":
            self.body = nn.Sequential(Linear(width, width))
        else:
            make_block = partial(
                Block, width, SAMPLER_HEADS, qv_bias=False, dropout=0.1, norm_eps=1e-5
            )
            self.body = nn.Sequential(*(make_block() for _ in range(config.sampler_depth)))
        self.logit = nn.Linear(width, 1)

    def logits(self, clip: Clip, tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
        assert tokens is not None
        if not self.activation_checkpointing:
            return self.predict(tokens)
        parts = tokens.split(CLIPS_AT_ONCE)
        return torch.cat([checkpoint(self.predict, part, use_reentrant=False) for part in parts])

    def predict(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N"]:
        x = self.body(self.projection(tokens + self.positions))  # fp32, as the positions are
        # The logits and what follows are always fp32: for most of the training log-probabilities differ little.
        with torch.autocast(tokens.device.type, enabled=False):
            return self.logit(x.float()).squeeze(-1)


class UniformMasking(MaskingStrategy):
    """Samples tokens, token frames, or tubes (VideoMAE, arXiv 2203.12602: the same places in every frame) uniformly."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.masking, self.unit_tokens = config.masking, config.unit_tokens
        self.num_units = config.num_tokens // config.unit_tokens

    def logits(self, clip: Clip, tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B U"]:
        return torch.zeros(len(clip), self.num_units, device=clip.device)

    def sample(self, logits: Float[Tensor, "B U"], seed: Seed, offset: Seed) -> Mask:
        visible, masked, _ = gumbel_topk(logits, self.num_visible // self.unit_tokens, seed, offset)
        return Mask(self.token_ids(visible), self.token_ids(masked), None)

    def token_ids(self, units: Int[Tensor, "B U"]) -> Int[Tensor, "B K"]:
        """List the tokens of each unit, ascending."""
        if self.masking == "random":
            return units
        within = torch.arange(self.unit_tokens, device=units.device)
        if self.masking == "tube":
            return (within[:, None] * self.num_units + units[:, None, :]).flatten(1)
        return (units[:, :, None] * self.unit_tokens + within).flatten(1)


class MotionMasking(MaskingStrategy):
    """Samples by temporal difference, without learning (EVEREST, arXiv 2211.10636)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tubelet_size, self.patch_size = config.tubelet_size, config.patch_size
        if config.grid[0] < 2:
            raise InputError(
                f"model.masking=motion compares neighboring token frames, and a clip of {config.num_frames} frames in"
                f" tubelets of {config.tubelet_size} has only one: raise model.num_frames"
            )

    def logits(self, clip: Clip, tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
        """Compute the logarithm of 1 + the mean absolute difference, in 0…255, to the neighboring token frames.

        The 1, about what a sensor's noise makes, leaves static tokens a chance. The first and the last token frame have
        one neighbor.
        """
        t, p = self.tubelet_size, self.patch_size
        change = measure_change(clip[:, t:], clip[:, :-t])
        step = reduce(change, "b (t pt) (h ph) (w pw) -> b t h w", "sum", pt=t, ph=p, pw=p)
        step = step.float() / (clip.shape[4] * t * p**2)
        to_next, to_previous = (
            torch.cat((step, step[:, -1:]), dim=1),
            torch.cat((step[:, :1], step), dim=1),
        )
        return ((to_next + to_previous) / 2).log1p().flatten(1)


class MotionShareMasking(MotionMasking):
    """Half of the visible tokens come from the fifth of the tokens that changes most, uniformly, the others from the
    rest."""

    def sample(self, logits: Float[Tensor, "B N"], seed: Seed, offset: Seed) -> Mask:
        num_tokens, half = logits.shape[1], self.num_visible // 2
        num_moving = max(half, num_tokens // 5)
        ranked = logits.argsort(dim=1, descending=True, stable=True)
        groups = ranked.split((num_moving, num_tokens - num_moving), dim=1)
        chosen = []
        for stream, (ids, count) in enumerate(
            zip(groups, (half, self.num_visible - half), strict=True)
        ):
            kept, left, _ = gumbel_topk(
                torch.zeros_like(ids, dtype=torch.float32), count, seed ^ stream, offset
            )
            chosen.append((ids.gather(1, kept), ids.gather(1, left)))
        visible, masked = (
            torch.cat(ids, dim=1).sort(dim=1).values for ids in zip(*chosen, strict=True)
        )
        return Mask(visible, masked, None)
