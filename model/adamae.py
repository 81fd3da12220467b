"""AdaMAE: a masked autoencoder for video that learns which tokens to show (SPEC §3 and §4)."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.errors import InputError
from kernels import gather_tokens, masked_patch_loss, sampling_loss, scatter_tokens
from model.blocks import Block, LayerNorm, initialize
from model.channels import adapt_channels
from model.config import ModelConfig
from model.decoder_masking import reconstructed
from model.encoder import Encoder, Features, encode
from model.motion import log_motion
from model.ranking import ranking_loss
from model.token_samplers import Draw, build_sampler
from model.tokenizer import Tokenizer, position_table
from model.weights.loading import load_weights

if TYPE_CHECKING:
    from model.maps import Maps


class Output(NamedTuple):
    """What a forward pass gives; losses are fp32 whatever the autocast dtype."""

    loss: Float[Tensor, ""]
    reconstruction_loss: Float[Tensor, ""]
    sampling_loss: Float[Tensor, ""]  # 0 where masking is not adaptive
    pred: Float[Tensor, "B M P"]  # without a gradient: a compiled step would be given one of its size, of zeros
    loss_per_token: Float[Tensor, "B M"]
    log_probs: Float[Tensor, "B N"] | None  # at a sharpness of 1; None where tokens have no probabilities
    visible_ids: Int[Tensor, "B K"]
    masked_ids: Int[Tensor, "B M"]  # those that were predicted: in training a share of them (model.decoder_share)


class Decoder(nn.Module):
    """Predicts the masked patches from the encoder's features and the places of the masked tokens."""

    positions: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.dimensions
        width = size.decoder_width
        table = position_table(config.positions, config.grid, width)
        self.register_buffer("positions", table, persistent=False)
        self.embed = nn.Linear(size.encoder_width, width, bias=False)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width, size.decoder_heads) for _ in range(size.decoder_depth))
        self.activation_checkpointing = config.activation_checkpointing
        self.norm = LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, config.patch_values)

    def forward(
        self, features: Float[Tensor, "B K D"], visible_ids: Int[Tensor, "B K"], masked_ids: Int[Tensor, "B M"]
    ) -> Float[Tensor, "B M P"]:
        x = scatter_tokens(self.embed(features), self.mask_token, self.positions, visible_ids, masked_ids)
        *first_blocks, last_block = self.blocks
        for block in first_blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.activation_checkpointing else block(x)
        # Visible tokens stand first and are not read: the last block and the head work for masked ones only. Running
        # it once more would save nothing: its backward pass comes when all else is still kept.
        return self.head(self.norm(last_block(x, num_silent=visible_ids.shape[1])))


