"""The paper's figures: rows of maps over the frames of a clip, as a picture or an animation."""

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

WIDTH = 1600  # pixels of a picture, at least
LEAST_CELL = 100  # pixels of a frame; where there are more of them, the picture becomes wider
GAP = 4
ANIMATED_CELL = 160
SHOWN, HIDDEN = 255, 0  # greys of the mask; white too is a patch of a map that has no value, for it was shown
COLOURS = "cividis"  # made to look alike with any colour vision, and to be ordered in grey too (Nuñez et al. 2018)
OWN_STATISTICS = (
    "“reconstruction” takes brightness and contrast of every hidden patch from the hidden patch itself, as is the"
    " custom: a model that has learnt nothing shows the right colours too. “honest” predicts both from visible patches"
    " around."
)


class Row(NamedTuple):
    label: str
    cells: UInt8[np.ndarray, "T h w 3"]  # one for each frame of the clip: its pixels, or the tokens of a map
    is_map: bool = False


def figure_rows(maps: Maps, clip: int = 0) -> list[Row]:
    """Frames, reconstructions, error, probability, mask (black = hidden) of one clip (SPEC §9)."""
    rows = [frames_row(maps, clip), *reconstruction_rows(maps, clip), error_row(maps, clip)]
    if maps.probability is not None:
        rows.append(probability_row(maps, clip))
    return [*rows, mask_row(maps, clip)]


def frames_row(maps: Maps, clip: int = 0) -> Row:
    return Row("frames", _pixels(maps.frames[clip]))


def reconstruction_rows(maps: Maps, clip: int = 0) -> list[Row]:
    """One, and the honest one where they differ."""
    if maps.honest is None:
        return [Row("reconstruction", _pixels(maps.reconstruction[clip]))]
    return [
        Row("reconstruction\nown mean and contrast", _pixels(maps.reconstruction[clip])),
        Row("honest\nthose of neighbours", _pixels(maps.honest[clip])),
    ]


def error_row(maps: Maps, clip: int = 0) -> Row:
    error = maps.error[clip].cpu().numpy()
    low, high = float(np.nanmin(error)), float(np.nanmax(error))
    label = f"error\n{low:.2f} … {high:.2f}\nmean {np.nanmean(error):.3f}"
    return Row(label, _map_cells(error, low, high, maps.frames.shape[1]), is_map=True)


def probability_row(maps: Maps, clip: int = 0) -> Row:
    if maps.probability is None:
        raise ValueError("this masking has no probabilities")
    # In multiples of the uniform probability: 1 is what a sampler that has learnt nothing gives every token.
    p = (maps.probability[clip] * maps.probability[clip].numel()).cpu().numpy()
    low, high = float(p.min()), float(p.max())
    drawn = "" if maps.sharpness == 1 else f"\nof γ 1; drawn at {maps.sharpness:g}"
    cells = _map_cells(p, low, high, maps.frames.shape[1])
    return Row(f"probability × N\n{low:.2f} … {high:.2f}{drawn}", cells, is_map=True)


def mask_row(maps: Maps, clip: int = 0) -> Row:
    is_masked = maps.is_masked[clip].cpu().numpy()
    white = np.where(is_masked, HIDDEN, SHOWN).astype(np.uint8)
    return Row(
        f"mask\n{is_masked.mean():.0%} hidden", _over_time(np.stack([white] * 3, -1), maps.frames.shape[1]), is_map=True
    )


