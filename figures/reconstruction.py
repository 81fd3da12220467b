"""The paper's figures: rows of frames and maps over a clip, rendered as an image or an animation."""

import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from matplotlib import colormaps, get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from model.config import ModelConfig
from model.maps import Maps

MIN_WIDTH = 1600  # pixels of a figure
MIN_CELL = 100  # pixels of a frame in it; where there are more frames, the figure becomes wider
GAP = 4
ANIMATED_CELL = 160
VISIBLE, MASKED = 255, 0  # grays of the mask; white too are patches of the error map that are visible
COLORMAP = "cividis"  # made for any color vision, and ordered in grayscale too (Nuñez et al. 2018)
STATISTICS_NOTE = (
    "“Patch statistics from ground truth”: masked patches get their own mean and deviation (standard practice), so"
    " colors are correct even for an untrained model. “Statistics interpolated from visible patches”: nothing is"
    " known of masked patches."
)


class Row(NamedTuple):
    label: str
    cells: UInt8[np.ndarray, "T h w 3"]  # one per frame of the clip: its pixels, or the tokens of a map
    is_map: bool = False


def figure_rows(maps: Maps) -> list[Row]:
    """Make the rows of the first clip: frames, reconstructions, error, sampling probability, mask."""
    rows = [frames_row(maps), *reconstruction_rows(maps), error_row(maps)]
    if maps.probability is not None:
        rows.append(probability_row(maps))
    return [*rows, mask_row(maps)]


def frames_row(maps: Maps) -> Row:
    return Row("frames", _to_rgb(maps.frames[0]))


def reconstruction_rows(maps: Maps) -> list[Row]:
    """Make one row, and a second one without ground truth where they differ."""
    if maps.visible_stats is None:
        return [Row("reconstruction", _to_rgb(maps.reconstruction[0]))]
    return [
        Row("reconstruction\n(patch statistics\nfrom ground truth)", _to_rgb(maps.reconstruction[0])),
        Row("reconstruction\n(statistics interpolated\nfrom visible patches)", _to_rgb(maps.visible_stats[0])),
    ]


def error_row(maps: Maps) -> Row:
    error = maps.error[0].cpu().numpy()
    low, high = float(np.nanmin(error)), float(np.nanmax(error))
    label = f"error\n{low:.2f} … {high:.2f}\nmean {np.nanmean(error):.3f}"
    return Row(label, _colorize(error, low, high, maps.frames.shape[1]), is_map=True)


def probability_row(maps: Maps) -> Row:
    if maps.probability is None:
        raise ValueError("this masking strategy has no probabilities")
    p = (maps.probability[0] * maps.probability[0].numel()).cpu().numpy()  # 1: the uniform probability
    low, high = float(p.min()), float(p.max())
    cells = _colorize(p, low, high, maps.frames.shape[1])
    return Row(f"sampling probability\n(× uniform)\n{low:.2f} … {high:.2f}", cells, is_map=True)


def mask_row(maps: Maps) -> Row:
    is_masked = maps.is_masked[0].cpu().numpy()
    gray = np.where(is_masked, MASKED, VISIBLE).astype(np.uint8)
    cells = _repeat_tubelets(np.stack([gray] * 3, -1), maps.frames.shape[1])
    return Row(f"mask\nmask ratio {is_masked.mean():.2f}", cells, is_map=True)


