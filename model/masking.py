"""Masking strategies, which choose the visible tokens; `model.registry.MASKS` names them.

To add one, subclass MaskingStrategy in a new file and add a line to `MASKS`.
"""

from typing import NamedTuple

import torch
from einops import reduce
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adamae.common.errors import InputError
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.model.blocks import Block, Noise, Seed
from adamae.model.casting import Linear
from adamae.model.channels import Clip, measure_change
from adamae.model.config import SAMPLER_HEADS, ModelConfig
from adamae.model.registry import MASKS, find_class

# Clips that are recomputed together under activation checkpointing: at ViT-Base, each takes 78 MiB
# for as long as that lasts.
CLIPS_AT_ONCE = 8


class Mask(NamedTuple):
    """The tokens of each clip that the encoder sees, and those that are predicted; ids ascend."""

    visible_ids: Int[Tensor, "B K"]
    masked_ids: Int[Tensor, "B M"]
    # fp32; None where tokens have no probabilities of their own.
    log_probs: Float[Tensor, "B N"] | None


class MaskingStrategy(nn.Module):
    """Base class: a strategy defines `logits`, by which tokens are sampled.

    They are the log-probabilities, up to a constant. A strategy whose noise decides about more than
    single tokens (tubes, blocks, a number of them) overrides `sample` instead, as UniformMasking
    does. Two rules hold for all: noise is a function of (seed, offset + row), see kernels/noise.py,
    and every clip has `num_visible` visible tokens.
    """

    # Whether it reads the embeddings of all tokens; they are not made for those that do not.
    needs_tokens = False
    # Whether the sampling loss trains it.
    learns = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_visible = config.num_visible

    def forward(
        self, clip: Clip, tokens: Float[Tensor, "B N D"] | None, seed: Seed, offset: Seed
    ) -> Mask:
        """Choose the visible tokens of each clip.

        `offset` is the global position of the batch's first clip: a clip gets the same noise in any
        batch or rank.
        """
        return self.sample(self.logits(clip, tokens), seed, offset)

    def logits(self, clip: Clip, tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
        """Return the logarithm of each token's sampling probability, up to a constant per clip."""
        raise NotImplementedError

    def sample(self, logits: Float[Tensor, "B N"], seed: Seed, offset: Seed) -> Mask:
        """Sample the visible tokens without replacement from softmax(logits), in fp32."""
        with torch.autocast(logits.device.type, enabled=False):
            return Mask(*gumbel_topk(logits, self.num_visible, seed, offset))


def make_masking(config: ModelConfig) -> MaskingStrategy:
    """Make the strategy that model.masking names."""
    return find_class(MASKS, config.masking)(config)


class AdaptiveMasking(MaskingStrategy):
    """Samples by probabilities that a small network learns from the embeddings of all tokens.

    arXiv 2211.09120 §3.2.
    """

    needs_tokens = True
    learns = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        token_width = config.dimensions.encoder_width
        width = config.sampler_dimension
        self.activation_checkpointing = config.activation_checkpointing
        self.positions = nn.Parameter(torch.zeros(config.num_tokens, token_width))
        self.projection = nn.Identity() if width == token_width else Linear(token_width, width)
        if config.sampler == "mlp":
            self.body = nn.Sequential(Linear(width, width))
        else:
            # These options are those of the authors' code, and differ from the encoder's.
            self.body = nn.Sequential()
            for i in range(config.sampler_depth):
                block = Block(
                    width,
                    SAMPLER_HEADS,
                    qv_bias=False,
                    dropout=0.1,
                    # A block has two layers with dropout.
                    first_layer=1 + 2 * i,
                    norm_eps=1e-5,
                )
                self.body.append(block)
        self.logit = nn.Linear(width, 1)

    def forward(
        self, clip: Clip, tokens: Float[Tensor, "B N D"] | None, seed: Seed, offset: Seed
    ) -> Mask:
        assert tokens is not None
        if not self.activation_checkpointing:
            return self.sample(self.predict(tokens, Noise(seed, offset)), seed, offset)
        logits = []
        for first in range(0, len(tokens), CLIPS_AT_ONCE):
            clips = tokens[first : first + CLIPS_AT_ONCE]
            noise = Noise(seed, offset + first)
            logits.append(checkpoint(self.predict, clips, noise, use_reentrant=False))
        return self.sample(torch.cat(logits), seed, offset)

    def logits(self, clip: Clip, tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
        """Return the logits without dropout."""
        assert tokens is not None
        return self.predict(tokens, None)

    def predict(self, tokens: Float[Tensor, "B N D"], noise: Noise | None) -> Float[Tensor, "B N"]:
        """Compute the logits, in fp32. Dropout takes noise in training."""
        # Positions are fp32, and so is their sum.
        x = self.projection(tokens + self.positions)
        for layer in self.body:
            x = layer(x, noise=noise) if isinstance(layer, Block) else layer(x)
        # The logits and what follows are always fp32: log-probabilities differ little for most of
        # the training.
        with torch.autocast(tokens.device.type, enabled=False):
            return self.logit(x.float()).squeeze(-1)


class UniformMasking(MaskingStrategy):
    """Samples units uniformly: tokens, whole token frames, or tubes.

    A tube is a row and column of the grid in all token frames (VideoMAE, arXiv 2203.12602).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.masking = config.masking
        self.unit_tokens = config.unit_tokens
        self.num_units = config.num_tokens // config.unit_tokens

    def logits(self, clip: Clip, tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B U"]:
        """Return a zero for each of the U units."""
        return torch.zeros(len(clip), self.num_units, device=clip.device)

    def sample(self, logits: Float[Tensor, "B U"], seed: Seed, offset: Seed) -> Mask:
        num_units = self.num_visible // self.unit_tokens
        visible, masked, _ = gumbel_topk(logits, num_units, seed, offset)
        return Mask(self.token_ids(visible), self.token_ids(masked), None)

    def token_ids(self, units: Int[Tensor, "B U"]) -> Int[Tensor, "B K"]:
        """Return the ids of all tokens of ascending units, ascending.

        With a grid of 2 x 2 x 2 tokens, ids 0 to 3 are the first token frame and 4 to 7 the second:
        tubes 1 and 2 are tokens 1, 2, 5 and 6, and frame 1 is tokens 4, 5, 6 and 7.
        """
        if self.masking == "random":
            return units
        index_in_unit = torch.arange(self.unit_tokens, device=units.device)
        if self.masking == "tube":
            # A tube has one token in each frame, and a frame has as many tokens as there are tubes.
            ids = index_in_unit[:, None] * self.num_units + units[:, None, :]
        else:
            ids = units[:, :, None] * self.unit_tokens + index_in_unit
        return ids.flatten(1)


class MotionMasking(MaskingStrategy):
    """Samples by temporal difference, without learning (EVEREST, arXiv 2211.10636)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tubelet_size = config.tubelet_size
        self.patch_size = config.patch_size
        token_frames = config.grid[0]
        if token_frames < 2:
            raise InputError(
                "model.masking=motion compares neighboring token frames, and a clip of"
                f" {config.num_frames} frames in tubelets of {config.tubelet_size} has only one:"
                " raise model.num_frames"
            )

    def logits(self, clip: Clip, tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
        """Compute log(1 + mean absolute difference to the neighboring token frames) of each token.

        The difference of a pixel is from 0 to 255. The 1, about what a sensor's noise makes, leaves
        static tokens a chance. The first and the last token frame have one neighbor: with changes
        of 2 and 4 between three frames, a token's frames change by 2, 3 and 4.
        """
        t = self.tubelet_size
        p = self.patch_size
        change = measure_change(clip[:, t:], clip[:, :-t])
        # Between each token frame and the next one: there is one fewer of these.
        step = reduce(change, "b (t pt) (h ph) (w pw) -> b t h w", "sum", pt=t, ph=p, pw=p)
        num_values = clip.shape[4] * t * p**2
        step = step.float() / num_values
        to_next = torch.cat((step, step[:, -1:]), dim=1)
        to_previous = torch.cat((step[:, :1], step), dim=1)
        mean_change = (to_next + to_previous) / 2
        return mean_change.log1p().flatten(1)


class MotionShareMasking(MotionMasking):
    """Samples half of the visible tokens from the fifth of all that changes most, uniformly.

    The other half comes from the other tokens, uniformly, too.
    """

    def sample(self, logits: Float[Tensor, "B N"], seed: Seed, offset: Seed) -> Mask:
        num_tokens = logits.shape[1]
        half = self.num_visible // 2
        num_moving = max(half, num_tokens // 5)
        ranked = logits.argsort(dim=1, descending=True, stable=True)
        moving, still = ranked.split((num_moving, num_tokens - num_moving), dim=1)
        moving_visible, moving_masked = _split_uniformly(moving, half, seed, offset)
        # This noise differs from the moving tokens' noise; a run with the neighboring seed has the
        # same numbers the other way round.
        still_visible, still_masked = _split_uniformly(
            still, self.num_visible - half, seed ^ 1, offset
        )
        visible = torch.cat((moving_visible, still_visible), dim=1).sort(dim=1).values
        masked = torch.cat((moving_masked, still_masked), dim=1).sort(dim=1).values
        return Mask(visible, masked, None)


def _split_uniformly(
    ids: Int[Tensor, "B M"], count: int, seed: Seed, offset: Seed
) -> tuple[Int[Tensor, "B count"], Int[Tensor, "B M-count"]]:
    """Split each row of ids at random into `count` of them and the others."""
    logits = torch.zeros_like(ids, dtype=torch.float32)
    chosen, others, _ = gumbel_topk(logits, count, seed, offset)
    return ids.gather(1, chosen), ids.gather(1, others)