class Layout(NamedTuple):
    """Pixels of a picture of rows."""

    width: int
    label: int  # for the text before a row
    cell: int
    font: int

    @classmethod
    def of(cls, columns: int, least_width: int = WIDTH) -> "Layout":
        label, least_cell = least_width * 3 // 16, least_width * LEAST_CELL // WIDTH
        cell = max(-(-(least_width - label) // columns) - GAP, least_cell)
        return cls(label + columns * (cell + GAP), label, cell, least_width // 80)


def picture(
    rows: Sequence[Row], frame_step: int, times: Sequence[float], note: str = "", least_width: int = WIDTH
) -> Image.Image:
    """Rows below each other, every `frame_step`-th frame a column; of the tubelet's size: one column a token frame.

    `times`: seconds of each frame in its video, which stand below the columns.
    """
    columns = range(0, len(rows[0].cells), frame_step)
    layout = Layout.of(len(columns), least_width)
    lines = textwrap.wrap(note, width=int(layout.width / layout.font * 1.8))
    bottom = len(rows) * (layout.cell + GAP)
    height = bottom + round(layout.font * (3.6 + 1.35 * len(lines)))
    canvas = Image.new("RGB", (layout.width, height), "white")
    for number, row in enumerate(rows):
        top = number * (layout.cell + GAP)
        _write(canvas, (GAP, top + GAP), row.label, layout.font)
        for column, frame in enumerate(columns):
            canvas.paste(_cell(row, frame, layout.cell), (layout.label + column * (layout.cell + GAP), top))
    for column, frame in enumerate(columns):
        _write(canvas, (layout.label + column * (layout.cell + GAP), bottom), f"{times[frame]:.2f} s", layout.font)
    _write_legend(canvas, (GAP, bottom + round(layout.font * 1.7)), layout.font)
    _write(canvas, (GAP, bottom + round(layout.font * 3.3)), "\n".join(lines), layout.font)
    return canvas


def animation(rows: Sequence[Row]) -> list[Image.Image]:
    """Rows beside each other, playing."""
    font, side = 12, ANIMATED_CELL
    head = round(font * 1.35 * max(row.label.count("\n") + 1 for row in rows)) + GAP
    frames = []
    for frame in range(len(rows[0].cells)):
        canvas = Image.new("RGB", (len(rows) * (side + GAP) + GAP, head + side + GAP), "white")
        for number, row in enumerate(rows):
            left = GAP + number * (side + GAP)
            _write(canvas, (left, 2), row.label, font)
            canvas.paste(_cell(row, frame, side), (left, head))
        frames.append(canvas)
    return frames


def scaled(row: Row, side: int) -> list[UInt8[np.ndarray, "side side 3"]]:
    """The cells of a row as squares of `side` pixels."""
    return [np.asarray(_cell(row, frame, side)) for frame in range(len(row.cells))]


def _cell(row: Row, frame: int, side: int) -> Image.Image:
    """Tokens stay squares with edges."""
    way = Image.Resampling.NEAREST if row.is_map else Image.Resampling.BICUBIC
    return Image.fromarray(row.cells[frame]).resize((side, side), way)


def _write_legend(canvas: Image.Image, place: tuple[int, int], size: int) -> None:
    """What black, white and the colours stand for."""
    draw = ImageDraw.Draw(canvas)
    x, y = place
    for colour, meaning in ((SHOWN, "shown, so not predicted"), (HIDDEN, "hidden")):
        draw.rectangle((x, y, x + size, y + size), fill=(colour,) * 3, outline="black")
        x += round(1.5 * size)
        _write(canvas, (x, y - size // 8), meaning, size)
        x += round(draw.textlength(meaning, font=_font(size))) + 2 * size
    ramp = colormaps[COLOURS](np.linspace(0, 1, 8 * size), bytes=True)[None, :, :3].repeat(size, axis=0)
    canvas.paste(Image.fromarray(ramp), (x, y))
    _write(
        canvas, (x + round(8.5 * size), y - size // 8), "low to high, each row from its own least to its own most", size
    )


def _write(canvas: Image.Image, place: tuple[int, int], text: str, size: int) -> None:
    ImageDraw.Draw(canvas).multiline_text(place, text, fill="black", font=_font(size), spacing=2)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size=size)  # Pillow's own lacks ×


def _pixels(clip: UInt8[Tensor, "T H W C"]) -> UInt8[np.ndarray, "T H W 3"]:
    """Grey as grey; of other channels than RGB's, the first three, or the first."""
    shown = clip[..., :3] if clip.shape[3] >= 3 else clip[..., :1].expand(-1, -1, -1, 3)
    return shown.cpu().numpy()


def _map_cells(
    values: Float[np.ndarray, "t h w"], low: float, high: float, num_frames: int
) -> UInt8[np.ndarray, "T h w 3"]:
    """Dark blue for `low`, yellow for `high`, white for NaN."""
    share = (values - low) / max(high - low, 1e-12)
    colours = colormaps[COLOURS](np.nan_to_num(share), bytes=True)[..., :3]
    return _over_time(np.where(np.isnan(values)[..., None], np.uint8(SHOWN), colours), num_frames)


def _over_time(tokens: UInt8[np.ndarray, "t h w 3"], num_frames: int) -> UInt8[np.ndarray, "T h w 3"]:
    """A token frame stands for all its video frames."""
    return np.repeat(tokens, num_frames // len(tokens), axis=0)


def note_on(config: ModelConfig) -> str:
    """What a reader of the figure has to know of its reconstructions."""
    notes = [OWN_STATISTICS] if config.normalize_target else []
    if config.in_channels not in (1, 3):
        shown = "first three, as red, green and blue" if config.in_channels > 3 else "first"
        notes.append(f"Of {config.in_channels} channels, the frames show the {shown}.")
    return " ".join(notes)
