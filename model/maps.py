"""What a model makes of a clip, as maps over space and time: for figures, reports and notebooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from common.errors import InputError
from kernels.gumbel_topk import NOTHING_TO_DRAW
from model.adamae import AdaMAE
from model.channels import adapt_channels
from model.config import ModelConfig

EPSILON = 1e-6  # added to a patch's standard deviation, as in the target (SPEC §4)


class Maps(NamedTuple):
    """t, h, w: places in the token grid."""

    frames: UInt8[Tensor, "B T H W C"]
    reconstruction: UInt8[Tensor, "B T H W C"]  # visible patches as they are, masked ones as predicted
    # The same without a look at what is hidden; None where the model predicts pixels, and the first is that already.
    honest: UInt8[Tensor, "B T H W C"] | None
    error: Float[Tensor, "B t h w"]  # reconstruction loss of masked tokens; NaN where visible
    probability: Float[Tensor, "B t h w"] | None  # at a sharpness of 1; None where tokens have none of their own
    is_masked: Bool[Tensor, "B t h w"]
    sharpness: float = 1.0  # with which tokens were drawn


@contextmanager
def damage_explained() -> Iterator[None]:
    """Raises InputError where a model has nothing to draw tokens by."""
    try:
        yield
    except RuntimeError as error:
        if NOTHING_TO_DRAW not in str(error):
            raise
        said = "the sampler's logits are not finite: these weights are damaged, or of a run that has diverged"
        raise InputError(said) from error


@damage_explained()
@torch.no_grad()
def reconstruct(model: AdaMAE, clip: UInt8[Tensor, "B T H W C"], seed: int = 0) -> Maps:
    """Mask `clip` once and predict what is hidden.

    A model that predicts normalised patches knows neither their brightness nor their contrast. `reconstruction` takes
    both from the hidden patch itself, as the field's figures do: colours are right even where nothing has been learnt.
    `honest` predicts them from the visible patches around.
    """
    config = model.config
    clip = adapt_channels(clip, config.in_channels)
    was_training = model.training
    try:
        output = model.eval()(clip, seed, 0)
    finally:
        model.train(was_training)
    patches = to_patches(clip, config.tubelet_size, config.patch_size)
    pred = output.pred.float().unflatten(-1, (-1, config.in_channels))
    honest = None
    if config.normalize_target:
        rows = torch.arange(len(clip), device=clip.device)[:, None]
        scaled = patches.float() / 255
        mean, deviation = scaled.mean(dim=2), scaled.std(dim=2) + EPSILON
        shown = [statistic[rows, output.visible_ids] for statistic in (mean, deviation)]
        guessed = [from_neighbours(s, output.visible_ids, output.masked_ids, config.grid) for s in shown]
        honest = _completed(patches, _coloured(pred, *guessed), output.masked_ids, config)
        pred = _coloured(pred, mean[rows, output.masked_ids], deviation[rows, output.masked_ids])
    return Maps(
        frames=clip,
        reconstruction=_completed(patches, pred, output.masked_ids, config),
        honest=honest,
        error=_grid_of(output.masked_ids, output.loss_per_token, torch.nan, config.grid),
        probability=None if output.log_probs is None else output.log_probs.exp().unflatten(1, config.grid),
        is_masked=_grid_of(output.masked_ids, torch.ones_like(output.loss_per_token), 0, config.grid).bool(),
        sharpness=config.sampling_sharpness,
    )


def from_neighbours(
    values: Float[Tensor, "B K C"],
    visible_ids: Int[Tensor, "B K"],
    masked_ids: Int[Tensor, "B M"],
    grid: tuple[int, int, int],
) -> Float[Tensor, "B M C"]:
    """Interpolate by the inverse of the squared distance in the token grid (Shepard 1968): nothing to learn or set."""
    places = torch.stack(torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij"), dim=-1)
    places = places.flatten(0, 2).float().to(values.device)
    weights = torch.cdist(places[masked_ids], places[visible_ids]).pow(-2)  # no distance is 0: no token is both
    return weights @ values / weights.sum(dim=2, keepdim=True)


def _coloured(
    pred: Float[Tensor, "B M V C"], mean: Float[Tensor, "B M C"], deviation: Float[Tensor, "B M C"]
) -> Float[Tensor, "B M V C"]:
    return pred * deviation[:, :, None] + mean[:, :, None]


def _completed(
    patches: UInt8[Tensor, "B N V C"],
    pred: Float[Tensor, "B M V C"],
    masked_ids: Int[Tensor, "B M"],
    config: ModelConfig,
) -> UInt8[Tensor, "B T H W C"]:
    """The clip with predictions, in [0, 1], where it was masked."""
    pixels = (pred * 255).round().clamp(0, 255).to(torch.uint8)
    shown = patches.scatter(1, masked_ids[..., None, None].expand_as(pixels), pixels)
    return from_patches(shown, config.grid, config.tubelet_size, config.patch_size)


def to_patches(clip: UInt8[Tensor, "B T H W C"], tubelet_size: int, patch_size: int) -> UInt8[Tensor, "B N V C"]:
    """V: the pixels of a patch, in (t, h, w) order."""
    return rearrange(
        clip, "b (t pt) (h ph) (w pw) c -> b (t h w) (pt ph pw) c", pt=tubelet_size, ph=patch_size, pw=patch_size
    )


def from_patches(
    patches: UInt8[Tensor, "B N V C"], grid: tuple[int, int, int], tubelet_size: int, patch_size: int
) -> UInt8[Tensor, "B T H W C"]:
    t, h, w = grid
    return rearrange(
        patches, "b (t h w) (pt ph pw) c -> b (t pt) (h ph) (w pw) c",
        t=t, h=h, w=w, pt=tubelet_size, ph=patch_size, pw=patch_size,
    )  # fmt: skip


def _grid_of(ids: Tensor, values: Tensor, elsewhere: float, grid: tuple[int, int, int]) -> Tensor:
    """`values` at their tokens and `elsewhere` at the others, [B, t, h, w]."""
    time, height, width = grid
    flat = values.new_full((len(ids), time * height * width), elsewhere)
    return flat.scatter(1, ids, values).unflatten(1, grid)
