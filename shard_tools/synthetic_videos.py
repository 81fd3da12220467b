"""Generate labeled videos with known truth: what moves, where, and which frame is which.

    python shard_tools/synthetic_videos.py OUTPUT --num-videos 64 --seed 0

writes OUTPUT/<class>/video_000000.mp4 and, beside it, video_000000.motion.json with the boxes of what moves in every
frame. A video is a still, textured background with still objects, over which one to three objects move in the direction
that is its class; still and moving objects look alike, so only motion tells the class. The frame number stands in the
top left corner as a 4x4 grid of black and white cells and survives re-encoding and scaling.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import av
import numpy as np
from av.video.stream import VideoStream
from jaxtyping import Bool, UInt8
from PIL import Image

from common.errors import InputError, run_command
from common.logging import log
from common.progress import progress_bar
from pipeline.shards.arrays import CONTAINER
from shard_tools.encoding.codecs import CODECS, open_encoder

Boxes = list[list[float]]  # [x0, y0, x1, y1] in pixels, of what moves in a frame
Frame = UInt8[np.ndarray, "H W 3"]

CLASSES = {
    "right": (1.0, 0.0),
    "left": (-1.0, 0.0),
    "down": (0.0, 1.0),
    "up": (0.0, -1.0),
    "down_right": (math.sqrt(0.5), math.sqrt(0.5)),
    "up_left": (-math.sqrt(0.5), -math.sqrt(0.5)),
    "up_right": (math.sqrt(0.5), -math.sqrt(0.5)),
    "down_left": (-math.sqrt(0.5), math.sqrt(0.5)),
}
GRID = 4  # cells per side: 12 bits of frame number, 4 bits of checksum
GRID_FRACTION = 20  # a cell is 1/20 of the picture's width and height: the grid covers 1/5 of each
MAX_FRAMES = 2**12
MIN_SIDE = 48  # pixels: below, cells of the grid are too small to read


@dataclass(frozen=True, slots=True)
class MovingObject:
    """A textured object. Position and velocity are in pixels and pixels per frame, of its top left corner."""

    picture: UInt8[np.ndarray, "h w 3"]
    shape: Bool[np.ndarray, "h w"]  # True where the object is
    start: tuple[float, float]
    velocity: tuple[float, float]

    def corner(self, frame: int, width: int, height: int) -> tuple[int, int]:
        """Return the top left corner at `frame`; what leaves the picture comes back on the other side."""
        h, w = self.shape.shape
        x = (self.start[0] + frame * self.velocity[0]) % (width + w) - w
        y = (self.start[1] + frame * self.velocity[1]) % (height + h) - h
        return round(x), round(y)


def make_texture(rng: np.random.Generator, width: int, height: int, contrast: float) -> Frame:
    """Make a natural-looking picture: noise of all scales, each octave weaker than the one before."""
    field = np.zeros((height, width, 3), np.float32)
    cells, strength = 2, 1.0
    while cells < 2 * max(width, height):
        noise = rng.standard_normal((min(cells, height), min(cells, width), 3), dtype=np.float32)
        # The colors of a scene are correlated.
        noise = 0.6 * noise.mean(axis=2, keepdims=True) * math.sqrt(3) + 0.4 * noise
        layers = [Image.fromarray(noise[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(3)]
        field += strength * np.stack([np.asarray(layer) for layer in layers], axis=2)
        cells, strength = cells * 2, strength * 0.6
    middle = rng.uniform(80, 176, 3)
    return np.clip(middle + contrast * field, 0, 255).astype(np.uint8)


def _make_object(rng: np.random.Generator, width: int, height: int, velocity: tuple[float, float]) -> MovingObject:
    """Make an ellipse or a box of random size, texture and position."""
    side = min(width, height)
    w, h = (max(4, round(side * rng.uniform(0.16, 0.32))) for _ in range(2))
    y, x = np.mgrid[:h, :w]
    inside = ((x + 0.5) / w * 2 - 1) ** 2 + ((y + 0.5) / h * 2 - 1) ** 2 <= 1
    shape = inside if rng.random() < 0.5 else np.ones((h, w), bool)
    start = (rng.uniform(w, width), rng.uniform(h, height))
    return MovingObject(make_texture(rng, w, h, contrast=45), shape, start, velocity)


def _paste(canvas: np.ndarray, thing: MovingObject, corner: tuple[int, int]) -> list[float]:
    """Draw `thing` and return its visible box [x0, y0, x1, y1] in pixels, or [] when it is outside."""
    height, width = canvas.shape[:2]
    h, w = thing.shape.shape
    x0, y0 = max(corner[0], 0), max(corner[1], 0)
    x1, y1 = min(corner[0] + w, width), min(corner[1] + h, height)
    if x0 >= x1 or y0 >= y1:
        return []
    inside = np.s_[y0 - corner[1] : y1 - corner[1], x0 - corner[0] : x1 - corner[0]]
    target = canvas[y0:y1, x0:x1]
    np.copyto(target, thing.picture[inside], where=thing.shape[inside][..., None])
    return [float(x0), float(y0), float(x1), float(y1)]


def _check_bits(number: int) -> int:
    # Adding 5 keeps an all-black corner from reading as frame 0.
    return (number + (number >> 4) + (number >> 8) + 5) & 15


def _cell_edges(length: int) -> list[int]:
    return [round(i * length / GRID_FRACTION) for i in range(GRID + 1)]


def draw_frame_number(frame: np.ndarray, number: int) -> None:
    """Write `number` (below 4096) into the top left corner of `frame`, uint8 [H, W, 3]."""
    code = number << 4 | _check_bits(number)
    rows, columns = _cell_edges(frame.shape[0]), _cell_edges(frame.shape[1])
    for i in range(GRID * GRID):
        row, column = divmod(i, GRID)
        value = 235 if code >> i & 1 else 20
        frame[rows[row] : rows[row + 1], columns[column] : columns[column + 1]] = value


def read_frame_number(frame: np.ndarray) -> int:
    """Read the number drawn into `frame`, uint8 [H, W, 3]; raise ValueError if none is readable."""
    height, width = frame.shape[:2]
    code = 0
    for i in range(GRID * GRID):
        row, column = divmod(i, GRID)
        y, x = (row + 0.5) * height / GRID_FRACTION, (column + 0.5) * width / GRID_FRACTION
        code |= int(frame[round(y - 1) : round(y + 1), round(x - 1) : round(x + 1)].mean() > 127) << i
    number = code >> 4
    if code & 15 != _check_bits(number):
        raise ValueError("no frame number is readable in the top left corner")
    return number


def draw_frames(
    rng: np.random.Generator, direction: tuple[float, float], size: tuple[int, int], num_frames: int, fps: float
) -> Iterator[tuple[Frame, Boxes]]:
    """Yield `num_frames` frames, each with the boxes of what moves in it.

    `size` is (width, height) in pixels. Objects cross a quarter to the whole of the picture per second.
    """
    width, height = size
    still = make_texture(rng, width, height, contrast=28)
    for _ in range(rng.integers(1, 4)):
        thing = _make_object(rng, width, height, velocity=(0, 0))
        _paste(still, thing, thing.corner(0, width, height))
    movers = []
    for _ in range(rng.integers(1, 4)):
        speed = min(size) * rng.uniform(0.25, 1.0) / fps
        movers.append(_make_object(rng, width, height, (direction[0] * speed, direction[1] * speed)))
    for number in range(num_frames):
        frame = still.copy()
        boxes = [_paste(frame, thing, thing.corner(number, width, height)) for thing in movers]
        draw_frame_number(frame, number)
        yield frame, [box for box in boxes if box]


def write_video(path: Path, frames: Iterable[Frame], fps: int, codec_name: str) -> None:
    """Encode frames as a camera or a web site would: long groups, default options. As npy they are stored unencoded."""
    if codec_name == CONTAINER:
        np.save(path, np.stack(list(frames)))
        return
    codec = CODECS[codec_name]
    with av.open(str(path), "w", options={"fflags": "+bitexact"}) as output:
        stream = None
        for picture in frames:
            if stream is None:
                options = codec.options(48, max(2, codec.default_quality - 5), "veryfast")
                stream = cast(VideoStream, output.add_stream(codec.encoder, rate=fps, options=options))
                stream.height, stream.width = picture.shape[:2]
                stream.pix_fmt = codec.pixel_format
                stream.thread_count = 1
                open_encoder(stream.codec_context)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        if stream is not None:
            output.mux(stream.encode(None))


def write_labeled_video(
    arguments: argparse.Namespace, index: int, class_name: str, frames: Iterable[tuple[Frame, Boxes]]
) -> Path:
    """Write video `index` and its sidecar; return the video's path."""
    folder = arguments.output / class_name
    folder.mkdir(parents=True, exist_ok=True)
    container = CODECS[arguments.codec].container if arguments.codec in CODECS else arguments.codec
    path: Path = folder / f"video_{index:06d}.{container}"
    moving_boxes: list[Boxes] = []

    def collect_boxes() -> Iterator[Frame]:
        for frame, boxes in frames:
            moving_boxes.append(boxes)
            yield frame

    write_video(path, collect_boxes(), arguments.fps, arguments.codec)
    width, height = arguments.size
    sidecar = {
        "fps": arguments.fps,
        "width": width,
        "height": height,
        "num_frames": arguments.num_frames,
        "class": class_name,
        "moving_boxes": moving_boxes,
    }
    path.with_suffix(".motion.json").write_text(json.dumps(sidecar), encoding="utf-8")
    return path


