"""The paper's adaptive masking (arXiv 2211.09120 §3.2): a small network learns which tokens to keep visible."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.blocks import Block
from model.casting import Linear
from model.config import SAMPLER_HEADS, ModelConfig
from model.masking.mask import MaskingStrategy

CLIPS_AT_ONCE = 8  # recomputed together under activation checkpointing: 78 MiB per clip at ViT-Base, while it lasts


class AdaptiveMasking(MaskingStrategy):
    """Samples from a categorical distribution that it predicts from the embeddings of all tokens."""

    needs_tokens = True
    learns = True
    has_probabilities = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        token_width, width = config.dimensions.encoder_width, config.sampler_dimension
        self.activation_checkpointing = config.activation_checkpointing
        self.positions = nn.Parameter(torch.zeros(config.num_tokens, token_width))
        self.projection = nn.Identity() if width == token_width else Linear(token_width, width)
        if config.sampler == "mlp":
            self.body = nn.Sequential(Linear(width, width))
        else:
            blocks = (
                Block(width, SAMPLER_HEADS, qv_bias=False, dropout=0.1, norm_eps=1e-5)
                for _ in range(config.sampler_depth)
            )
            self.body = nn.Sequential(*blocks)
        self.logit = nn.Linear(width, 1)

    def logits(self, clip: UInt8[Tensor, "B T H W C"], tokens: Float[Tensor, "B N D"] | None) -> Float[Tensor, "B N"]:
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
