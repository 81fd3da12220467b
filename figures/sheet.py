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

MIN_WIDTH = 1600  # pixels of a sheet
MIN_CELL = (
    100  # pixels of a frame's width in it; where there are more frames, the sheet becomes wider
)
GAP = 4
ANIMATED_CELL, ANIMATED_LABEL, ANIMATED_FONT = 160, 180, 12
FRAME_MS = 160  # of an animation


class Row(NamedTuple):
    label: str
    cells: UInt8[
        np.ndarray, "T h w 3"
    ]  # one per frame of the clip: its pixels, or the tokens of a map
    is_map: bool = False

    @property
    def aspect(self) -> float:
        """Width per height."""
        return self.cells.shape[2] / self.cells.shape[1]

    def render(self, frame: int, height: int) -> Image.Image:
        """Scale a cell to `height` pixels; tokens keep their edges."""
        resampling = Image.Resampling.NEAREST if self.is_map else Image.Resampling.BICUBIC
        return Image.fromarray(self.cells[frame]).resize(
            (max(1, round(self.aspect * height)), height), resampling
        )


class Layout(NamedTuple):
    """Pixels of a sheet."""

    label: int  # width of the text before a row
    width: int  # of the widest cell
    height: int  # of all cells
    font: int

    @classmethod
    def fit(cls, rows: Sequence[Row], num_columns: int, min_width: int = MIN_WIDTH) -> "Layout":
        label, min_cell = min_width * 3 // 16, min_width * MIN_CELL // MIN_WIDTH
        width = max(ceil_div(min_width - label, num_columns) - GAP, min_cell)
        return cls(label, width, round(width / max(row.aspect for row in rows)), min_width // 80)


def render_sheet(
    rows: Sequence[Row], columns: Sequence[int], layout: Layout, captions: Sequence[str] = ()
) -> Image.Image:
    """Stack rows, each with its label and its frames `columns`; below, a caption for each column."""
    width, side = layout.width + GAP, layout.height + GAP
    foot = 2 * layout.font if captions else 0
    canvas = Image.new(
        "RGB", (layout.label + len(columns) * width, len(rows) * side + foot), "white"
    )
    for number, row in enumerate(rows):
        draw_text(
            canvas,
            (GAP, number * side + GAP),
            _wrap(row.label, layout.label, layout.font),
            layout.font,
        )
        for column, frame in enumerate(columns):
            canvas.paste(
                row.render(frame, layout.height), (layout.label + column * width, number * side)
            )
    for column, caption in enumerate(captions):
        draw_text(canvas, (layout.label + column * width, len(rows) * side), caption, layout.font)
    return canvas


def render_animation(rows: Sequence[Row]) -> list[Image.Image]:
    """Stack rows, an image per frame."""
    width = round(max(row.aspect for row in rows) * ANIMATED_CELL)
    layout = Layout(ANIMATED_LABEL, width, ANIMATED_CELL, ANIMATED_FONT)
    return [render_sheet(rows, [frame], layout) for frame in range(len(rows[0].cells))]


def save_animation(images: Sequence[Image.Image], path: Path) -> None:
    """Write a GIF."""
    with atomic_write(path) as partial:
        images[0].save(
            partial, "GIF", save_all=True, append_images=images[1:], duration=FRAME_MS, loop=0
        )


def save_image(image: Image.Image, path: Path) -> None:
    """Write a PNG."""
    with atomic_write(path) as partial:
        image.save(partial, "PNG")


def draw_text(canvas: Image.Image, corner: tuple[int, int], text: str, size: int) -> None:
    ImageDraw.Draw(canvas).multiline_text(corner, text, fill="black", font=_font(size), spacing=2)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(
        Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size=size
    )  # Pillow's own lacks ×


def _wrap(text: str, width: int, size: int) -> str:
    """Break lines that are wider than `width` pixels."""
    return "\n".join(textwrap.fill(line, int(width / size * 1.6)) for line in text.split("\n"))