def make_parser(description: str | None, num_videos: int, num_frames: int, side: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every synthetic dataset, and these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write to")
    parser.add_argument("--num-videos", type=int, default=num_videos)
    parser.add_argument("--num-frames", type=int, default=num_frames, help="frames per video")
    parser.add_argument("--size", type=_size, default=(side, side), help=f"pixels: {side} or 320x240 (default {side})")
    parser.add_argument("--fps", type=int, default=30)
    parser.add_argument("--codec", choices=[*CODECS, CONTAINER], default="h264")
    parser.add_argument("--seed", type=int, default=0, help="another one gives videos for a test set")
    return parser


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    size = int(width), int(height or width)
    if min(size) < 32 or size[0] % 2 or size[1] % 2:
        raise argparse.ArgumentTypeError(f"{text} is not an even size of at least 32 pixels, like 96 or 320x240")
    return size


def require_at_least(arguments: argparse.Namespace, minimum: int, *names: str) -> None:
    """Raise InputError if an option is below `minimum`."""
    for name in names:
        if getattr(arguments, name) < minimum:
            raise InputError(f"--{name.replace('_', '-')} must be at least {minimum}")


def main(arguments: list[str] | None = None) -> None:
    av.logging.set_level(None)
    parser = make_parser(__doc__, num_videos=64, num_frames=64, side=96)
    parser.add_argument("--classes", type=int, default=4, help=f"directions of motion, 1 to {len(CLASSES)}")
    parsed = parser.parse_args(arguments)
    require_at_least(parsed, 1, "num_videos", "num_frames", "fps", "classes")
    require_at_least(parsed, 0, "seed")
    if parsed.classes > len(CLASSES) or parsed.num_frames > MAX_FRAMES or min(parsed.size) < MIN_SIDE:
        raise InputError(
            f"--classes may be {len(CLASSES)} at most, --num-frames {MAX_FRAMES}; --size at least {MIN_SIDE}"
        )
    for index in progress_bar(range(parsed.num_videos), unit="video"):
        name = list(CLASSES)[index % parsed.classes]
        rng = np.random.default_rng([parsed.seed, index])
        frames = draw_frames(rng, CLASSES[name], parsed.size, parsed.num_frames, parsed.fps)
        write_labeled_video(parsed, index, name, frames)
    log(f"wrote {parsed.num_videos} videos of {parsed.num_frames} frames to {parsed.output}")


if __name__ == "__main__":
    run_command(main)
