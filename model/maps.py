"""Masks, reconstructions, errors and probabilities as maps over space and time, for figures, reports and notebooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adamae.common.errors import InputError
from adamae.kernels.gumbel_topk import LOGITS_NOT_FINITE
from adamae.kernels.patchify import gather_patches
from adamae.model.adamae import AdaMAE, Output
from adamae.model.channels import Clip, prepare_clip
from adamae.model.config import Grid, ModelConfig

EPSILON = 1e-6  # added to a patch's standard deviation, as in the target


class Maps(NamedTuple):
    """t, h, w: positions in the token grid."""

    frames: Clip
    # Visible patches as they are, masked ones as predicted; None where the model predicts features.
    reconstruction: Clip | None
    # The same with patch statistics interpolated from visible patches; None where the model predicts raw pixels, too.
    visible_stats: Clip | None
    error: Float[Tensor, "B t h w"]  # reconstruction loss of masked tokens; NaN where visible
    probability: Float[Tensor, "B t h w"] | None  # None where tokens have none of their own
    is_masked: Bool[Tensor, "B t h w"]
    features: Float[Tensor, "B t h w D"]  # of the encoder, on the whole clip


@contextmanager
def explain_bad_logits() -> Iterator[None]:
    """Raise InputError where the sampler's logits are not finite."""
    try:
        yield
    except RuntimeError as error:
        if LOGITS_NOT_FINITE not in str(error):
            raise
        said = "the sampler's logits are not finite: these weights are damaged, or from a run that diverged"
        raise InputError(said) from error


@explain_bad_logits()
@torch.no_grad()
def reconstruct(model: AdaMAE, clip: Clip, seed: int = 0) -> Maps:
    """Mask `clip` and predict the masked tokens.

    A model that predicts normalized patches knows neither their brightness nor their contrast. `reconstruction` takes
    both from the masked patch itself (standard practice), so colors are correct even for an untrained model;
    `visible_stats` interpolates them from the visible patches.
    """
    config, was_training = model.config, model.training
    try:
        output = model.eval()(clip, seed, 0)
        features = model.encode(clip).tokens
    finally:
        model.train(was_training)
    clip, visible, masked = prepare_clip(clip, config), output.visible_ids, output.masked_ids
    errors = output.loss_per_token
    error = errors.new_full((len(clip), config.num_tokens), torch.nan).scatter(1, masked, errors)
    is_masked = torch.ones_like(error, dtype=torch.bool).scatter(1, visible, False)
    shown = _reconstruct_pixels(clip, output, config) if model.target.is_pixels else (None, None)
    return Maps(
        frames=clip,
        reconstruction=shown[0],
        visible_stats=shown[1],
        error=error.unflatten(1, config.grid),
        probability=None
        if output.log_probs is None
        else output.log_probs.exp().unflatten(1, config.grid),
        is_masked=is_masked.unflatten(1, config.grid),
        features=features.unflatten(1, config.grid),
    )


def _reconstruct_pixels(
    clip: Clip, output: Output, config: ModelConfig
) -> tuple[Clip, Clip | None]:
    """Return `Maps.reconstruction` and `Maps.visible_stats`."""
    (t, h, w), patch = config.grid, config.patch_size
    patches = gather_patches(clip, None, config.tubelet_size, patch)
    visible, masked = output.visible_ids[..., None], output.masked_ids[..., None]
    pred = output.pred.float().unflatten(-1, (-1, config.in_channels))

    def fill_in(pred: Float[Tensor, "B M V C"]) -> Clip:
        """Put predictions, in [0, 1], in place of the masked patches, and join the patches to a clip."""
        pixels = (pred * 255).round().clamp(0, 255).to(torch.uint8)
        return rearrange(
            patches.scatter(1, masked[..., None].expand_as(pixels), pixels),
            "b (t h w) (pt ph pw) c -> b (t pt) (h ph) (w pw) c",
            t=t,
            h=h,
            w=w,
            ph=patch,
            pw=patch,
        )

    if not config.normalize_target:
        return fill_in(pred), None
    pixels = patches.float() / 255
    statistics = torch.cat((pixels.mean(dim=2), pixels.std(dim=2) + EPSILON), dim=2)
    known = statistics.take_along_dim(visible, dim=1)
    near = interpolate_from_visible(known, output.visible_ids, output.masked_ids, config.grid)
    (mean, std), (near_mean, near_std) = (
        values.unsqueeze(2).chunk(2, dim=3)
        for values in (statistics.take_along_dim(masked, dim=1), near)
    )
    return fill_in(pred * std + mean), fill_in(pred * near_std + near_mean)


def interpolate_from_visible(
    values: Float[Tensor, "B K C"],
    visible_ids: Int[Tensor, "B K"],
    masked_ids: Int[Tensor, "B M"],
    grid: Grid,
) -> Float[Tensor, "B M C"]:
    """Interpolate by the inverse of the squared distance in the token grid (Shepard 1968)."""
    places = torch.cartesian_prod(*map(torch.arange, grid)).float().to(values.device)
    weights = torch.cdist(places[masked_ids], places[visible_ids]).pow(
        -2
    )  # no distance is 0: no token is both
    return weights @ values / weights.sum(dim=2, keepdim=True)
