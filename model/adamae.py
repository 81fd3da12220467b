"""AdaMAE: a masked autoencoder for video that learns which tokens to keep visible (arXiv 2211.09120 §3)."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.kernels.gather_tokens import gather_tokens
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.model.blocks import initialize
from adamae.model.channels import Clip, prepare_clip
from adamae.model.config import ModelConfig
from adamae.model.encoder import Encoder, Features, encode
from adamae.model.masking import Mask, Seed, make_masking
from adamae.model.registry import DECODERS, find_class
from adamae.model.sampling_loss import sampling_loss
from adamae.model.targets import Target, make_target
from adamae.model.tokenizer import Tokenizer


class Output(NamedTuple):
    """Losses are fp32 under autocast too."""

    loss: Float[Tensor, ""]
    reconstruction_loss: Float[Tensor, ""]
    sampling_loss: Float[Tensor, ""]  # 0 where the masking does not learn
    pred: Float[
        Tensor, "B M P"
    ]  # without a gradient: a compiled step would be given one of its size, of zeros
    loss_per_token: Float[Tensor, "B M"]
    log_probs: Float[Tensor, "B N"] | None  # None where tokens have no probabilities
    visible_ids: Int[Tensor, "B K"]
    masked_ids: Int[
        Tensor, "B M"
    ]  # the predicted ones: in training a fraction of them (model.decoder_share)


DECODER_STREAM = (
    0x5DEC0DE5  # XORed into the seed: apart from the noise that chooses the visible tokens
)


def sample_ids(
    ids: Int[Tensor, "B M"], count: int, seed: Seed, offset: Seed
) -> Int[Tensor, "B count"]:
    """Sample `count` of each row's ids uniformly: the loss over them is an unbiased estimate of the loss over all."""
    chosen, *_ = gumbel_topk(
        torch.zeros(ids.shape, device=ids.device), count, seed ^ DECODER_STREAM, offset
    )
    return ids.gather(1, chosen)


class AdaMAE(nn.Module):
    def __init__(self, config: ModelConfig, target: Target | None = None) -> None:
        super().__init__()
        self.config = config
        self.target = make_target(config) if target is None else target
        self.tokenizer = Tokenizer(config)
        self.token_sampler = make_masking(config)
        self.encoder = Encoder(config)
        self.decoder = find_class(DECODERS, config.decoder_attention)(
            config, self.target.num_values
        )
        self.apply(initialize)
        nn.init.trunc_normal_(self.decoder.mask_token, std=0.02)

    def forward(self, clip: Clip, seed: Seed, offset: Seed) -> Output:
        """Mask tokens, predict them, compare.

        seed, offset: of the sampling noise; `offset` is the global position of the first clip of the batch. Tensors
        (0-d, int64, on the clip's device) let one compiled graph serve all steps.
        """
        config = self.config
        clip = prepare_clip(clip, config)
        prepared = self.target.prepare(clip)
        mask, visible = self.embed_visible(clip, seed, offset)
        masked_ids = mask.masked_ids
        if self.training and config.decoder_share < 1:
            masked_ids = sample_ids(masked_ids, config.num_reconstructed, seed, offset)
        pred = self.decoder(self.encoder(visible), mask.visible_ids, masked_ids)
        loss_per_token = self.target(prepared, pred, masked_ids)
        loss = reconstruction = loss_per_token.mean()
        sampling = torch.zeros_like(reconstruction)
        if mask.log_probs is not None and self.token_sampler.learns:
            # It makes sampling probabilities proportional to errors (arXiv 2211.09120 §3.3).
            sampling = sampling_loss(mask.log_probs, masked_ids, loss_per_token.detach())
            loss = reconstruction + config.sampling_loss_weight * sampling
        return Output(
            loss,
            reconstruction,
            sampling,
            pred.detach(),
            loss_per_token,
            mask.log_probs,
            mask.visible_ids,
            masked_ids,
        )

    def embed_visible(
        self, clip: Clip, seed: Seed, offset: Seed
    ) -> tuple[Mask, Float[Tensor, "B K D"]]:
        """Mask the clip; embed the visible tokens and add their positions."""
        needs_tokens = self.token_sampler.needs_tokens
        if needs_tokens and not self.config.detach_sampler_input:
            tokens = self.tokenizer(clip).float()
            mask = self.token_sampler(clip, tokens, seed, offset)
            return mask, gather_tokens(tokens, mask.visible_ids, self.encoder.positions)
        # No gradient comes back through masked tokens: to tokenize the few visible ones again costs K/N of the
        # tokenizer, and saves the backward pass and the memory of the others.
        with torch.no_grad():
            tokens = self.tokenizer(clip) if needs_tokens else None
        mask = self.token_sampler(clip, tokens, seed, offset)
        # The positions' fp32 makes the encoder's residual stream fp32 under autocast.
        return mask, self.tokenizer(clip, mask.visible_ids) + self.encoder.positions[
            mask.visible_ids
        ]

    @torch.no_grad()
    def encode(self, clip: Clip) -> Features:
        """Encode the whole clip, nothing masked."""
        return encode(self, clip)

    def with_masking(self, **changes: Any) -> "AdaMAE":
        """Return the same model, sharing its weights, with another `masking` or `mask_ratio`."""
        with torch.device("meta"):
            other = AdaMAE(replace(self.config, **changes), self.target)
        for part in ("tokenizer", "encoder", "decoder"):
            setattr(other, part, getattr(self, part))
        if other.token_sampler.learns:
            if not self.token_sampler.learns:
                raise InputError(
                    f"this model has no token sampler: it was trained with {self.config.masking} masking"
                )
            other.token_sampler.load_state_dict(
                self.token_sampler.state_dict(keep_vars=True), assign=True
            )
        return other.train(self.training)
