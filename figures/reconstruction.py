"""The paper's figure: frames, reconstructions, error, sampling probability and mask of a clip."""

import math
import textwrap
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from matplotlib import colormaps
from PIL import Image, ImageDraw
from torch import Tensor

from common.logging import escape
from figures.sheet import GAP, LINE, MIN_WIDTH, Layout, Row, draw_text, font, render_sheet
from model.config import ModelConfig
from model.maps import Maps
from pipeline.shards.arrays import to_rgb

VISIBLE, MASKED = 255, 0  # grays of the mask; white too are patches of the error map that are visible
MAX_COLUMNS = 16
OPACITY = 0.55  # of a map over the frames
COLORMAP = "plasma"  # ordered in grayscale, for any color vision, and stands out on gray frames
TRUE_STATS = "reconstruction\n(patch statistics\nfrom ground truth)"
VISIBLE_STATS = "reconstruction\n(statistics interpolated\nfrom visible patches)"
STATISTICS_NOTES = {  # by the label that each explains
    TRUE_STATS: "“Patch statistics from ground truth”: masked patches get their own mean and deviation (standard"
    " practice), so colors are correct even for an untrained model.",
    VISIBLE_STATS: "“Statistics interpolated from visible patches”: nothing is known of masked patches.",
}


def make_rows(maps: Maps, title: str = "") -> dict[str, Row]:
    """Make the rows of the first clip, by kind; `title` says which clip it is.

    `true_stats`, the reconstruction with patch statistics from ground truth, is missing where the model predicts raw
    pixels, both reconstructions where it predicts features, and `probability` where the masking strategy has none.
    """
    rows = {"frames": Row(title or "frames", _first(maps.frames))}
    if maps.reconstruction is not None and maps.visible_stats is None:
        rows["reconstruction"] = Row("reconstruction", _first(maps.reconstruction))
    elif maps.reconstruction is not None and maps.visible_stats is not None:
        found = _first(maps.reconstruction), _first(maps.visible_stats)
        rows["true_stats"] = Row(TRUE_STATS, found[0])
        rows["reconstruction"] = Row(VISIBLE_STATS, found[1])
    error = maps.error[0].cpu().numpy()
    rows["error"] = _map_row(f"error (mean {np.nanmean(error):.3f})", error, maps)
    if maps.probability is not None:
        times_uniform = maps.probability[0] * maps.probability[0].numel()
        rows["probability"] = _overlay("sampling probability\n(× uniform)", times_uniform, maps)
    is_masked = maps.is_masked[0].cpu().numpy()
    gray = np.where(is_masked, MASKED, VISIBLE).astype(np.uint8)[..., None]
    cells = np.repeat(to_rgb(gray), maps.frames.shape[1] // len(gray), axis=0)
    rows["mask"] = Row(f"mask\nmask ratio {is_masked.mean():.2f}", cells, is_map=True)
    features = maps.features[0].float()
    colors = np.repeat(color_features(features), maps.frames.shape[1] // len(features), axis=0)
    rows["features"] = Row("features (first three principal components)", colors, is_map=True)
    rows["similarity"] = _similarity_row(features, maps)
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


def _first(clips: UInt8[Tensor, "B T H W C"]) -> UInt8[np.ndarray, "T H W 3"]:
    return to_rgb(clips[0].cpu().numpy())


def render_figure(
    rows: Sequence[Row], config: ModelConfig, times: Sequence[float], min_width: int = MIN_WIDTH
) -> Image.Image:
    """Stack rows, a column per token frame, or per several of long clips, with the `times` of the frames (in seconds)
    below, a legend and a note."""
    columns = range(0, len(rows[0].cells), config.tubelet_size * math.ceil(config.grid[0] / MAX_COLUMNS))
    layout = Layout.fit(len(columns), max(row.aspect for row in rows), min_width)
    sheet, size = render_sheet(rows, columns, min_width), layout.font
    notes = textwrap.wrap(explain_figure(rows, config), width=int(sheet.width / size * 1.8))
    canvas = Image.new("RGB", (sheet.width, sheet.height + round(size * (3.6 + LINE * 1.1 * len(notes)))), "white")
    canvas.paste(sheet, (0, 0))
    for column, frame in enumerate(columns):
        left = layout.label + column * (layout.width + GAP)
        draw_text(canvas, (left, sheet.height), f"{times[frame]:.2f} s", size)
    _draw_legend(canvas, GAP, sheet.height + round(size * 1.7), size)
    draw_text(canvas, (GAP, sheet.height + round(size * 3.3)), "\n".join(notes), size)
    return canvas


def explain_figure(rows: Iterable[Row], config: ModelConfig) -> str:
    """Return what a reader has to know of the reconstructions that these rows show."""
    labels = " ".join(row.label for row in rows)
    notes = [note for label, note in STATISTICS_NOTES.items() if label in labels]
    if config.in_channels not in (1, 3):
        channels = "first three, as red, green and blue" if config.in_channels > 3 else "first"
        notes.append(f"Of {config.in_channels} channels, the frames show the {channels}.")
    return " ".join(notes)


def _draw_legend(canvas: Image.Image, x: int, y: int, size: int) -> None:
    draw = ImageDraw.Draw(canvas)
    for gray, meaning in ((VISIBLE, "visible"), (MASKED, "masked")):
        draw.rectangle((x, y, x + size, y + size), fill=(gray,) * 3, outline="black")
        x += round(1.5 * size)
        draw_text(canvas, (x, y - size // 8), meaning, size)
        x += round(draw.textlength(meaning, font=font(size))) + 2 * size
    ramp = colormaps[COLORMAP](np.linspace(0, 1, 8 * size), bytes=True)[None, :, :3].repeat(size, axis=0)
    canvas.paste(Image.fromarray(ramp), (x, y))
    draw_text(canvas, (x + round(8.5 * size), y - size // 8), "low to high, color scale normalized per row", size)


def color_features(features: Float[Tensor, "t h w D"]) -> UInt8[np.ndarray, "t h w 3"]:
    """Show the first three principal components of a clip's features as red, green and blue (as DINOv2)."""
    flat = features.flatten(0, 2) - features.mean(dim=(0, 1, 2))
    directions = torch.linalg.eigh(flat.T @ flat).eigenvectors[:, -3:].flip(1)
    directions = directions * directions.gather(0, directions.abs().argmax(dim=0, keepdim=True)).sign()
    projected = flat @ directions
    low, high = projected.quantile(torch.tensor([0.02, 0.98], device=flat.device), dim=0)
    colors = ((projected - low) / (high - low).clamp_min(1e-12)).clamp(0, 1) * 255
    return colors.to(torch.uint8).unflatten(0, features.shape[:3]).cpu().numpy()


def _similarity_row(features: Float[Tensor, "t h w D"], maps: Maps) -> Row:
    """Show how similar all tokens are to one of the middle token frame, which is boxed: the most probable one, or the
    center where there are no probabilities."""
    t, height, width = (side // 2 for side in features.shape[:3])
    if maps.probability is not None:
        height, width = divmod(int(maps.probability[0, t].argmax()), features.shape[2])
    centered = F.normalize(features - features.mean(dim=(0, 1, 2)), dim=-1)
    row = _overlay("similarity of features to the boxed token (cosine)", centered @ centered[t, height, width], maps)
    tubelet_size, side = len(row.cells) // len(features), row.cells.shape[1] // features.shape[1]
    for cell in row.cells[t * tubelet_size : (t + 1) * tubelet_size]:
        box = cell[height * side : (height + 1) * side, width * side : (width + 1) * side]
        for edge in (box[0], box[-1], box[:, 0], box[:, -1]):
            edge[:] = 255
    return row


def _overlay(label: str, values: Float[Tensor, "t h w"], maps: Maps) -> Row:
    """Color values, interpolated between tokens, over the frames in gray."""
    frames = _first(maps.frames)
    low, high = values.min().item(), values.max().item()
    fractions = F.interpolate(
        (values.float().cpu()[None] - low) / max(high - low, 1e-12), frames.shape[1:3], mode="bilinear"
    )
    colors = colormaps[COLORMAP](fractions[0].numpy())[..., :3] * 255
    colors = np.repeat(colors, len(frames) // len(colors), axis=0)
    cells = OPACITY * colors + (1 - OPACITY) * frames.mean(axis=3, keepdims=True)
    return Row(f"{label}\n{low:.2f} … {high:.2f}", cells.astype(np.uint8))


def _map_row(label: str, values: Float[np.ndarray, "t h w"], maps: Maps) -> Row:
    """Color values from blue (the lowest) to yellow (the highest); NaN is white. Token frames are repeated."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    fractions = (values - low) / max(high - low, 1e-12)
    colors = colormaps[COLORMAP](np.nan_to_num(fractions), bytes=True)[..., :3]
    colors[np.isnan(values)] = VISIBLE
    cells = np.repeat(colors, maps.frames.shape[1] // len(values), axis=0)
    return Row(f"{label}\n{low:.2f} … {high:.2f}", cells, is_map=True)
