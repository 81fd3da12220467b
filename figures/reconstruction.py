"""The paper's figure: frames, reconstructions, error, sampling probability, mask and features of a clip."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from matplotlib import colormaps
from PIL import Image
from torch import Tensor

from adamae.common.logging import escape
from adamae.figures.sheet import MIN_WIDTH, Layout, Row, render_sheet
from adamae.model.config import ModelConfig
from adamae.model.maps import Maps
from adamae.pipeline.shards.arrays import to_rgb

VISIBLE, MASKED = (
    255,
    0,
)  # grays of the mask; white too are patches of the error map that are visible
MAX_COLUMNS = 16
OPACITY = 0.55  # of a map over the frames
COLORMAP = "plasma"  # ordered in grayscale, for any color vision, and stands out on gray frames


def make_rows(maps: Maps, title: str = "") -> dict[str, Row]:
    """Make the rows of the first clip, by kind; `title` says which clip it is.

    `true_stats`, the reconstruction with patch statistics from ground truth (standard practice: colors are correct even
    for an untrained model), is missing where the model predicts raw pixels, both reconstructions where it predicts
    features, and `probability` where the masking strategy has none.
    """
    frames, channels = _first(maps.frames), maps.frames.shape[-1]
    note = (
        "" if channels in (1, 3) else f"\n(first {3 if channels > 3 else 1} of {channels} channels)"
    )
    rows = {"frames": Row((title or "frames") + note, frames)}
    if maps.reconstruction is not None and maps.visible_stats is None:
        rows["reconstruction"] = Row("reconstruction", _first(maps.reconstruction))
    elif maps.reconstruction is not None and maps.visible_stats is not None:
        found = _first(maps.reconstruction), _first(maps.visible_stats)
        rows["true_stats"] = Row("reconstruction\n(patch statistics\nfrom ground truth)", found[0])
        rows["reconstruction"] = Row(
            "reconstruction\n(statistics interpolated\nfrom visible patches)", found[1]
        )
    error = maps.error[0].cpu().numpy()
    rows["error"] = _map_row(f"error (mean {np.nanmean(error):.3f})", error, len(frames))
    if maps.probability is not None:
        times_uniform = maps.probability[0].float().cpu() * maps.probability[0].numel()
        pixels = F.interpolate(times_uniform[None], frames.shape[1:3], mode="bilinear")[0].numpy()
        row = _map_row("sampling probability\n(× uniform)", pixels, len(frames))
        over_frames = OPACITY * row.cells + (1 - OPACITY) * frames.mean(axis=3, keepdims=True)
        rows["probability"] = Row(row.label, over_frames.astype(np.uint8))
    is_masked = maps.is_masked[0].cpu().numpy()
    gray = np.where(is_masked, MASKED, VISIBLE).astype(np.uint8)[..., None]
    label = f"mask (white: visible)\nmask ratio {is_masked.mean():.2f}"
    rows["mask"] = Row(label, _spread(to_rgb(gray), len(frames)), is_map=True)
    colors = _spread(color_features(maps.features[0].float()), len(frames))
    rows["features"] = Row("features (first three principal components)", colors, is_map=True)
    return rows


def comparison_rows(named_maps: Iterable[tuple[str, Maps]], title: str = "") -> list[Row]:
    """Make the rows of one clip as several models, or one model with several masks, see it."""
    rows: list[Row] = []
    for name, maps in named_maps:
        own = make_rows(maps, title)
        rows = rows or [own["frames"]]
        kinds = [kind for kind in ("probability", "mask", "reconstruction", "error") if kind in own]
        rows += [own[kind]._replace(label=f"{escape(name)}:\n{own[kind].label}") for kind in kinds]
    return rows


def render_figure(
    rows: Sequence[Row], config: ModelConfig, times: Sequence[float], min_width: int = MIN_WIDTH
) -> Image.Image:
    """Stack rows, a column per token frame, or per several of long clips, with the `times` of the frames (in seconds)
    below."""
    columns = range(
        0, len(rows[0].cells), config.tubelet_size * math.ceil(config.grid[0] / MAX_COLUMNS)
    )
    layout = Layout.fit(rows, len(columns), min_width)
    return render_sheet(rows, columns, layout, [f"{times[frame]:.2f} s" for frame in columns])


def color_features(features: Float[Tensor, "t h w D"]) -> UInt8[np.ndarray, "t h w 3"]:
    """Show the first three principal components of a clip's features as red, green and blue (as DINOv2)."""
    flat = features.flatten(0, 2) - features.mean(dim=(0, 1, 2))
    directions = torch.linalg.eigh(flat.T @ flat).eigenvectors[:, -3:].flip(1)
    directions = (
        directions * directions.gather(0, directions.abs().argmax(dim=0, keepdim=True)).sign()
    )
    projected = flat @ directions
    low, high = projected.quantile(torch.tensor([0.02, 0.98], device=flat.device), dim=0)
    colors = ((projected - low) / (high - low).clamp_min(1e-12)).clamp(0, 1) * 255
    return colors.to(torch.uint8).unflatten(0, features.shape[:3]).cpu().numpy()


def _first(clips: UInt8[Tensor, "B T H W C"]) -> UInt8[np.ndarray, "T H W 3"]:
    return to_rgb(clips[0].cpu().numpy())


def _map_row(label: str, values: Float[np.ndarray, "t h w"], num_frames: int) -> Row:
    """Color values from blue (the lowest) to yellow (the highest); NaN is white."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    fractions = (values - low) / max(high - low, 1e-12)
    colors = colormaps[COLORMAP](np.nan_to_num(fractions), bytes=True)[..., :3]
    colors[np.isnan(values)] = VISIBLE
    return Row(
        f"{label}\nblue {low:.2f} … yellow {high:.2f}", _spread(colors, num_frames), is_map=True
    )


def _spread(cells: UInt8[np.ndarray, "t h w 3"], num_frames: int) -> UInt8[np.ndarray, "T h w 3"]:
    """Repeat what is of a token frame for each of its frames."""
    return np.repeat(cells, num_frames // len(cells), axis=0)
