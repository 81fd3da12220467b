"""Generate labeled videos with known truth: what moves, where, and which frame is which.

    python shard_tools/synthetic_videos.py OUTPUT --num-videos 64 --seed 0

writes OUTPUT/<class>/video_000000.mp4 and, beside it, video_000000.motion.json: for every frame, x0 y0 x1 y1 of what
moves, in pixels, and how far it moves to the next frame, dx dy. Still and moving objects look alike, so only motion
tells the class.

`--dataset directions`: one to three objects move in the direction that is the class. The frame number stands in the top
left corner as a 4x4 grid of black and white cells and survives re-encoding and scaling.

`--dataset motion`: the pose of an object has four coordinates, x, y, angle and (logarithmic) size, each of them a
circle: what leaves the picture on the right enters it on the left, what has grown to the full size continues at the
smallest. The class says which coordinate moves and in which direction; some move one in the first half and another in
the second. All start anywhere with equal probability, and so are anywhere with equal probability in every later frame:
the distribution of a single frame is the same in all classes. So are textures, speeds, background, still objects and
distractors (objects that move alike, but back and forth).
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.video.stream import VideoStream
from jaxtyping import Float, UInt8
from PIL import Image

from common.errors import InputError, require_positive, run_command
from common.logging import log
from common.progress import progress_bar
from pipeline.shards.arrays import CONTAINER as ARRAY
from shard_tools.encoding.codecs import CODECS, CONTAINER, open_encoder

Box = tuple[float, ...]  # x0, y0, x1, y1, and how far it moves to the next frame along x and y, in pixels
Boxes = list[list[float]]  # of what moves in a frame
Frame = UInt8[np.ndarray, "H W 3"]

_ROOT = math.sqrt(0.5)
DIRECTIONS = {
    "right": (1.0, 0.0), "left": (-1.0, 0.0), "down": (0.0, 1.0), "up": (0.0, -1.0),
    "down_right": (_ROOT, _ROOT), "up_left": (-_ROOT, -_ROOT),
    "up_right": (_ROOT, -_ROOT), "down_left": (-_ROOT, _ROOT),
}  # fmt: skip
GRID = 4  # cells per side: 12 bits of frame number, 4 bits of checksum
GRID_FRACTION = 20  # a cell is 1/20 of the picture's width and height: the grid covers 1/5 of each
MAX_FRAMES = 2**12
MIN_SIDE = 48  # pixels: below, cells of the grid are too small to read


@dataclass(frozen=True, slots=True)
class Sprite:
    """A textured object. Position and velocity are in pixels and pixels per frame, of its top left corner."""

    picture: Image.Image
    shape: Image.Image  # a mask of the same size
    start: tuple[float, float]
    velocity: tuple[float, float]

    def paste(self, canvas: Image.Image, frame: int) -> Box:
        """Draw it as it stands at `frame`; what leaves the picture comes back on the other side."""
        left, top = (
            round((start + frame * velocity) % (side + own) - own)
            for start, velocity, side, own in zip(
                self.start, self.velocity, canvas.size, self.picture.size, strict=True
            )
        )
        canvas.paste(self.picture, (left, top), self.shape)
        return left, top, left + self.picture.width, top + self.picture.height, *self.velocity


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


def _make_sprite(rng: np.random.Generator, width: int, height: int, velocity: tuple[float, float]) -> Sprite:
    """Make an ellipse or a box of random size, texture and position."""
    side = min(width, height)
    w, h = (max(4, round(side * rng.uniform(0.16, 0.32))) for _ in range(2))
    y, x = np.mgrid[:h, :w]
    inside = ((x + 0.5) / w * 2 - 1) ** 2 + ((y + 0.5) / h * 2 - 1) ** 2 <= 1
    shape = inside if rng.random() < 0.5 else np.ones((h, w), bool)
    start = (rng.uniform(w, width), rng.uniform(h, height))
    picture = Image.fromarray(make_texture(rng, w, h, contrast=45))
    return Sprite(picture, Image.fromarray(np.uint8(255 * shape)), start, velocity)


def _clip(boxes: list[Box], size: tuple[int, int]) -> Boxes:
    """Return the visible parts of boxes in a picture of `size` (width, height)."""
    visible = np.array(boxes, float).reshape(-1, 6)
    visible[:, :4] = visible[:, :4].clip(0, (*size, *size))
    return [box for box in visible.tolist() if box[0] < box[2] and box[1] < box[3]]


def check_bits(number: int) -> int:
    # Adding 5 keeps an all-black corner from reading as frame 0.
    return (number + (number >> 4) + (number >> 8) + 5) & 15


def draw_frame_number(frame: np.ndarray, number: int) -> None:
    """Write `number` (below 4096) into the top left corner of `frame`, uint8 [H, W, 3]."""
    code = number << 4 | check_bits(number)
    rows, columns = ([round(i * side / GRID_FRACTION) for i in range(GRID + 1)] for side in frame.shape[:2])
    for i in range(GRID * GRID):
        row, column = divmod(i, GRID)
        value = 235 if code >> i & 1 else 20
        frame[rows[row] : rows[row + 1], columns[column] : columns[column + 1]] = value


def draw_directions(
    rng: np.random.Generator, class_name: str, size: tuple[int, int], num_frames: int, fps: float
) -> Iterator[tuple[Frame, Boxes]]:
    """Yield frames of DIRECTIONS, each with the boxes of what moves in it.

    `size` is (width, height) in pixels. Objects cross a quarter to the whole of the picture per second.
    """
    x, y = DIRECTIONS[class_name]
    still = Image.fromarray(make_texture(rng, *size, contrast=28))
    for _ in range(rng.integers(1, 4)):
        _make_sprite(rng, *size, velocity=(0, 0)).paste(still, 0)
    movers = []
    for _ in range(rng.integers(1, 4)):
        speed = min(size) * rng.uniform(0.25, 1.0) / fps
        movers.append(_make_sprite(rng, *size, (x * speed, y * speed)))
    for number in range(num_frames):
        picture = still.copy()
        boxes = [mover.paste(picture, number) for mover in movers]
        frame = np.array(picture)
        draw_frame_number(frame, number)
        yield frame, _clip(boxes, size)


Pose = Float[np.ndarray, "4"]  # x, y, angle and size in turns: 0 and 1 are the same
_ACROSS, _DOWN, _TURN, _GROW = np.eye(4)
# Class -> directions in which the pose moves, one for each equal part of the video.
MOTIONS: dict[str, tuple[Pose, ...]] = {
    "right": (_ACROSS,), "left": (-_ACROSS,), "down": (_DOWN,), "up": (-_DOWN,),
    "clockwise": (_TURN,), "counterclockwise": (-_TURN,), "approach": (_GROW,), "recede": (-_GROW,),
    "right_then_down": (_ACROSS, _DOWN), "down_then_right": (_DOWN, _ACROSS),
}  # fmt: skip
SPEEDS = (0.5, 1.0)  # turns per second
LOG_SIZES = math.log(2.0)  # largest : smallest
SWING_S = 0.15  # seconds until a distractor turns back; shorter than a clip, so that it gets nowhere


@dataclass(frozen=True, slots=True)
class MovingObject:
    """An object. `shape` and `picture` are squares of the same side, drawn at the largest size."""

    picture: Image.Image
    shape: Image.Image
    start: Pose
    speed: float  # turns per second

    def paste(self, canvas: Image.Image, pose: Pose, next_pose: Pose) -> list[Box]:
        """Draw it onto `canvas`, around whose borders it wraps; return its boxes in pixels of the canvas."""
        center_x, center_y, angle, size = pose.tolist()
        side = max(3, round(self.picture.width * math.exp(-LOG_SIZES * (1 - size))))
        picture, shape = (  # PIL turns counterclockwise
            image.rotate(-360 * angle, Image.Resampling.BILINEAR).resize((side, side))
            for image in (self.picture, self.shape)
        )
        left, top, right, bottom = shape.getbbox() or (0, 0, side, side)
        step = ((next_pose - pose + 0.5) % 1 - 0.5)[:2] * canvas.size
        boxes = []
        for x, y in product((center_x - 1, center_x, center_x + 1), (center_y - 1, center_y, center_y + 1)):
            corner = round(x * canvas.width - side / 2), round(y * canvas.height - side / 2)
            canvas.paste(picture, corner, shape)
            edges = corner[0] + left, corner[1] + top, corner[0] + right, corner[1] + bottom
            boxes.append((*edges, *step.tolist()))
        return boxes


def _make_object(rng: np.random.Generator, side: int) -> MovingObject:
    """Make a square, an ellipse or an L of random texture, pose and speed; `side`: of the largest, in pixels."""
    y, x = (np.mgrid[:side, :side] + 0.5) / side * 2 - 1
    flat = rng.uniform(0.5, 0.9)
    shapes = (
        (abs(x) < 0.7) & (abs(y) < 0.7 * flat),
        x**2 + (y / flat) ** 2 < 0.9,
        (abs(x) < 0.7) & (abs(y) < 0.7) & ((x < 0) | (y > 0)),
    )
    shape = Image.fromarray(np.uint8(255 * shapes[rng.integers(len(shapes))]))
    return MovingObject(
        Image.fromarray(make_texture(rng, side, side, contrast=55)), shape, rng.random(4), rng.uniform(*SPEEDS)
    )


def move(mover: MovingObject, travel: Pose) -> Pose:
    """Return the pose after the class has moved its coordinates by `travel` at speed 1."""
    return (mover.start + mover.speed * travel) % 1


def draw_motion(
    rng: np.random.Generator,
    class_name: str,
    size: tuple[int, int],
    num_frames: int,
    fps: float,
    movers: int = 2,
    distractors: int = 1,
    object_size: float = 0.7,
) -> Iterator[tuple[Frame, Boxes]]:
    """Yield frames, each with the boxes of all that moves in the scene.

    size: (width, height). movers: objects that move by the class. object_size: side of the largest object as a fraction
    of the picture's.
    """
    side = round(object_size * min(size))
    still = Image.fromarray(make_texture(rng, *size, contrast=28))
    for _ in range(rng.integers(1, 3)):
        unmoved = _make_object(rng, side)
        unmoved.paste(still, unmoved.start, unmoved.start)
    objects = [_make_object(rng, side) for _ in range(movers)]
    strayers = [(_make_object(rng, side), rng.permutation(np.eye(4))[0], rng.random()) for _ in range(distractors)]
    parts = MOTIONS[class_name]
    travel = np.zeros(4)
    for number in range(num_frames):
        frame = still.copy()
        boxes = []
        for mover, axis, phase in strayers:
            swing, next_swing = (
                abs((at / fps / (2 * SWING_S) + phase) % 1 * 2 - 1) * SWING_S * axis for at in (number, number + 1)
            )
            boxes += mover.paste(frame, move(mover, swing), move(mover, next_swing))
        next_travel = travel + parts[number * len(parts) // num_frames] / fps
        for mover in objects:
            boxes += mover.paste(frame, move(mover, travel), move(mover, next_travel))
        travel = next_travel
        yield np.asarray(frame), _clip(boxes, size)


DATASETS: dict[str, Any] = {"directions": DIRECTIONS, "motion": MOTIONS}


def write_video(
    path: Path, frames: Iterable[UInt8[np.ndarray, "H W C"]], size: tuple[int, int], fps: int, codec_name: str
) -> None:
    """Encode frames as a camera or a web site would: long groups, default options. As npy they are stored unencoded."""
    if codec_name == ARRAY:
        np.save(path, np.stack(list(frames)))
        return
    codec = CODECS[codec_name]
    with av.open(str(path), "w", options={"fflags": "+bitexact"}) as output:
        options = codec.fill_options(48, max(2, codec.default_quality - 5), "veryfast", "size")
        stream = cast(VideoStream, output.add_stream(codec.encoder, rate=fps, options=options))
        stream.width, stream.height = size
        stream.pix_fmt = codec.pixel_format
        stream.thread_count = 1
        open_encoder(stream.codec_context)
        for picture in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))


def write_labeled_video(stem: Path, arguments: argparse.Namespace, frames: Iterable[tuple[Frame, Boxes]]) -> None:
    """Write a video and its sidecar to `stem`.<extension>, in the folder of its class."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    container = ARRAY if arguments.codec == ARRAY else CONTAINER
    pictures, moving_boxes = zip(*frames, strict=True)
    write_video(stem.with_suffix(f".{container}"), pictures, arguments.size, arguments.fps, arguments.codec)
    width, height = arguments.size
    facts = {"fps": arguments.fps, "width": width, "height": height, "num_frames": arguments.num_frames}
    sidecar = {**facts, "class": stem.parent.name, "moving_boxes": moving_boxes}
    stem.with_suffix(".motion.json").write_text(json.dumps(sidecar), encoding="utf-8")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write to")
    parser.add_argument("--dataset", choices=DATASETS, default="directions")
    parser.add_argument("--classes", nargs="+", metavar="CLASS", help="default: four directions, or all motions")
    parser.add_argument("--num-videos", type=int, default=64)
    parser.add_argument("--num-frames", type=int, default=64, help="frames per video")
    parser.add_argument("--size", type=_size, default=(96, 96), help="pixels: 96 or 320x240 (default 96)")
    parser.add_argument("--fps", type=int, default=30)
    parser.add_argument("--codec", choices=[*CODECS, ARRAY], default="h264")
    parser.add_argument("--seed", type=int, default=0, help="another one gives videos for a test set")
    motion = parser.add_argument_group("of --dataset motion")
    motion.add_argument("--movers", type=int, default=2, help="objects that move by the class (default 2)")
    motion.add_argument("--distractors", type=int, default=1, help="objects that move back and forth (default 1)")
    motion.add_argument("--object-size", type=float, default=0.7, help="largest object ÷ picture side (default 0.7)")
    parsed = parser.parse_args(arguments)
    known = DATASETS[parsed.dataset]
    parsed.classes = parsed.classes or list(known)[: 4 if known is DIRECTIONS else None]
    if not known.keys() >= set(parsed.classes):
        raise InputError(f"--classes must be among {', '.join(known)}")
    require_positive(parsed, "num_videos", "num_frames", "fps", "movers")
    if min(parsed.distractors, parsed.seed) < 0:
        raise InputError("--distractors and --seed must be at least 0")
    if not 0 < parsed.object_size <= 1:
        raise InputError(f"--object-size must be above 0 and at most 1, not {parsed.object_size}")
    if known is DIRECTIONS and (parsed.num_frames > MAX_FRAMES or min(parsed.size) < MIN_SIDE):
        raise InputError(f"--num-frames may be {MAX_FRAMES} at most, --size must be at least {MIN_SIDE}")
    return parsed


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    size = int(width), int(height or width)
    if min(size) < 32 or size[0] % 2 or size[1] % 2:
        raise argparse.ArgumentTypeError(f"{text} is not an even size of at least 32 pixels, like 96 or 320x240")
    return size


def main(arguments: list[str] | None = None) -> None:
    av.logging.set_level(None)
    parsed = parse_arguments(arguments)
    for index in progress_bar(range(parsed.num_videos), unit="video"):
        name = parsed.classes[index % len(parsed.classes)]
        rng = np.random.default_rng([parsed.seed, index])
        scene = rng, name, parsed.size, parsed.num_frames, parsed.fps
        if parsed.dataset == "directions":
            frames = draw_directions(*scene)
        else:
            frames = draw_motion(*scene, parsed.movers, parsed.distractors, parsed.object_size)
        write_labeled_video(parsed.output / name / f"video_{index:06d}", parsed, frames)
    log(f"wrote {parsed.num_videos} videos of {parsed.num_frames} frames to {parsed.output}")


if __name__ == "__main__":
    run_command(main)
