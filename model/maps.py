"""Masks, reconstructions, errors and probabilities as maps over space and time, for figures, reports and notebooks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from common.errors import InputError
from kernels.gumbel_topk import LOGITS_NOT_FINITE
from kernels.patchify import gather_patches
from model.adamae import AdaMAE, Output
from model.channels import prepare_clip
from model.config import Grid, ModelConfig

EPSILON = 1e-6  # added to a patch's standard deviation, as in the target


class Maps(NamedTuple):
    """t, h, w: positions in the token grid."""

    frames: UInt8[Tensor, "B T H W C"]
    # Visible patches as they are, masked ones as predicted; None where the model predicts features.
    reconstruction: UInt8[Tensor, "B T H W C"] | None
    # The same with patch statistics interpolated from visible patches; None where the model predicts raw pixels, too.
    visible_stats: UInt8[Tensor, "B T H W C"] | None
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
def reconstruct(model: AdaMAE, clip: UInt8[Tensor, "B T H W C"], seed: int = 0) -> Maps:
    """Mask `clip` and predict the masked tokens.

    A model that predicts normalized patches knows neither their brightness nor their contrast. `reconstruction` takes
    both from the masked patch itself (standard practice), so colors are correct even for an untrained model;
    `visible_stats` interpolates them from the visible patches.
    """
    config = model.config
    was_training = model.training
    try:
        output = model.eval()(clip, seed, 0)
        features = model.encode(clip).tokens.unflatten(1, config.grid)
    finally:
        model.train(was_training)
    clip, masked = prepare_clip(clip, config), output.masked_ids
    reconstruction = visible_stats = None
    if model.target.is_pixels:
        reconstruction, visible_stats = _reconstruct_pixels(clip, output, config)
    return Maps(
        frames=clip,
        reconstruction=reconstruction,
        visible_stats=visible_stats,
        error=_token_map(masked, output.loss_per_token, torch.nan, config.grid),
        probability=None if output.log_probs is None else output.log_probs.exp().unflatten(1, config.grid),
        is_masked=_token_map(masked, torch.ones_like(output.loss_per_token), 0, config.grid).bool(),
        features=features,
    )


def _reconstruct_pixels(
    clip: UInt8[Tensor, "B T H W C"], output: Output, config: ModelConfig
) -> tuple[UInt8[Tensor, "B T H W C"], UInt8[Tensor, "B T H W C"] | None]:
    """Return `Maps.reconstruction` and `Maps.visible_stats`."""
    visible, masked = output.visible_ids, output.masked_ids
    patches = gather_patches(clip, None, config.tubelet_size, config.patch_size)
    pred = output.pred.float().unflatten(-1, (-1, config.in_channels))
    visible_stats = None
    if config.normalize_target:
        rows = torch.arange(len(clip), device=clip.device)[:, None]
        pixels = patches.float() / 255
        mean, std = pixels.mean(dim=2), pixels.std(dim=2) + EPSILON
        near_mean, near_std = (
            interpolate_from_visible(values[rows, visible], visible, masked, config.grid) for values in (mean, std)
        )
        visible_stats = _fill_in(patches, pred * near_std[:, :, None] + near_mean[:, :, None], masked, config)
        pred = pred * std[rows, masked][:, :, None] + mean[rows, masked][:, :, None]
    return _fill_in(patches, pred, masked, config), visible_stats


def interpolate_from_visible(
    values: Float[Tensor, "B K C"], visible_ids: Int[Tensor, "B K"], masked_ids: Int[Tensor, "B M"], grid: Grid
) -> Float[Tensor, "B M C"]:
    """Interpolate by the inverse of the squared distance in the token grid (Shepard 1968)."""
    places = torch.stack(torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij"), dim=-1)
    places = places.flatten(0, 2).float().to(values.device)
    weights = torch.cdist(places[masked_ids], places[visible_ids]).pow(-2)  # no distance is 0: no token is both
    return weights @ values / weights.sum(dim=2, keepdim=True)


def _fill_in(
    patches: UInt8[Tensor, "B N V C"], pred: Float[Tensor, "B M V C"], masked_ids: Int[Tensor, "B M"],
    config: ModelConfig,
) -> UInt8[Tensor, "B T H W C"]:  # fmt: skip
    """Put predictions, in [0, 1], in place of the masked patches, and join the patches to a clip."""
    pixels = (pred * 255).round().clamp(0, 255).to(torch.uint8)
    (t, h, w), p = config.grid, config.patch_size
    return rearrange(
        patches.scatter(1, masked_ids[..., None, None].expand_as(pixels), pixels),
        "b (t h w) (pt ph pw) c -> b (t pt) (h ph) (w pw) c",
        t=t, h=h, w=w, pt=config.tubelet_size, ph=p, pw=p,
    )  # fmt: skip


def _token_map(ids: Tensor, values: Tensor, elsewhere: float, grid: Grid) -> Float[Tensor, "B t h w"]:
    """Put `values` at their tokens, and `elsewhere` at the others."""
    flat = values.new_full((len(ids), math.prod(grid)), elsewhere)
    return flat.scatter(1, ids, values).unflatten(1, grid)
