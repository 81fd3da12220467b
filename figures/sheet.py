"""Labeled rows of frames, stacked in an image or an animation."""

import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

from adamae.common.arithmetic import ceil_div
from adamae.common.atomic_io import atomic_write

# All lengths are in pixels. A sheet becomes wider where its frames would be narrower than MIN_CELL.
MIN_WIDTH = 1600
MIN_CELL = 100
GAP = 4
# Of animations: they have the size of their cells, whatever the number of frames.
ANIMATED_CELL = 160
ANIMATED_LABEL = 180
ANIMATED_FONT = 12
MS_PER_FRAME = 160


class Row(NamedTuple):
    """A label and a cell per frame of a clip: the frame's pixels, or a map's tokens."""

    label: str
    cells: UInt8[np.ndarray, "T h w 3"]
    is_map: bool = False

    @property
    def aspect(self) -> float:
        """The width of a cell over its height."""
        return self.cells.shape[2] / self.cells.shape[1]

    def render(self, frame: int, height: int) -> Image.Image:
        """Scale a cell to `height` pixels; tokens keep their edges."""
        width = max(1, round(self.aspect * height))
        resampling = Image.Resampling.NEAREST if self.is_map else Image.Resampling.BICUBIC
        return Image.fromarray(self.cells[frame]).resize((width, height), resampling)


class Layout(NamedTuple):
    """The measures of a sheet, in pixels."""

    # The width of the text before a row.
    label: int
    # Of the widest cell.
    width: int
    # Of all cells.
    height: int
    font: int

    @classmethod
    def fit(cls, rows: Sequence[Row], num_columns: int, min_width: int = MIN_WIDTH) -> "Layout":
        """Return the layout of a sheet that is `min_width` wide, or wider for many columns."""
        label = min_width * 3 // 16
        # In a narrower sheet, cells may be narrower too.
        min_cell = min_width * MIN_CELL // MIN_WIDTH
        cell = ceil_div(min_width - label, num_columns) - GAP
        width = max(cell, min_cell)
        height = round(width / max(row.aspect for row in rows))
        return cls(label, width, height, min_width // 80)


def render_sheet(
    rows: Sequence[Row], columns: Sequence[int], layout: Layout, captions: Sequence[str] = ()
) -> Image.Image:
    """Stack rows, each with its label and its frames `columns`; below, a caption per column."""
    column_width = layout.width + GAP
    row_height = layout.height + GAP
    width = layout.label + len(columns) * column_width
    height = len(rows) * row_height
    if captions:
        height += 2 * layout.font
    canvas = Image.new("RGB", (width, height), "white")
    y = 0
    for row in rows:
        label = _wrap(row.label, layout.label, layout.font)
        draw_text(canvas, (GAP, y + GAP), label, layout.font)
        x = layout.label
        for frame in columns:
            canvas.paste(row.render(frame, layout.height), (x, y))
            x += column_width
        y += row_height
    x = layout.label
    for caption in captions:
        draw_text(canvas, (x, y), caption, layout.font)
        x += column_width
    return canvas


def render_animation(rows: Sequence[Row]) -> list[Image.Image]:
    """Stack rows, an image per frame."""
    width = round(max(row.aspect for row in rows) * ANIMATED_CELL)
    layout = Layout(ANIMATED_LABEL, width, ANIMATED_CELL, ANIMATED_FONT)
    return [render_sheet(rows, [frame], layout) for frame in range(len(rows[0].cells))]


def save_animation(images: Sequence[Image.Image], path: Path) -> None:
    """Write a GIF that repeats forever."""
    first, *others = images
    with atomic_write(path) as partial:
        first.save(
            partial, "GIF", save_all=True, append_images=others, duration=MS_PER_FRAME, loop=0
        )


def save_image(image: Image.Image, path: Path) -> None:
    """Write a PNG."""
    with atomic_write(path) as partial:
        image.save(partial, "PNG")


def draw_text(canvas: Image.Image, corner: tuple[int, int], text: str, size: int) -> None:
    ImageDraw.Draw(canvas).multiline_text(corner, text, fill="black", font=_font(size), spacing=2)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # matplotlib's font: Pillow's own lacks ×.
    return ImageFont.truetype(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size=size)


def _wrap(text: str, width: int, size: int) -> str:
    """Break lines that are wider than `width` pixels."""
    # A character of this font is 1 / 1.6 of its height wide, on average.
    max_characters = int(width / size * 1.6)
    return "\n".join(textwrap.fill(line, max_characters) for line in text.split("\n"))
