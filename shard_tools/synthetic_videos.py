"""Generate labeled videos with known truth: what moves, where, and which frame is which.

    python shard_tools/synthetic_videos.py OUTPUT --num-videos 64 --seed 0

writes OUTPUT/<class>/video_000000.mp4 and, beside it, video_000000.motion.json: for every frame,
x0 y0 x1 y1 of each moving object, in pixels, and its motion to the next frame, dx dy. One to three
objects move in the direction that is the class. Static and moving objects look alike, so only
motion distinguishes the classes. The top left corner shows the frame number as a 4x4 grid of black
and white cells, which survives re-encoding and scaling.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

from adamae.common.errors import run_command
from adamae.common.locations import local_path

# isort: split
import av
import numpy as np
from jaxtyping import UInt8
from numpy.typing import ArrayLike
from PIL import Image

from adamae.common.arguments import ArgumentParser, between
from adamae.common.logging import log
from adamae.common.progress import progress_bar
from adamae.shard_tools.codecs import CODECS, CONTAINER
from adamae.shard_tools.encoding.encode import VideoWriter
from adamae.shard_tools.settings import Settings

Frame = UInt8[np.ndarray, "H W 3"]

_ROOT = math.sqrt(0.5)
DIRECTIONS = {
    "right": (1.0, 0.0),
    "left": (-1.0, 0.0),
    "down": (0.0, 1.0),
    "up": (0.0, -1.0),
    "down_right": (_ROOT, _ROOT),
    "up_left": (-_ROOT, -_ROOT),
    "up_right": (_ROOT, -_ROOT),
    "down_left": (-_ROOT, _ROOT),
}
FPS = 30
# Cells per side of the grid: 12 bits of frame number and 4 bits of checksum.
GRID = 4
# A cell is 1/20 of the picture's width and height, so the grid covers 1/5 of each.
GRID_FRACTION = 20
MAX_FRAMES = 2**12
# In pixels; in smaller videos the cells of the grid cannot be read.
MIN_SIDE = 48


def make_texture(rng: np.random.Generator, width: int, height: int, contrast: float) -> Frame:
    """Make a natural-looking picture: noise of all scales, each octave weaker than the last."""
    field = np.zeros((height, width, 3), np.float32)
    num_cells = 2
    strength = 1.0
    while num_cells < 2 * max(width, height):
        shape = (min(num_cells, height), min(num_cells, width), 3)
        noise = rng.standard_normal(shape, dtype=np.float32)
        # The colors of a scene are correlated. The square root gives gray noise, the mean of three
        # channels, the deviation of a single one.
        gray = 0.6 * noise.mean(axis=2, keepdims=True) * math.sqrt(3)
        noise = gray + 0.4 * noise
        for channel in range(3):
            picture = Image.fromarray(noise[..., channel])
            layer = picture.resize((width, height), Image.Resampling.BICUBIC)
            field[..., channel] += strength * np.asarray(layer)
        num_cells *= 2
        strength *= 0.6
    mean_color = rng.uniform(80, 176, 3)
    return np.clip(mean_color + contrast * field, 0, 255).astype(np.uint8)


class Sprite:
    """A textured ellipse or box of random size, texture and position.

    `velocity` is in pixels per frame, along x and y.
    """

    def __init__(
        self, rng: np.random.Generator, width: int, height: int, velocity: ArrayLike = (0, 0)
    ) -> None:
        side = min(width, height)
        w = max(4, round(side * rng.uniform(0.16, 0.32)))
        h = max(4, round(side * rng.uniform(0.16, 0.32)))
        inside = np.ones((h, w), bool)
        if rng.random() < 0.5:
            # The ellipse that touches all four sides.
            y, x = np.mgrid[:h, :w]
            dx = (x + 0.5) / w * 2 - 1
            dy = (y + 0.5) / h * 2 - 1
            inside = dx**2 + dy**2 <= 1
        self.mask = Image.fromarray((255 * inside).astype(np.uint8))
        # The top left corner in frame 0, in pixels from a point one sprite up and left of the
        # canvas; see paste.
        self.start = np.array([rng.uniform(w, width), rng.uniform(h, height)])
        self.picture = Image.fromarray(make_texture(rng, w, h, contrast=45))
        self.velocity = np.array(velocity)

    def paste(self, canvas: Image.Image, frame: int) -> list[float]:
        """Paste the sprite where it is at `frame`; what leaves the picture comes back opposite.

        Return x0, y0, x1, y1 of its visible part, and its motion to the next frame along x and y,
        in pixels.
        """
        size = np.array(self.picture.size)
        # A period is the canvas and one sprite: it has left on one side when it enters opposite.
        period = canvas.size + size
        position = (self.start + frame * self.velocity) % period
        corner = (position - size).round()
        x, y = corner.astype(int).tolist()
        canvas.paste(self.picture, (x, y), self.mask)
        top_left = np.clip(corner, 0, canvas.size)
        bottom_right = np.clip(corner + size, 0, canvas.size)
        return [*top_left.tolist(), *bottom_right.tolist(), *self.velocity.tolist()]


def check_bits(number: int) -> int:
    """Return the 4-bit checksum of a 12-bit frame number."""
    # Adding 5 keeps an all-black corner from reading as frame 0.
    return (number + (number >> 4) + (number >> 8) + 5) & 15


def draw_frame_number(frame: np.ndarray, number: int) -> None:
    """Write `number` (below 4096) into the top left corner of `frame`, uint8 [H, W, 3]."""
    code = number << 4 | check_bits(number)
    height, width, _ = frame.shape
    rows = _find_grid_lines(height)
    columns = _find_grid_lines(width)
    for cell in range(GRID * GRID):
        row, column = divmod(cell, GRID)
        value = 235 if code >> cell & 1 else 20
        frame[rows[row] : rows[row + 1], columns[column] : columns[column + 1]] = value


def _find_grid_lines(side: int) -> list[int]:
    """Return the first pixel of each row or column of the grid, and the one behind the last."""
    return [round(line * side / GRID_FRACTION) for line in range(GRID + 1)]


def draw_directions(
    rng: np.random.Generator, class_name: str, size: tuple[int, int], num_frames: int
) -> Iterator[tuple[Frame, list[list[float]]]]:
    """Yield the frames of a video of a class of DIRECTIONS, each with the boxes of what moves.

    `size` is (width, height) in pixels; boxes are as Sprite.paste returns them. Objects cross a
    quarter to the whole of the picture's short side per second.
    """
    direction = np.array(DIRECTIONS[class_name])
    background = Image.fromarray(make_texture(rng, *size, contrast=28))
    for _ in range(rng.integers(1, 4)):
        Sprite(rng, *size).paste(background, 0)
    movers = []
    for _ in range(rng.integers(1, 4)):
        speed = min(size) * rng.uniform(0.25, 1.0) / FPS
        movers.append(Sprite(rng, *size, direction * speed))
    for number in range(num_frames):
        picture = background.copy()
        boxes = []
        for mover in movers:
            box = mover.paste(picture, number)
            x0, y0, x1, y1, _, _ = box
            if x0 < x1 and y0 < y1:
                boxes.append(box)
        frame = np.array(picture)
        draw_frame_number(frame, number)
        yield frame, boxes


def write_video(path: Path, frames: Iterable[Frame], size: tuple[int, int], codec: str) -> None:
    """Encode frames as a camera or a web site would: long groups of pictures, default options."""
    quality = max(2, CODECS[codec].default_quality - 5)
    settings = Settings(codec, gop=48, quality=quality, tune="size")
    writer = VideoWriter(path, settings, Fraction(FPS), size, fragment=False)
    for picture in frames:
        writer.write(av.VideoFrame.from_ndarray(picture, format="rgb24"))
    writer.close()


def _parse_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    size = int(width), int(height or width)
    if min(size) < MIN_SIDE or size[0] % 2 or size[1] % 2:
        raise argparse.ArgumentTypeError(
            f"{text} is not an even size of at least {MIN_SIDE} pixels, like 96 or 320x240"
        )
    return size


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("output", type=local_path, help="folder to write to")
    parser.add_argument(
        "--classes",
        nargs="+",
        choices=DIRECTIONS,
        default=list(DIRECTIONS)[:4],
        metavar="CLASS",
        help=f"of {', '.join(DIRECTIONS)} (default: the first four)",
    )
    parser.add_argument("--num-videos", type=between(1), default=64)
    parser.add_argument(
        "--num-frames", type=between(1, MAX_FRAMES), default=64, help="frames per video"
    )
    parser.add_argument(
        "--size", type=_parse_size, default=(96, 96), help="pixels: 96 or 320x240 (default 96)"
    )
    parser.add_argument("--codec", choices=CODECS, default="h264")
    parser.add_argument(
        "--seed", type=between(0), default=0, help="use another one for the videos of a test set"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    av.logging.set_level(None)
    parsed = parse_arguments(arguments)
    width, height = parsed.size
    for index in progress_bar(range(parsed.num_videos), unit="video"):
        class_name = parsed.classes[index % len(parsed.classes)]
        stem = parsed.output / class_name / f"video_{index:06d}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([parsed.seed, index])
        pictures = []
        moving_boxes = []
        for picture, boxes in draw_directions(rng, class_name, parsed.size, parsed.num_frames):
            pictures.append(picture)
            moving_boxes.append(boxes)
        write_video(stem.with_suffix(f".{CONTAINER}"), pictures, parsed.size, parsed.codec)
        facts = {
            "fps": FPS,
            "width": width,
            "height": height,
            "num_frames": parsed.num_frames,
            "class": class_name,
            "moving_boxes": moving_boxes,
        }
        stem.with_suffix(".motion.json").write_text(json.dumps(facts), encoding="utf-8")
    log(f"wrote {parsed.num_videos} videos of {parsed.num_frames} frames to {parsed.output}")


if __name__ == "__main__":
    run_command(main)
