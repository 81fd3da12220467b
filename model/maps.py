"""Masks, reconstructions, errors and probabilities as maps over space and time.

For figures, reports and notebooks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from adamae.common.errors import InputError
from adamae.kernels.gumbel_topk import LOGITS_NOT_FINITE
from adamae.kernels.patchify import gather_patches
from adamae.model.adamae import AdaMAE, Output
from adamae.model.channels import Clip, prepare_clip
from adamae.model.config import Grid, ModelConfig

# Added to a patch's standard deviation, as in the target.
EPSILON = 1e-6


class Maps(NamedTuple):
    """Maps of B clips; t, h and w count the tokens of the grid."""

    # What the model sees of the clips.
    frames: Clip
    # Visible patches as they are, masked ones as predicted; None where the model predicts features.
    reconstruction: Clip | None
    # The same with patch statistics interpolated from visible patches; None where the model
    # predicts raw pixels, too.
    visible_stats: Clip | None
    # Reconstruction loss of masked tokens; NaN where visible.
    error: Float[Tensor, "B t h w"]
    # Sampling probability; None where tokens have none of their own.
    probability: Float[Tensor, "B t h w"] | None
    is_masked: Bool[Tensor, "B t h w"]
    # The encoder's, of the whole clip.
    features: Float[Tensor, "B t h w D"]


@contextmanager
def explain_bad_logits() -> Iterator[None]:
    """Raise InputError where the sampler's logits are not finite."""
    try:
        yield
    except RuntimeError as error:
        if LOGITS_NOT_FINITE not in str(error):
            raise
        raise InputError(
            "the sampler's logits are not finite: these weights are damaged, or from a run that"
            " diverged"
        ) from error


@explain_bad_logits()
@torch.no_grad()
def reconstruct(model: AdaMAE, clip: Clip, seed: int = 0) -> Maps:
    """Mask clips, predict the masked tokens, and encode the whole clips.

    A model that predicts normalized patches knows neither their brightness nor their contrast.
    `reconstruction` takes both from the masked patch itself (standard practice), so colors are
    correct even for an untrained model; `visible_stats` interpolates them from the visible patches.
    Raise InputError if the token sampler's logits are not finite.
    """
    config = model.config
    was_training = model.training
    try:
        output = model.eval()(clip, seed, 0)
        features = model.encode(clip).tokens
    finally:
        model.train(was_training)
    clip = prepare_clip(clip, config)
    losses = output.loss_per_token
    error = losses.new_full((len(clip), config.num_tokens), torch.nan)
    error = error.scatter(1, output.masked_ids, losses)
    is_masked = torch.ones_like(error, dtype=torch.bool).scatter(1, output.visible_ids, False)
    probability = None
    if output.log_probs is not None:
        probability = output.log_probs.exp().unflatten(1, config.grid)
    reconstruction = None
    visible_stats = None
    if model.target.is_pixels:
        reconstruction, visible_stats = _reconstruct_pixels(clip, output, config)
    return Maps(
        frames=clip,
        reconstruction=reconstruction,
        visible_stats=visible_stats,
        error=error.unflatten(1, config.grid),
        probability=probability,
        is_masked=is_masked.unflatten(1, config.grid),
        features=features.unflatten(1, config.grid),
    )


def _reconstruct_pixels(
    clip: Clip, output: Output, config: ModelConfig
) -> tuple[Clip, Clip | None]:
    """Return `Maps.reconstruction` and `Maps.visible_stats`."""
    patches = gather_patches(clip, None, config.tubelet_size, config.patch_size)
    pred = output.pred.float().unflatten(-1, (-1, config.in_channels))
    if not config.normalize_target:
        return _fill_in(pred, patches, output.masked_ids, config), None
    pixels = patches.float() / 255
    # Of all patches, [B, N, 2 C]: the mean of each channel, then its deviation.
    statistics = torch.cat((pixels.mean(dim=2), pixels.std(dim=2) + EPSILON), dim=2)
    visible = statistics.take_along_dim(output.visible_ids[..., None], dim=1)
    masked = statistics.take_along_dim(output.masked_ids[..., None], dim=1)
    interpolated = interpolate_from_visible(
        visible, output.visible_ids, output.masked_ids, config.grid
    )
    return (
        _fill_in(_denormalize(pred, masked), patches, output.masked_ids, config),
        _fill_in(_denormalize(pred, interpolated), patches, output.masked_ids, config),
    )


def _denormalize(
    pred: Float[Tensor, "B M V C"], statistics: Float[Tensor, "B M 2C"]
) -> Float[Tensor, "B M V C"]:
    """Give normalized patches of V pixels the mean and the deviation that `statistics` hold."""
    mean, std = statistics.unsqueeze(2).chunk(2, dim=3)
    return pred * std + mean


def _fill_in(
    pred: Float[Tensor, "B M V C"],
    patches: UInt8[Tensor, "B N V C"],
    masked_ids: Int[Tensor, "B M"],
    config: ModelConfig,
) -> Clip:
    """Replace the masked patches by predictions, in [0, 1], and join all patches to a clip."""
    pixels = (pred * 255).round().clamp(0, 255).to(torch.uint8)
    index = masked_ids[..., None, None].expand_as(pixels)
    t, h, w = config.grid
    return rearrange(
        patches.scatter(1, index, pixels),
        "b (t h w) (pt ph pw) c -> b (t pt) (h ph) (w pw) c",
        t=t,
        h=h,
        w=w,
        ph=config.patch_size,
        pw=config.patch_size,
    )


def interpolate_from_visible(
    values: Float[Tensor, "B K C"],
    visible_ids: Int[Tensor, "B K"],
    masked_ids: Int[Tensor, "B M"],
    grid: Grid,
) -> Float[Tensor, "B M C"]:
    """Interpolate by the inverse of the squared distance in the token grid (Shepard 1968).

    Visible tokens at distances of 1 and 2 from a masked one have 4 / 5 and 1 / 5 of the weight.
    """
    t, h, w = grid
    coordinates = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w))
    coordinates = coordinates.float().to(values.device)
    # No distance is 0: no token is both visible and masked.
    weights = torch.cdist(coordinates[masked_ids], coordinates[visible_ids]).pow(-2)
    return weights @ values / weights.sum(dim=2, keepdim=True)
