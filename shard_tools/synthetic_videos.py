"""Generate labeled videos with known truth: what moves, where, and which frame is which.

    python shard_tools/synthetic_videos.py OUTPUT --num-videos 64 --seed 0

writes OUTPUT/<class>/video_000000.mp4 and, beside it, video_000000.motion.json: for every frame, x0 y0 x1 y1 of what
moves, in pixels, and how far it moves to the next frame, dx dy. One to three objects move in the direction that is the
class. Still and moving objects look alike, so only motion tells the class. The frame number stands in the top left
corner as a 4x4 grid of black and white cells and survives re-encoding and scaling.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

from adamae.common.errors import run_command

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
GRID = 4  # cells per side: 12 bits of frame number, 4 bits of checksum
GRID_FRACTION = 20  # a cell is 1/20 of the picture's width and height: the grid covers 1/5 of each
MAX_FRAMES = 2**12
MIN_SIDE = 48  # pixels: below, cells of the grid are too small to read


def make_texture(rng: np.random.Generator, width: int, height: int, contrast: float) -> Frame:
    """Make a natural-looking picture: noise of all scales, each octave weaker than the one before."""
    field = np.zeros((height, width, 3), np.float32)
    cells, strength = 2, 1.0
    while cells < 2 * max(width, height):
        noise = rng.standard_normal((min(cells, height), min(cells, width), 3), dtype=np.float32)
        # The colors of a scene are correlated.
        noise = 0.6 * noise.mean(axis=2, keepdims=True) * math.sqrt(3) + 0.4 * noise
        layers = [
            Image.fromarray(noise[..., c]).resize((width, height), Image.Resampling.BICUBIC)
            for c in range(3)
        ]
        field += strength * np.stack([np.asarray(layer) for layer in layers], axis=2)
        cells, strength = cells * 2, strength * 0.6
    middle = rng.uniform(80, 176, 3)
    return np.clip(middle + contrast * field, 0, 255).astype(np.uint8)


class Sprite:
    """A textured ellipse or box of random size, texture and place. `velocity` is in pixels per frame."""

    def __init__(
        self, rng: np.random.Generator, width: int, height: int, velocity: ArrayLike = (0, 0)
    ):
        side = min(width, height)
        w, h = (max(4, round(side * rng.uniform(0.16, 0.32))) for _ in range(2))
        y, x = np.mgrid[:h, :w]
        inside = ((x + 0.5) / w * 2 - 1) ** 2 + ((y + 0.5) / h * 2 - 1) ** 2 <= 1
        self.shape = Image.fromarray(
            np.uint8(255 * (inside if rng.random() < 0.5 else np.ones((h, w))))
        )
        self.start = np.array(
            [rng.uniform(w, width), rng.uniform(h, height)]
        )  # of its top left corner, pixels
        self.picture, self.velocity = (
            Image.fromarray(make_texture(rng, w, h, contrast=45)),
            np.array(velocity),
        )

    def paste(self, canvas: Image.Image, frame: int) -> list[float]:
        """Draw it as it stands at `frame`; what leaves the picture comes back on the other side. Return x0, y0, x1, y1
        of its visible part, and how far it moves to the next frame along x and y, in pixels."""
        size = np.array(self.picture.size)
        corner = ((self.start + frame * self.velocity) % (canvas.size + size) - size).round()
        canvas.paste(self.picture, (int(corner[0]), int(corner[1])), self.shape)
        return [
            *np.clip([corner, corner + size], 0, canvas.size).ravel().tolist(),
            *self.velocity.tolist(),
        ]


def check_bits(number: int) -> int:
    # Adding 5 keeps an all-black corner from reading as frame 0.
    return (number + (number >> 4) + (number >> 8) + 5) & 15


def draw_frame_number(frame: np.ndarray, number: int) -> None:
    """Write `number` (below 4096) into the top left corner of `frame`, uint8 [H, W, 3]."""
    code = number << 4 | check_bits(number)
    rows, columns = (
        [round(i * side / GRID_FRACTION) for i in range(GRID + 1)] for side in frame.shape[:2]
    )
    for i in range(GRID * GRID):
        row, column = divmod(i, GRID)
        value = 235 if code >> i & 1 else 20
        frame[rows[row] : rows[row + 1], columns[column] : columns[column + 1]] = value


def draw_directions(
    rng: np.random.Generator, class_name: str, size: tuple[int, int], num_frames: int
) -> Iterator[tuple[Frame, list[list[float]]]]:
    """Yield frames of DIRECTIONS, each with the boxes of what moves in it, as Sprite.paste returns them.

    `size` is (width, height) in pixels. Objects cross a quarter to the whole of the picture per second.
    """
    direction = np.array(DIRECTIONS[class_name])
    still = Image.fromarray(make_texture(rng, *size, contrast=28))
    for _ in range(rng.integers(1, 4)):
        Sprite(rng, *size).paste(still, 0)
    movers = []
    for _ in range(rng.integers(1, 4)):
        speed = min(size) * rng.uniform(0.25, 1.0) / FPS
        movers.append(Sprite(rng, *size, direction * speed))
    for number in range(num_frames):
        picture = still.copy()
        boxes = [mover.paste(picture, number) for mover in movers]
        frame = np.array(picture)
        draw_frame_number(frame, number)
        yield frame, [box for box in boxes if box[0] < box[2] and box[1] < box[3]]


def write_video(path: Path, frames: Iterable[Frame], size: tuple[int, int], codec: str) -> None:
    """Encode frames as a camera or a web site would: long groups, default options."""
    quality = max(2, CODECS[codec].default_quality - 5)
    writer = VideoWriter(
        path,
        Settings(codec, gop=48, quality=quality, tune="size"),
        Fraction(FPS),
        size,
        fragment=False,
    )
    for picture in frames:
        writer.write(av.VideoFrame.from_ndarray(picture, format="rgb24"))
    writer.close()


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    size = int(width), int(height or width)
    if min(size) < MIN_SIDE or size[0] % 2 or size[1] % 2:
        raise argparse.ArgumentTypeError(
            f"{text} is not an even size of at least {MIN_SIDE} pixels, like 96 or 320x240"
        )
    return size


def main(arguments: list[str] | None = None) -> None:
    av.logging.set_level(None)
    parser = ArgumentParser(__doc__)
    parser.add_argument("output", type=Path, help="folder to write to")
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
        "--size", type=_size, default=(96, 96), help="pixels: 96 or 320x240 (default 96)"
    )
    parser.add_argument("--codec", choices=CODECS, default="h264")
    parser.add_argument(
        "--seed", type=between(0), default=0, help="another one gives videos for a test set"
    )
    parsed = parser.parse_args(arguments)
    width, height = parsed.size
    for index in progress_bar(range(parsed.num_videos), unit="video"):
        name = parsed.classes[index % len(parsed.classes)]
        stem = parsed.output / name / f"video_{index:06d}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([parsed.seed, index])
        pictures, moving_boxes = zip(
            *draw_directions(rng, name, parsed.size, parsed.num_frames), strict=True
        )
        write_video(stem.with_suffix(f".{CONTAINER}"), pictures, parsed.size, parsed.codec)
        facts = {
            "fps": FPS,
            "width": width,
            "height": height,
            "num_frames": parsed.num_frames,
            "class": name,
        }
        sidecar = json.dumps({**facts, "moving_boxes": moving_boxes})
        stem.with_suffix(".motion.json").write_text(sidecar, encoding="utf-8")
    log(f"wrote {parsed.num_videos} videos of {parsed.num_frames} frames to {parsed.output}")


if __name__ == "__main__":
    run_command(main)