class Layout(NamedTuple):
    """Pixels of a figure."""

    width: int
    label: int  # for the text before a row
    cell: int
    font: int

    @classmethod
    def fit(cls, columns: int, min_width: int = MIN_WIDTH) -> "Layout":
        label, min_cell = min_width * 3 // 16, min_width * MIN_CELL // MIN_WIDTH
        cell = max(-(-(min_width - label) // columns) - GAP, min_cell)
        return cls(label + columns * (cell + GAP), label, cell, min_width // 80)


def render_figure(
    rows: Sequence[Row], config: ModelConfig, times: Sequence[float], min_width: int = MIN_WIDTH
) -> Image.Image:
    """Stack rows, a column per token frame, with the `times` of the frames (in seconds) below and a legend."""
    columns = range(0, len(rows[0].cells), config.tubelet_size)
    layout = Layout.fit(len(columns), min_width)
    lines = textwrap.wrap(explain_figure(config), width=int(layout.width / layout.font * 1.8))
    bottom = len(rows) * (layout.cell + GAP)
    height = bottom + round(layout.font * (3.6 + 1.35 * len(lines)))
    canvas = Image.new("RGB", (layout.width, height), "white")
    for number, row in enumerate(rows):
        top = number * (layout.cell + GAP)
        _write(canvas, (GAP, top + GAP), row.label, layout.font)
        for column, frame in enumerate(columns):
            canvas.paste(render_cell(row, frame, layout.cell), (layout.label + column * (layout.cell + GAP), top))
    for column, frame in enumerate(columns):
        _write(canvas, (layout.label + column * (layout.cell + GAP), bottom), f"{times[frame]:.2f} s", layout.font)
    _write_legend(canvas, (GAP, bottom + round(layout.font * 1.7)), layout.font)
    _write(canvas, (GAP, bottom + round(layout.font * 3.3)), "\n".join(lines), layout.font)
    return canvas


def render_animation(rows: Sequence[Row]) -> list[Image.Image]:
    """Place rows side by side, one image per frame."""
    font, side = 12, ANIMATED_CELL
    head = round(font * 1.35 * max(row.label.count("\n") + 1 for row in rows)) + GAP
    images = []
    for frame in range(len(rows[0].cells)):
        canvas = Image.new("RGB", (len(rows) * (side + GAP) + GAP, head + side + GAP), "white")
        for number, row in enumerate(rows):
            left = GAP + number * (side + GAP)
            _write(canvas, (left, 2), row.label, font)
            canvas.paste(render_cell(row, frame, side), (left, head))
        images.append(canvas)
    return images


def render_cell(row: Row, frame: int, side: int) -> Image.Image:
    """Scale a cell to a square of `side` pixels; tokens keep their edges."""
    resampling = Image.Resampling.NEAREST if row.is_map else Image.Resampling.BICUBIC
    return Image.fromarray(row.cells[frame]).resize((side, side), resampling)


def explain_figure(config: ModelConfig) -> str:
    """Return what a reader of the figure has to know of its reconstructions."""
    notes = [STATISTICS_NOTE] if config.normalize_target else []
    if config.in_channels not in (1, 3):
        channels = "first three, as red, green and blue" if config.in_channels > 3 else "first"
        notes.append(f"Of {config.in_channels} channels, the frames show the {channels}.")
    return " ".join(notes)


def _write_legend(canvas: Image.Image, corner: tuple[int, int], size: int) -> None:
    draw = ImageDraw.Draw(canvas)
    x, y = corner
    for gray, meaning in ((VISIBLE, "visible"), (MASKED, "masked")):
        draw.rectangle((x, y, x + size, y + size), fill=(gray,) * 3, outline="black")
        x += round(1.5 * size)
        _write(canvas, (x, y - size // 8), meaning, size)
        x += round(draw.textlength(meaning, font=_font(size))) + 2 * size
    ramp = colormaps[COLORMAP](np.linspace(0, 1, 8 * size), bytes=True)[None, :, :3].repeat(size, axis=0)
    canvas.paste(Image.fromarray(ramp), (x, y))
    _write(canvas, (x + round(8.5 * size), y - size // 8), "low to high, color scale normalized per row", size)


def _write(canvas: Image.Image, corner: tuple[int, int], text: str, size: int) -> None:
    ImageDraw.Draw(canvas).multiline_text(corner, text, fill="black", font=_font(size), spacing=2)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size=size)  # Pillow's own lacks ×


def _to_rgb(clip: UInt8[Tensor, "T H W C"]) -> UInt8[np.ndarray, "T H W 3"]:
    """Show gray as gray; of other channels than RGB's, the first three, or the first."""
    rgb = clip[..., :3] if clip.shape[-1] >= 3 else clip[..., :1].expand(-1, -1, -1, 3)
    return rgb.cpu().numpy()


def _colorize(
    values: Float[np.ndarray, "t h w"], low: float, high: float, num_frames: int
) -> UInt8[np.ndarray, "T h w 3"]:
    """Map `low` to dark blue, `high` to yellow, NaN to white."""
    fraction = (values - low) / max(high - low, 1e-12)
    colors = colormaps[COLORMAP](np.nan_to_num(fraction), bytes=True)[..., :3]
    return _repeat_tubelets(np.where(np.isnan(values)[..., None], np.uint8(VISIBLE), colors), num_frames)


def _repeat_tubelets(tokens: UInt8[np.ndarray, "t h w 3"], num_frames: int) -> UInt8[np.ndarray, "T h w 3"]:
    """Repeat a token frame for all its video frames."""
    return np.repeat(tokens, num_frames // len(tokens), axis=0)
