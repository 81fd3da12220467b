"""Draw labelled videos whose class is told by motion alone: no single frame of them says anything about it.

    python shard_tools/synthetic_motion.py OUTPUT --num-videos 640 --seed 0

writes OUTPUT/<class>/video_000000.mp4 and its video_000000.motion.json, as synthetic_videos.py does. An object has four
coordinates of pose: place across, place down, angle and (logarithmic) size. Each of them is a circle: what leaves the
picture on the right enters it on the left, what has grown to the full size goes on at the smallest. The class says
which coordinate moves, and which way; some classes move one coordinate in the first half and another in the second. All
start anywhere with equal probability, and so are anywhere with equal probability in every later frame: the distribution
of a single frame is exactly the same in all classes. Look, speed, background, still objects and distractors (objects
like the others that move at the same speeds along the same coordinates, but to and fro) are drawn without knowing the
class.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from common.errors import InputError, run_command
from common.logging import log
from pipeline.shards.arrays import CONTAINER
from shard_tools.encoding.codecs import CODECS
from shard_tools.synthetic_videos import texture, video_name, write_video


class Pose(NamedTuple):
    """Coordinates in turns: 0 and 1 are the same place, angle and size."""

    x: float
    y: float
    angle: float
    size: float


_ACROSS, _DOWN, _TURN, _GROW = np.eye(4)
# Class -> directions in which the pose moves, one for each equal part of the video.
CLASSES: dict[str, tuple[Float[np.ndarray, "4"], ...]] = {
    "right": (_ACROSS,),
    "left": (-_ACROSS,),
    "down": (_DOWN,),
    "up": (-_DOWN,),
    "clockwise": (_TURN,),
    "counterclockwise": (-_TURN,),
    "approach": (_GROW,),
    "recede": (-_GROW,),
    "right_then_down": (_ACROSS, _DOWN),
    "down_then_right": (_DOWN, _ACROSS),
}
SPEEDS = (0.5, 1.0)  # turns per second
LOG_SIZES = math.log(2.0)  # largest : smallest
TO_AND_FRO = 0.15  # seconds in which a distractor turns back; shorter than a clip, so that it gets nowhere


@dataclass(frozen=True, slots=True)
class Thing:
    """An object. `shape` and `picture` are squares of the same side, drawn at the largest size."""

    picture: Image.Image
    shape: Image.Image
    start: Float[np.ndarray, "4"]
    speed: float  # turns per second

    def pasted(self, canvas: Image.Image, pose: Pose) -> list[tuple[int, int, int, int]]:
        """Draw it onto `canvas`, around whose borders it wraps; its boxes x0, y0, x1, y1 in pixels of the canvas."""
        side = max(3, round(self.picture.width * math.exp(-LOG_SIZES * (1 - pose.size))))
        # PIL turns counterclockwise.
        picture = self.picture.rotate(-360 * pose.angle, Image.Resampling.BILINEAR).resize((side, side))
        shape = self.shape.rotate(-360 * pose.angle, Image.Resampling.BILINEAR).resize((side, side))
        left, top, right, bottom = shape.getbbox() or (0, 0, side, side)
        boxes = []
        for x, y in product((pose.x - 1, pose.x, pose.x + 1), (pose.y - 1, pose.y, pose.y + 1)):
            corner = round(x * canvas.width - side / 2), round(y * canvas.height - side / 2)
            canvas.paste(picture, corner, shape)
            boxes.append((corner[0] + left, corner[1] + top, corner[0] + right, corner[1] + bottom))
        return boxes


def _thing(rng: np.random.Generator, side: int) -> Thing:
    """A square, an ellipse or an L of random look, pose and speed; `side`: of the largest, in pixels."""
    y, x = (np.mgrid[:side, :side] + 0.5) / side * 2 - 1
    flat = rng.uniform(0.5, 0.9)
    shapes = (
        (abs(x) < 0.7) & (abs(y) < 0.7 * flat),
        x**2 + (y / flat) ** 2 < 0.9,
        (abs(x) < 0.7) & (abs(y) < 0.7) & ((x < 0) | (y > 0)),
    )
    shape = Image.fromarray(np.uint8(255 * shapes[rng.integers(len(shapes))]))
    return Thing(Image.fromarray(texture(rng, side, side, contrast=55)), shape, rng.random(4), rng.uniform(*SPEEDS))


def _moved(thing: Thing, travel: Float[np.ndarray, "4"]) -> Pose:
    return Pose(*((thing.start + thing.speed * travel) % 1).tolist())


def _camera(rng: np.random.Generator, num_frames: int, shake: int) -> list[tuple[int, int]]:
    """Offsets of the picture in the canvas, from 0 to 2·shake pixels: a smooth random path."""
    knots = rng.uniform(0, 2 * shake, (2, num_frames // 4 + 2))
    at = np.arange(num_frames) / 4
    across, down = (np.interp(at, np.arange(knots.shape[1]), row).round().astype(int).tolist() for row in knots)
    return list(zip(across, down, strict=True))


def draw_frames(
    rng: np.random.Generator,
    class_name: str,
    size: tuple[int, int],
    num_frames: int,
    fps: float,
    movers: int = 2,
    distractors: int = 1,
    shake: int = 0,
    object_size: float = 0.7,
) -> Iterator[tuple[UInt8[np.ndarray, "H W 3"], list[list[float]]]]:
    """Yield frames, each with the boxes [x0, y0, x1, y1] in pixels of all that moves in the scene.

    size: (width, height). movers: how many objects move by the class. shake: the most that the camera leaves its
    middle position, in pixels. object_size: side of the largest object as a share of the picture's.
    """
    width, height = size
    canvas_size = width + 2 * shake, height + 2 * shake
    side = round(object_size * min(size))
    still = Image.fromarray(texture(rng, *canvas_size, contrast=28))
    for _ in range(rng.integers(1, 3)):
        thing = _thing(rng, side)
        thing.pasted(still, Pose(*thing.start))
    things = [_thing(rng, side) for _ in range(movers)]
    strays = [(_thing(rng, side), rng.permutation(np.eye(4))[0], rng.random()) for _ in range(distractors)]
    camera = _camera(rng, num_frames, shake)
    parts = CLASSES[class_name]
    travel = np.zeros(4)
    for number, (left, top) in enumerate(camera):
        frame = still.copy()
        boxes = []
        for thing, axis, phase in strays:
            swing = abs((number / fps / (2 * TO_AND_FRO) + phase) % 1 * 2 - 1) * TO_AND_FRO
            boxes += thing.pasted(frame, _moved(thing, swing * axis))
        for thing in things:
            boxes += thing.pasted(frame, _moved(thing, travel))
        travel = travel + parts[number * len(parts) // num_frames] / fps
        corners = np.array(boxes, float) - (left, top, left, top)
        corners = np.clip(corners, 0, (width, height, width, height))
        seen = [box for box in corners.tolist() if box[0] < box[2] and box[1] < box[3]]
        yield np.asarray(frame)[top : top + height, left : left + width], seen


def make_video(output: Path, index: int, arguments: argparse.Namespace) -> Path:
    """Draw and write video `index` and its sidecar; the same arguments give the same files."""
    name = arguments.classes[index % len(arguments.classes)]
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / video_name(index, arguments.codec)
    width, height = arguments.size
    rng = np.random.default_rng([arguments.seed, index])
    options = {name: getattr(arguments, name) for name in ("movers", "distractors", "shake", "object_size")}
    drawn = list(draw_frames(rng, name, (width, height), arguments.num_frames, arguments.fps, **options))
    write_video(path, (frame for frame, _ in drawn), arguments.fps, arguments.codec)
    sidecar = {
        "fps": arguments.fps,
        "width": width,
        "height": height,
        "num_frames": arguments.num_frames,
        "class": name,
        "moving_boxes": [boxes for _, boxes in drawn],
    }
    path.with_suffix(".motion.json").write_text(json.dumps(sidecar), encoding="utf-8")
    return path


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    size = int(width), int(height or width)
    if min(size) < 32 or size[0] % 2 or size[1] % 2:
        raise argparse.ArgumentTypeError(f"{text} is not an even size of at least 32 pixels, like 64 or 320x240")
    return size


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to write to; another --seed gives videos for a test")
    parser.add_argument("--num-videos", type=int, default=640)
    parser.add_argument("--num-frames", type=int, default=32)
    parser.add_argument("--size", type=_size, default=(64, 64), help="pixels: 64 or 320x240 (default 64)")
    parser.add_argument("--fps", type=int, default=30)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES), metavar="CLASS")
    parser.add_argument("--movers", type=int, default=2, help="objects that move by the class (default 2)")
    parser.add_argument("--distractors", type=int, default=1, help="objects that move to and fro (default 1)")
    parser.add_argument("--shake", type=int, default=0, help="the most the camera leaves its place, in pixels")
    parser.add_argument("--object-size", type=float, default=0.7, help="of the largest, of the picture's side (0.7)")
    parser.add_argument("--codec", choices=[*CODECS, CONTAINER], default="h264")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    parsed = parse_arguments(arguments)
    if min(parsed.num_videos, parsed.num_frames, parsed.fps, parsed.movers) < 1:
        raise InputError("--num-videos, --num-frames, --fps and --movers must be at least 1")
    if min(parsed.distractors, parsed.shake, parsed.seed) < 0:
        raise InputError("--distractors, --shake and --seed must be at least 0")
    if not 0 < parsed.object_size <= 1:
        raise InputError(f"--object-size is {parsed.object_size}: give a share above 0, up to 1")
    for index in range(parsed.num_videos):
        make_video(parsed.output, index, parsed)
    log(f"{parsed.num_videos} videos of {parsed.num_frames} frames in {len(parsed.classes)} classes: {parsed.output}")


if __name__ == "__main__":
    run_command(main)