class AdaMAE(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = Tokenizer(config)
        self.token_sampler = build_sampler(config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.apply(initialize)
        nn.init.trunc_normal_(self.decoder.mask_token, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are positions or a token, which weight decay must leave alone (SPEC §7)."""
        return {name for name, _ in self.named_parameters() if name.endswith(("positions", "mask_token"))}

    def forward(self, clip: UInt8[Tensor, "B T H W C"], seed: int | Tensor, offset: int | Tensor) -> Output:
        """Hide tokens, predict them, compare.

        seed, offset: of the sampling noise; `offset` is the global position of the first clip of the batch. Tensors
        (0-d, int64, on the clip's device) let one compiled graph serve all steps.
        """
        clip = adapt_channels(clip, self.config.in_channels)
        draw, visible = self._sample(clip, seed, offset)
        if self.training and self.config.decoder_share < 1:
            draw = draw._replace(masked_ids=reconstructed(draw, self.config, seed, offset))
        pred = self.decoder(self.encoder(visible), draw.visible_ids, draw.masked_ids)
        return self._objective(clip, pred, draw)

    @torch.no_grad()
    def encode(self, clip: UInt8[Tensor, "B T H W C"]) -> Features:
        """What the encoder makes of the whole clip, nothing hidden."""
        return encode(self, clip)

    def reconstruct(self, clip: UInt8[Tensor, "B T H W C"], seed: int = 0) -> "Maps":
        """Mask the clip once, predict what is hidden, and map what happened: see `model.maps.Maps`."""
        from model.maps import reconstruct

        return reconstruct(self, clip, seed)

    def remasked(self, **changes: Any) -> "AdaMAE":
        """The same model, sharing its weights, with another `masking` or `mask_ratio`."""
        with torch.device("meta"):
            other = AdaMAE(replace(self.config, **changes))
        other.tokenizer, other.encoder, other.decoder = self.tokenizer, self.encoder, self.decoder
        if other.token_sampler.looks:
            if not self.token_sampler.looks:
                raise InputError(f"this model has no token sampler: it was trained with {self.config.masking} masking")
            other.token_sampler.load_state_dict(self.token_sampler.state_dict(keep_vars=True), assign=True)
        return other.train(self.training)

    @classmethod
    def from_pretrained(cls, path: str | Path, **changes: Any) -> "AdaMAE":
        """The model in a run folder, a checkpoint, an export or a published file, ready for inference, on the CPU.

        `changes` of its configuration, such as mask_ratio=0.9, or num_frames and image_size of other clips: learnt
        positions are then interpolated. Raises InputError where the weights are not whole.
        """
        from model.weights.pretrained import load
        from model.weights.warm_start import CLIP, resized

        state, config, _ = load(path)
        if not any(name.startswith("decoder.") for name in state):
            raise InputError(
                f"{path} holds no decoder, only an encoder: give the run or file of the pre-training itself"
            )
        of_clip = {name: changes.pop(name) for name in CLIP if name in changes}
        model = cls(replace(config, **of_clip))
        load_weights(model, resized(state, config, model.config))
        return (model.remasked(**changes) if changes else model).eval()

    def _sample(
        self, clip: UInt8[Tensor, "B T H W C"], seed: int | Tensor, offset: int | Tensor
    ) -> tuple[Draw, Float[Tensor, "B K D"]]:
        """The drawn ids, and the visible tokens with their positions."""
        config = self.config
        prior = log_motion(clip, config.tubelet_size, config.patch_size) if config.looks_at_motion else None
        if self.token_sampler.looks and not config.detach_sampler_input:
            tokens = self.tokenizer(clip).float()
            draw = self.token_sampler(tokens, seed, offset, prior)
            return draw, gather_tokens(tokens, draw.visible_ids, self.encoder.positions)
        # No gradient comes back through hidden tokens: tokenizing the few visible ones once more costs K/N of the
        # tokenizer and spares its backward, and the memory for it, the other tokens. The positions' fp32 makes the
        # encoder's residual stream fp32 under autocast.
        with torch.no_grad():
            seen = self.tokenizer(clip) if self.token_sampler.looks else clip
        draw = self.token_sampler(seen, seed, offset, prior)
        visible = self.tokenizer(clip, draw.visible_ids) + self.encoder.positions[draw.visible_ids]
        return draw, visible

    def _objective(self, clip: UInt8[Tensor, "B T H W C"], pred: Float[Tensor, "B M P"], draw: Draw) -> Output:
        config = self.config
        loss_per_token = masked_patch_loss(
            pred, clip, draw.masked_ids, config.tubelet_size, config.patch_size, config.loss, config.normalize_target
        )
        reconstruction = loss_per_token.mean()
        if draw.log_probs is None or not self.token_sampler.looks:
            loss, sampling = reconstruction, torch.zeros_like(reconstruction)
        else:
            sampling = self._sampling_loss(draw.log_probs, draw.masked_ids, loss_per_token.detach())
            loss = reconstruction + config.sampling_loss_weight * sampling
        return Output(
            loss, reconstruction, sampling, pred.detach(), loss_per_token,
            draw.log_probs, draw.visible_ids, draw.masked_ids,
        )  # fmt: skip

    def _sampling_loss(
        self, log_probs: Float[Tensor, "B N"], ids: Int[Tensor, "B M"], errors: Float[Tensor, "B M"]
    ) -> Float[Tensor, ""]:
        if self.config.sampling_objective == "ranking":
            return ranking_loss(log_probs, ids, errors)
        # P goes towards what is rewarded, in proportion (SPEC §4): errors that differ little leave it near uniform.
        reward = errors
        if self.config.sampling_baseline:
            reward = (errors - self.config.sampling_baseline * errors.mean(dim=1, keepdim=True)).clamp(min=0)
        return sampling_loss(log_probs, ids, reward)
