"""The paper's figure: rows of frames, reconstructions and maps of a clip."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from matplotlib import colormaps
from PIL import Image
from torch import Tensor

from adamae.common.arithmetic import ceil_div
from adamae.common.logging import escape
from adamae.figures.sheet import MIN_WIDTH, Layout, Row, render_sheet
from adamae.model.config import ModelConfig
from adamae.model.maps import Maps
from adamae.pipeline.shards.arrays import to_rgb

# Grays of the mask. Visible patches of the error map are white, too: they have no error.
VISIBLE = 255
MASKED = 0
MAX_COLUMNS = 16
# Of a map over the frames.
OPACITY = 0.55
# Its order survives in grayscale and for any color vision, and it stands out on gray frames.
COLORMAP = "plasma"
# So many clips tell content from positions: of four, a clip's own features lose a quarter.
MIN_CLIPS = 4


def make_rows(
    maps: Maps, title: str = "", position_means: Float[Tensor, "t h w D"] | None = None
) -> dict[str, Row]:
    """Return the rows of the first clip, by kind; `title` says which clip it is.

    position_means: of `average_positions`; without it, the features are shown with their positions.

    `true_stats` is the reconstruction with patch statistics from ground truth, as is standard
    practice: its colors are correct even for an untrained model. It is missing where the model
    predicts raw pixels, both reconstructions where it predicts features, and `probability` where
    the masking strategy has none.
    """
    frames = _first(maps.frames)
    num_channels = maps.frames.shape[-1]
    caption = title or "frames"
    if num_channels not in (1, 3):
        num_shown = 3 if num_channels > 3 else 1
        caption += f"\n(first {num_shown} of {num_channels} channels)"
    rows = {"frames": Row(caption, frames)}
    if maps.reconstruction is not None:
        reconstruction = _first(maps.reconstruction)
        if maps.visible_stats is None:
            rows["reconstruction"] = Row("reconstruction", reconstruction)
        else:
            label = "reconstruction\n(patch statistics\nfrom ground truth)"
            rows["true_stats"] = Row(label, reconstruction)
            label = "reconstruction\n(statistics interpolated\nfrom visible patches)"
            rows["reconstruction"] = Row(label, _first(maps.visible_stats))
    error = maps.error[0].cpu().numpy()
    rows["error"] = _map_row(f"error (mean {np.nanmean(error):.3f})", error, len(frames))
    if maps.probability is not None:
        rows["probability"] = _probability_row(maps.probability[0], frames)
    is_masked = maps.is_masked[0].cpu().numpy()
    grays = np.where(is_masked, MASKED, VISIBLE).astype(np.uint8)[..., None]
    label = f"mask (white: visible)\nmask ratio {is_masked.mean():.2f}"
    rows["mask"] = Row(label, _repeat(to_rgb(grays), len(frames)), is_map=True)
    features = maps.features[0].float()
    label = "features\n(first three principal\ncomponents)"
    if position_means is not None:
        features = features - position_means
        label = "features, less the mean\nof each position (first three\nprincipal components)"
    colors = _repeat(color_features(features), len(frames))
    rows["features"] = Row(label, colors, is_map=True)
    return rows


def average_positions(all_maps: Sequence[Maps]) -> Float[Tensor, "t h w D"] | None:
    """Average the features of each position over the first clips of several maps.

    What all clips have in common at a position is the position. It is the largest part of what an
    encoder says of a token: with it, colors form the same wheel in every clip. Return None for
    fewer than MIN_CLIPS, whose mean is mostly the clips themselves.
    """
    if len(all_maps) < MIN_CLIPS:
        return None
    features = [maps.features[0].float() for maps in all_maps]
    return torch.stack(features).mean(dim=0)


def comparison_rows(named_maps: Iterable[tuple[str, Maps]], title: str = "") -> list[Row]:
    """Return the rows of one clip for several models, or for one model with several masks."""
    rows: list[Row] = []
    for name, maps in named_maps:
        own_rows = make_rows(maps, title)
        # All models have the same frames.
        if not rows:
            rows.append(own_rows["frames"])
        for kind in ("probability", "mask", "reconstruction", "error"):
            row = own_rows.get(kind)
            if row is not None:
                rows.append(row._replace(label=f"{escape(name)}:\n{row.label}"))
    return rows


def render_figure(
    rows: Sequence[Row], config: ModelConfig, times: Sequence[float], min_width: int = MIN_WIDTH
) -> Image.Image:
    """Stack rows, with the `times` of the frames (in seconds) below.

    A column is a token frame or, of long clips, several: with 2 frames per token frame, 64 frames
    are 32 token frames, and every second one has a column.
    """
    tokens_per_column = ceil_div(config.grid[0], MAX_COLUMNS)
    columns = range(0, len(rows[0].cells), config.tubelet_size * tokens_per_column)
    layout = Layout.fit(rows, len(columns), min_width)
    return render_sheet(rows, columns, layout, [f"{times[frame]:.2f} s" for frame in columns])


def color_features(features: Float[Tensor, "t h w D"]) -> UInt8[np.ndarray, "t h w 3"]:
    """Show the first three principal components of a clip's features as red, green and blue.

    As in figure 1 of DINOv2 (arXiv:2304.07193), without its removal of the background.
    """
    flat = features.flatten(0, 2) - features.mean(dim=(0, 1, 2))
    # Eigenvalues ascend: the last three vectors belong to the largest ones.
    directions = torch.linalg.eigh(flat.T @ flat).eigenvectors[:, -3:].flip(1)
    # The sign of an eigenvector is arbitrary. A positive largest entry makes colors reproducible.
    index_largest = directions.abs().argmax(dim=0, keepdim=True)
    signs = directions.gather(0, index_largest).sign()
    projected = flat @ (directions * signs)
    # The outermost 2 % at each end are clamped, so that outliers do not pale all other colors.
    quantiles = torch.tensor([0.02, 0.98], device=flat.device)
    low, high = projected.quantile(quantiles, dim=0)
    fractions = (projected - low) / (high - low).clamp_min(1e-12)
    colors = (fractions.clamp(0, 1) * 255).to(torch.uint8)
    return colors.unflatten(0, features.shape[:3]).cpu().numpy()


def _first(clips: UInt8[Tensor, "B T H W C"]) -> UInt8[np.ndarray, "T H W 3"]:
    return to_rgb(clips[0].cpu().numpy())


def _probability_row(
    probability: Float[Tensor, "t h w"], frames: UInt8[np.ndarray, "T H W 3"]
) -> Row:
    """Return the sampling probability as colors over the frames in gray."""
    times_uniform = probability.float().cpu() * probability.numel()
    # Tokens become pixels, as smooth as the frames that they lie over.
    pixels = F.interpolate(times_uniform[None], frames.shape[1:3], mode="bilinear")[0].numpy()
    row = _map_row("sampling probability\n(× uniform)", pixels, len(frames))
    gray_frames = frames.mean(axis=3, keepdims=True)
    cells = OPACITY * row.cells + (1 - OPACITY) * gray_frames
    return Row(row.label, cells.astype(np.uint8))


def _map_row(label: str, values: Float[np.ndarray, "t h w"], num_frames: int) -> Row:
    """Color values from blue (the lowest) to yellow (the highest); NaN is white."""
    low = float(np.nanmin(values))
    high = float(np.nanmax(values))
    # Equal values, of an untrained sampler for example, are all blue.
    fractions = (values - low) / max(high - low, 1e-12)
    colors = colormaps[COLORMAP](np.nan_to_num(fractions), bytes=True)[..., :3]
    colors[np.isnan(values)] = VISIBLE
    label = f"{label}\nblue {low:.2f} … yellow {high:.2f}"
    return Row(label, _repeat(colors, num_frames), is_map=True)


def _repeat(cells: UInt8[np.ndarray, "t h w 3"], num_frames: int) -> UInt8[np.ndarray, "T h w 3"]:
    """Repeat the cells of a token frame for each of its frames."""
    return np.repeat(cells, num_frames // len(cells), axis=0)
