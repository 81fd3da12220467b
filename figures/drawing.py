"""The paper's figures: rows of maps over the frames of a clip, as a picture or an animation."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from matplotlib import colormaps, get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from model.maps import Maps

CELL = 112  # pixels a frame is drawn with
LABEL = 150  # pixels for the text before a row
GAP = 4
GREY = 96  # where a map has no value


class Row(NamedTuple):
    label: str
    cells: UInt8[np.ndarray, "T S S 3"]  # one for each frame of the clip


def five_rows(maps: Maps, clip: int = 0) -> list[Row]:
    """Frames, reconstruction, error, probability (red = high), mask (black = masked) of one clip (SPEC §9)."""
    rows = [frames_row(maps, clip), reconstruction_row(maps, clip), error_row(maps, clip)]
    if maps.probability is not None:
        rows.append(probability_row(maps, clip))
    return [*rows, mask_row(maps, clip)]


def frames_row(maps: Maps, clip: int = 0) -> Row:
    return Row("frames", _pixels(maps.frames[clip]))


def reconstruction_row(maps: Maps, clip: int = 0) -> Row:
    return Row("reconstruction", _pixels(maps.reconstruction[clip]))


def error_row(maps: Maps, clip: int = 0) -> Row:
    error = maps.error[clip].cpu().numpy()
    label = f"error 0 … {np.nanmax(error):.2f}\nmean {np.nanmean(error):.3f}"
    return Row(label, _map_cells(error, 0.0, float(np.nanmax(error)), maps.frames.shape[2]))


def probability_row(maps: Maps, clip: int = 0) -> Row:
    if maps.probability is None:
        raise ValueError("only adaptive masking has probabilities")
    # In multiples of the uniform probability: 1 is what a sampler that has learnt nothing gives every token.
    p = (maps.probability[clip] * maps.probability[clip].numel()).cpu().numpy()
    low, high = float(p.min()), float(p.max())
    return Row(f"probability\n× N: {low:.2f} … {high:.2f}", _map_cells(p, low, high, maps.frames.shape[2]))


def mask_row(maps: Maps, clip: int = 0) -> Row:
    is_masked = maps.is_masked[clip].cpu().numpy()
    white = np.where(is_masked, 0, 255).astype(np.uint8)
    return Row(f"mask\n{is_masked.mean():.0%} hidden", _cells(np.stack([white] * 3, -1), maps.frames.shape[2]))


def picture(rows: Sequence[Row], frame_step: int) -> Image.Image:
    """Rows below each other, every `frame_step`-th frame a column; of the tubelet's size: one column a token frame."""
    columns = range(0, len(rows[0].cells), frame_step)
    width, height = LABEL + len(columns) * (CELL + GAP), len(rows) * (CELL + GAP)
    canvas = Image.new("RGB", (width, height), "white")
    for number, row in enumerate(rows):
        top = number * (CELL + GAP)
        _write(canvas, (GAP, top + GAP), row.label)
        for column, frame in enumerate(columns):
            canvas.paste(Image.fromarray(row.cells[frame]), (LABEL + column * (CELL + GAP), top))
    return canvas


def animation(rows: Sequence[Row]) -> list[Image.Image]:
    """Rows beside each other, playing."""
    head = 32
    frames = []
    for frame in range(len(rows[0].cells)):
        canvas = Image.new("RGB", (len(rows) * (CELL + GAP) + GAP, head + CELL + GAP), "white")
        for number, row in enumerate(rows):
            left = GAP + number * (CELL + GAP)
            _write(canvas, (left, 2), row.label)
            canvas.paste(Image.fromarray(row.cells[frame]), (left, head))
        frames.append(canvas)
    return frames


def _write(canvas: Image.Image, place: tuple[int, int], text: str) -> None:
    font = ImageFont.truetype(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size=10)  # Pillow's own lacks ×
    ImageDraw.Draw(canvas).multiline_text(place, text, fill="black", font=font, spacing=2)


def _pixels(clip: UInt8[Tensor, "C T H W"]) -> UInt8[np.ndarray, "T S S 3"]:
    frames = clip.permute(1, 2, 3, 0).cpu().numpy()
    return np.stack(
        [np.asarray(Image.fromarray(frame).resize((CELL, CELL), Image.Resampling.BICUBIC)) for frame in frames]
    )


def _map_cells(
    values: Float[np.ndarray, "t h w"], low: float, high: float, num_frames: int
) -> UInt8[np.ndarray, "T S S 3"]:
    """Blue for `low`, red for `high`, grey for NaN."""
    share = (values - low) / max(high - low, 1e-12)
    colours = colormaps["turbo"](np.nan_to_num(share), bytes=True)[..., :3]
    return _cells(np.where(np.isnan(values)[..., None], np.uint8(GREY), colours), num_frames)


def _cells(tokens: UInt8[np.ndarray, "t h w 3"], num_frames: int) -> UInt8[np.ndarray, "T S S 3"]:
    """Tokens as squares; a token frame stands for all its video frames."""
    large = [np.asarray(Image.fromarray(image).resize((CELL, CELL), Image.Resampling.NEAREST)) for image in tokens]
    return np.repeat(np.stack(large), num_frames // len(tokens), axis=0)
