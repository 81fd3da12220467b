"""AdaMAE: a masked autoencoder for video that learns which tokens to keep visible.

arXiv 2211.09120 §3.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adamae.common.errors import InputError
from adamae.kernels.gather_tokens import gather_tokens
from adamae.kernels.gumbel_topk import gumbel_topk
from adamae.model.blocks import Seed, initialize
from adamae.model.channels import Clip, prepare_clip
from adamae.model.config import ModelConfig
from adamae.model.decoder import Decoder
from adamae.model.encoder import Encoder, Features, encode
from adamae.model.masking import Mask, make_masking
from adamae.model.registry import DECODERS, find_class
from adamae.model.sampling_loss import sampling_loss
from adamae.model.targets import Target, make_target
from adamae.model.tokenizer import Tokenizer
from adamae.model.views import Views

# XORed into the seed, for noise that is independent of the one that chooses the visible tokens.
DECODER_STREAM = 0x5DEC0DE5


class Output(NamedTuple):
    """Losses and predictions for a batch. Losses are fp32 under autocast too."""

    loss: Float[Tensor, ""]
    reconstruction_loss: Float[Tensor, ""]
    # 0 where the masking does not learn.
    sampling_loss: Float[Tensor, ""]
    # 0 where a video has one view (model.views=1), and in evaluation.
    views_loss: Float[Tensor, ""]
    # Without a gradient: a compiled step would be given one of its size, of zeros.
    pred: Float[Tensor, "B M P"]
    loss_per_token: Float[Tensor, "B M"]
    # None where tokens have no probabilities.
    log_probs: Float[Tensor, "B N"] | None
    visible_ids: Int[Tensor, "B K"]
    # Those that were predicted: in training a fraction of the masked ones (model.decoder_share).
    masked_ids: Int[Tensor, "B M"]


def sample_ids(
    ids: Int[Tensor, "B M"], count: int, seed: Seed, offset: Seed
) -> Int[Tensor, "B count"]:
    """Sample `count` of each row's ids uniformly.

    The loss over them is an unbiased estimate of the loss over all.
    """
    logits = torch.zeros(ids.shape, device=ids.device)
    chosen, *_ = gumbel_topk(logits, count, seed ^ DECODER_STREAM, offset)
    return ids.gather(1, chosen)


class AdaMAE(nn.Module):
    """The model that is pre-trained; another masking, target or decoder is chosen by its config."""

    def __init__(self, config: ModelConfig, target: Target | None = None) -> None:
        super().__init__()
        self.config = config
        self.target = make_target(config) if target is None else target
        self.tokenizer = Tokenizer(config)
        self.token_sampler = make_masking(config)
        self.encoder = Encoder(config)
        self.decoder: Decoder | None = None
        if config.target != "none":
            make_decoder = find_class(DECODERS, config.decoder_attention)
            self.decoder = make_decoder(config, self.target.num_values)
        self.views = Views(config) if config.views > 1 else None
        self.apply(initialize)
        if self.decoder is not None:
            nn.init.trunc_normal_(self.decoder.mask_token, std=0.02)

    def forward(self, clip: Clip, seed: Seed, offset: Seed) -> Output:
        """Mask tokens, predict them, and compare them with the clip.

        seed, offset: of the sampling noise; `offset` is the global position of the batch's first
        clip. Tensors (0-d, int64, on the clip's device) let one compiled graph run all steps.
        """
        config = self.config
        clip = prepare_clip(clip, config)
        # Before the tokens are made: what this takes is free again when activations are kept.
        prepared = self.target.prepare(clip)
        mask, visible = self.embed_visible(clip, seed, offset)
        masked_ids = mask.masked_ids
        if self.training and config.decoder_share < 1:
            masked_ids = sample_ids(masked_ids, config.num_reconstructed, seed, offset)
        features = self.encoder(visible)
        zero = torch.zeros((), device=clip.device)
        if self.decoder is None:
            masked_ids = masked_ids[:, :0]
            pred = features.new_zeros(len(clip), 0, 0)
            loss_per_token = features.new_zeros(len(clip), 0)
            reconstruction = zero
        else:
            pred = self.decoder(features, mask.visible_ids, masked_ids)
            loss_per_token = self.target(prepared, pred, masked_ids)
            reconstruction = loss_per_token.mean()
        loss = reconstruction
        sampling = zero
        if mask.log_probs is not None and self.token_sampler.learns:
            # It makes sampling probabilities proportional to errors (arXiv 2211.09120 §3.3).
            sampling = sampling_loss(mask.log_probs, masked_ids, loss_per_token.detach())
            loss = loss + config.sampling_loss_weight * sampling
        views_loss = zero
        # Only batches of the training hold a video's views together.
        if self.training and self.views is not None:
            views_loss = self.views(features)
            loss = loss + config.views_weight * views_loss
        return Output(
            loss,
            reconstruction,
            sampling,
            views_loss,
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
        # No gradient comes back through masked tokens: to tokenize the few visible ones again costs
        # K / N of the tokenizer, and saves the backward pass and the memory of all others.
        with torch.no_grad():
            tokens = self.tokenizer(clip) if needs_tokens else None
        mask = self.token_sampler(clip, tokens, seed, offset)
        visible = self.tokenizer(clip, mask.visible_ids)
        # Positions are fp32, and make the encoder's residual stream fp32 under autocast.
        return mask, visible + self.encoder.positions[mask.visible_ids]

    @torch.no_grad()
    def encode(self, clip: Clip) -> Features:
        """Encode the whole clip, nothing masked."""
        return encode(self, clip)

    def with_masking(self, **changes: Any) -> "AdaMAE":
        """Return the same model, sharing its weights, with another `masking` or `mask_ratio`.

        Raise InputError if the masking asks for a token sampler that this model does not have.
        """
        # On the meta device, weights that are replaced below take neither time nor memory.
        with torch.device("meta"):
            model = AdaMAE(replace(self.config, **changes), self.target)
        model.tokenizer = self.tokenizer
        model.encoder = self.encoder
        model.decoder = self.decoder
        model.views = self.views
        if model.token_sampler.learns:
            if not self.token_sampler.learns:
                masking = self.config.masking
                raise InputError(
                    f"this model has no token sampler: it was trained with {masking} masking"
                )
            weights = self.token_sampler.state_dict(keep_vars=True)
            model.token_sampler.load_state_dict(weights, assign=True)
        return model.train(self.training)
