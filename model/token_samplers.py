"""Which tokens are visible: one class for each masking strategy of SPEC §5, all called the same way.

    visible_ids [B, K], masked_ids [B, M], log_probs [B, N] or None = sampler(tokens [B, N, D], seed, offset, prior)

Ids are int64 and ascending. `offset` is the global position of the batch's first clip: a clip draws the same noise
whatever batch or rank it falls into. `prior`, [B, N] or None: logits that pixels alone give (model/motion.py). Samplers
that do not look only read the batch size and the device of `tokens`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import gumbel_topk
from model.blocks import Block
from model.config import SAMPLER_HEADS, ModelConfig

CLIPS_AT_ONCE = 8  # run once more under activation checkpointing: 78 MiB a clip at ViT-Base, while it lasts


class Draw(NamedTuple):
    visible_ids: Int[Tensor, "B K"]
    masked_ids: Int[Tensor, "B M"]
    log_probs: Float[Tensor, "B N"] | None  # fp32, at a sharpness of 1; None where tokens have no probabilities


class SharpDraw(nn.Module):
    """Draws from softmax(γ · logits)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_visible = config.num_visible
        self.sharpness, self.ramp = config.sampling_sharpness, config.sharpness_ramp

    def forward(self, logits: Float[Tensor, "B N"], seed: int | Tensor, offset: int | Tensor) -> Draw:
        with torch.autocast(logits.device.type, enabled=False):
            return Draw(*gumbel_topk(logits, self.num_visible, seed, offset, self._sharpness(logits, offset)))

    def _sharpness(self, logits: Float[Tensor, "B N"], offset: int | Tensor) -> Float[Tensor, " B"] | None:
        """γ of each clip: in training it grows with the clip's global position, so that a run may stop anywhere."""
        if self.sharpness == 1:
            return None
        if not (self.training and self.ramp):
            return logits.new_full(logits.shape[:1], self.sharpness, dtype=torch.float32)
        position = offset + torch.arange(len(logits), device=logits.device)
        return 1 + (self.sharpness - 1) * (position / self.ramp).clamp(max=1)


class AdaptiveSampler(nn.Module):
    """Draws visible tokens without replacement from a categorical distribution that it predicts from all tokens."""

    looks = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        tokens_width, width = config.dimensions.encoder_width, config.sampler_dimension
        self.draw = SharpDraw(config)
        self.autocast = config.sampler_autocast
        self.activation_checkpointing = config.activation_checkpointing
        self.positions = nn.Parameter(torch.zeros(config.num_tokens, tokens_width))
        self.projection = nn.Identity() if width == tokens_width else nn.Linear(tokens_width, width)
        if config.sampler == "mlp":
            self.body = nn.Sequential(nn.Linear(width, width))
        else:
            self.body = nn.Sequential(
                *(
                    Block(width, SAMPLER_HEADS, qv_bias=False, dropout=0.1, norm_eps=1e-5)
                    for _ in range(config.sampler_depth)
                )
            )
        self.logit = nn.Linear(width, 1)

    def forward(
        self,
        tokens: Float[Tensor, "B N D"],
        seed: int | Tensor,
        offset: int | Tensor,
        prior: Float[Tensor, "B N"] | None = None,
    ) -> Draw:
        if self.activation_checkpointing:
            parts = tokens.split(CLIPS_AT_ONCE)
            logits = torch.cat([checkpoint(self._logits, part, use_reentrant=False) for part in parts])
        else:
            logits = self._logits(tokens)
        return self.draw(logits if prior is None else logits + prior, seed, offset)

    def _logits(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N"]:
        # Logits and what follows are always fp32: for most of the training log-probabilities differ little (SPEC §4).
        device = tokens.device.type
        with torch.autocast(device, enabled=self.autocast and torch.is_autocast_enabled(device)):
            x = self.body(self.projection(tokens + self.positions))  # fp32, as the positions are
        with torch.autocast(device, enabled=False):
            return self.logit(x.float()).squeeze(-1)


class UniformSampler(nn.Module):
    """Draws without looking: single tokens, tubes (a place in all token frames) or whole token frames."""

    looks = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        time, height, width = config.grid
        self.masking = config.masking
        self.time, self.area = time, height * width
        self.num_choices = {"random": time * self.area, "tube": self.area, "frame": time}[config.masking]
        self.num_chosen = config.num_visible * self.num_choices // config.num_tokens

    def forward(self, tokens: Tensor, seed: int | Tensor, offset: int | Tensor, prior: None = None) -> Draw:
        even = torch.zeros(tokens.shape[0], self.num_choices, device=tokens.device)
        chosen, left, _ = gumbel_topk(even, self.num_chosen, seed, offset)
        return Draw(self._token_ids(chosen), self._token_ids(left), None)

    def _token_ids(self, choices: Int[Tensor, "B X"]) -> Int[Tensor, "B K"]:
        if self.masking == "tube":
            frame_start = torch.arange(self.time, device=choices.device) * self.area
            return (frame_start[:, None] + choices[:, None, :]).flatten(1)
        if self.masking == "frame":
            return (choices[:, :, None] * self.area + torch.arange(self.area, device=choices.device)).flatten(1)
        return choices


class MotionSampler(nn.Module):
    """Draws by the prior alone: the honest baseline without learning."""

    looks = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.draw = SharpDraw(config)

    def forward(self, tokens: Tensor, seed: int | Tensor, offset: int | Tensor, prior: Float[Tensor, "B N"]) -> Draw:
        return self.draw(prior, seed, offset)


def build_sampler(config: ModelConfig) -> AdaptiveSampler | UniformSampler | MotionSampler:
    if config.masking == "adaptive":
        return AdaptiveSampler(config)
    return MotionSampler(config) if config.masking == "motion" else UniformSampler(config)
