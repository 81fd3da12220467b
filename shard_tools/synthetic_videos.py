"""Draw labelled videos whose truth is known: what moves, where, and which frame is which.

    python shard_tools/synthetic_videos.py OUTPUT --num-videos 64 --seed 0

writes OUTPUT/<class>/video_000000.mp4 and, beside it, video_000000.motion.json with the boxes of what moves in every
frame. A video is a still, textured background with still objects, over which one to three objects move in the direction
that is its class; still and moving objects look alike, so only motion tells the class. The frame's number stands in the
top left corner as a 4x4 grid of black and white cells and survives re-encoding and scaling.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import av
import numpy as np
from av.video.stream import VideoStream
from PIL import Image

from common.errors import InputError, run_command
from common.logging import log
from common.progress import progress_bar
from pipeline.shards.arrays import CONTAINER
from shard_tools.encoding.codecs import CODECS, open_encoder

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
GRID = 4  # cells a side: 12 bits of frame number, 4 bits of check sum
GRID_SHARE = 20  # a cell is 1/20 of the picture's width and height: the grid covers 1/5 of each
MAX_FRAMES = 2**12


@dataclass(frozen=True, slots=True)
class Thing:
    """A textured object. Position and velocity are in pixels and pixels per frame, of its top left corner."""

    picture: np.ndarray  # uint8 [h, w, 3]
    shape: np.ndarray  # bool [h, w], True where the object is
    start: tuple[float, float]
    velocity: tuple[float, float]

    def corner(self, frame: int, width: int, height: int) -> tuple[int, int]:
        """Top left corner at `frame`; what leaves the picture comes back on the other side."""
        h, w = self.shape.shape
        x = (self.start[0] + frame * self.velocity[0]) % (width + w) - w
        y = (self.start[1] + frame * self.velocity[1]) % (height + h) - h
        return round(x), round(y)


def texture(rng: np.random.Generator, width: int, height: int, contrast: float) -> np.ndarray:
    """A natural-looking picture, uint8 [height, width, 3]: noise of all scales, each octave half as strong."""
    field = np.zeros((height, width, 3), np.float32)
    cells, strength = 2, 1.0
    while cells < 2 * max(width, height):
        noise = rng.standard_normal((min(cells, height), min(cells, width), 3), dtype=np.float32)
        noise = (
            0.6 * noise.mean(axis=2, keepdims=True) * math.sqrt(3) + 0.4 * noise
        )  # colours of a scene belong together
        layers = [Image.fromarray(noise[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(3)]
        field += strength * np.stack([np.asarray(layer) for layer in layers], axis=2)
        cells, strength = cells * 2, strength * 0.6
    middle = rng.uniform(80, 176, 3)
    return np.clip(middle + contrast * field, 0, 255).astype(np.uint8)


def _thing(rng: np.random.Generator, width: int, height: int, velocity: tuple[float, float]) -> Thing:
    """An ellipse or a box of random size, look and place."""
    side = min(width, height)
    w, h = (max(4, round(side * rng.uniform(0.16, 0.32))) for _ in range(2))
    y, x = np.mgrid[:h, :w]
    inside = ((x + 0.5) / w * 2 - 1) ** 2 + ((y + 0.5) / h * 2 - 1) ** 2 <= 1
    shape = inside if rng.random() < 0.5 else np.ones((h, w), bool)
    start = (rng.uniform(w, width), rng.uniform(h, height))
    return Thing(texture(rng, w, h, contrast=45), shape, start, velocity)


def _paste(canvas: np.ndarray, thing: Thing, corner: tuple[int, int]) -> list[float]:
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
    return [round(i * length / GRID_SHARE) for i in range(GRID + 1)]


def draw_frame_number(frame: np.ndarray, number: int) -> None:
    """Write `number` (below 4096) into the top left corner of `frame`, uint8 [H, W, 3]."""
    code = number << 4 | _check_bits(number)
    rows, columns = _cell_edges(frame.shape[0]), _cell_edges(frame.shape[1])
    for i in range(GRID * GRID):
        row, column = divmod(i, GRID)
        value = 235 if code >> i & 1 else 20
        frame[rows[row] : rows[row + 1], columns[column] : columns[column + 1]] = value


def read_frame_number(frame: np.ndarray) -> int:
    """The number drawn into `frame`, uint8 [H, W, 3]; raises ValueError if none is readable."""
    height, width = frame.shape[:2]
    code = 0
    for i in range(GRID * GRID):
        row, column = divmod(i, GRID)
        y, x = (row + 0.5) * height / GRID_SHARE, (column + 0.5) * width / GRID_SHARE
        code |= int(frame[round(y - 1) : round(y + 1), round(x - 1) : round(x + 1)].mean() > 127) << i
    number = code >> 4
    if code & 15 != _check_bits(number):
        raise ValueError("no frame number is readable in the top left corner")
    return number


def draw_frames(
    rng: np.random.Generator, direction: tuple[float, float], size: tuple[int, int], num_frames: int, fps: float
) -> Iterator[tuple[np.ndarray, list[list[float]]]]:
    """Yield `num_frames` frames uint8 [H, W, 3], each with the boxes [x0, y0, x1, y1] of what moves in it.

    `size` is (width, height) in pixels. Objects cross a quarter to the whole of the picture a second.
    """
    width, height = size
    still = texture(rng, width, height, contrast=28)
    for _ in range(rng.integers(1, 4)):
        thing = _thing(rng, width, height, velocity=(0, 0))
        _paste(still, thing, thing.corner(0, width, height))
    movers = []
    for _ in range(rng.integers(1, 4)):
        speed = min(size) * rng.uniform(0.25, 1.0) / fps
        movers.append(_thing(rng, width, height, (direction[0] * speed, direction[1] * speed)))
    for number in range(num_frames):
        frame = still.copy()
        boxes = [_paste(frame, thing, thing.corner(number, width, height)) for thing in movers]
        draw_frame_number(frame, number)
        yield frame, [box for box in boxes if box]


def video_name(index: int, codec_name: str) -> str:
    container = CODECS[codec_name].container if codec_name in CODECS else codec_name
    return f"video_{index:06d}.{container}"


def write_video(path: Path, frames: Iterator[np.ndarray], fps: int, codec_name: str) -> None:
    """Encode frames uint8 [H, W, 3] to `path` as a camera or a web site would: long groups, default options.

    As npy they are stored as they are: a tiny model's CPU would spend more time on decoding than on learning.
    """
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


def make_video(output: Path, index: int, arguments: argparse.Namespace) -> Path:
    """Draw and write video `index` and its sidecar; the same arguments give the same files."""
    rng = np.random.default_rng([arguments.seed, index])
    name = list(CLASSES)[index % arguments.classes]
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / video_name(index, arguments.codec)
    width, height = arguments.size
    moving_boxes: list[list[list[float]]] = []

    def frames() -> Iterator[np.ndarray]:
        for frame, boxes in draw_frames(rng, CLASSES[name], (width, height), arguments.num_frames, arguments.fps):
            moving_boxes.append(boxes)
            yield frame

    write_video(path, frames(), arguments.fps, arguments.codec)
    sidecar = {
        "fps": arguments.fps,
        "width": width,
        "height": height,
        "num_frames": arguments.num_frames,
        "class": name,
        "moving_boxes": moving_boxes,
    }
    path.with_suffix(".motion.json").write_text(json.dumps(sidecar), encoding="utf-8")
    return path


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    size = int(width), int(height or width)
    if min(size) < 48 or size[0] % 2 or size[1] % 2:
        raise argparse.ArgumentTypeError(f"{text} is not an even size of at least 48 pixels, like 96 or 320x240")
    return size


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write to")
    parser.add_argument("--num-videos", type=int, default=64)
    parser.add_argument("--num-frames", type=int, default=64, help=f"frames in each video, at most {MAX_FRAMES}")
    parser.add_argument("--size", type=_size, default=(96, 96), help="pixels: 96 or 320x240 (default 96)")
    parser.add_argument("--fps", type=int, default=30)
    parser.add_argument("--classes", type=int, default=4, help=f"directions of motion, 1 to {len(CLASSES)}")
    parser.add_argument("--codec", choices=[*CODECS, CONTAINER], default="h264")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    av.logging.set_level(None)
    parsed = parse_arguments(arguments)
    if not 1 <= parsed.classes <= len(CLASSES):
        raise InputError(f"--classes {parsed.classes} is not between 1 and {len(CLASSES)}")
    if not 1 <= parsed.num_frames <= MAX_FRAMES:
        raise InputError(f"--num-frames {parsed.num_frames} is not between 1 and {MAX_FRAMES}")
    if parsed.num_videos < 1 or parsed.fps < 1 or parsed.seed < 0:
        raise InputError("--num-videos and --fps must be at least 1, --seed at least 0")
    for index in progress_bar(range(parsed.num_videos), unit="video"):
        make_video(parsed.output, index, parsed)
    log(f"{parsed.num_videos} videos of {parsed.num_frames} frames in {parsed.output}")


if __name__ == "__main__":
    run_command(main)
