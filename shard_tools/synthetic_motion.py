"""Generate the synthetic motion dataset: labeled videos whose class shows in motion alone, never in a single frame.

    python shard_tools/synthetic_motion.py OUTPUT --num-videos 640 --seed 0

writes OUTPUT/<class>/video_000000.mp4 and its video_000000.motion.json, as synthetic_videos.py does. The pose of an
object has four coordinates: x, y, angle and (logarithmic) size. Each of them is a circle: what leaves the picture on
the right enters it on the left, what has grown to the full size continues at the smallest. The class says which
coordinate moves, and in which direction; some classes move one coordinate in the first half and another in the second.
All start anywhere with equal probability, and so are anywhere with equal probability in every later frame: the
distribution of a single frame is exactly the same in all classes. Textures, speeds, background, still objects and
distractors (objects that look the same and move at the same speeds along the same coordinates, but back and forth) do
not depend on the class.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from PIL import Image

from common.errors import InputError, run_command
from common.logging import log
from common.progress import progress_bar
from shard_tools.synthetic_videos import Boxes, Frame, make_parser, make_texture, require_at_least, write_labeled_video


class Pose(NamedTuple):
    """Coordinates in turns: 0 and 1 are the same position, angle and size."""

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
SWING_S = 0.15  # seconds until a distractor turns back; shorter than a clip, so that it gets nowhere


@dataclass(frozen=True, slots=True)
class MovingObject:
    """An object. `shape` and `picture` are squares of the same side, drawn at the largest size."""

    picture: Image.Image
    shape: Image.Image
    start: Float[np.ndarray, "4"]
    speed: float  # turns per second

    def paste(self, canvas: Image.Image, pose: Pose) -> list[tuple[int, int, int, int]]:
        """Draw it onto `canvas`, around whose borders it wraps; return its boxes in pixels of the canvas."""
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


def move(thing: MovingObject, travel: Float[np.ndarray, "4"]) -> Pose:
    return Pose(*((thing.start + thing.speed * travel) % 1).tolist())


def _camera(rng: np.random.Generator, num_frames: int, shake: int) -> list[tuple[int, int]]:
    """Make a smooth random path of offsets of the picture in the canvas, from 0 to 2·shake pixels."""
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
) -> Iterator[tuple[Frame, Boxes]]:
    """Yield frames, each with the boxes of all that moves in the scene.

    size: (width, height). movers: objects that move by the class. shake: maximum displacement of the camera, in pixels.
    object_size: side of the largest object as a fraction of the picture's.
    """
    width, height = size
    canvas_size = width + 2 * shake, height + 2 * shake
    side = round(object_size * min(size))
    still = Image.fromarray(make_texture(rng, *canvas_size, contrast=28))
    for _ in range(rng.integers(1, 3)):
        thing = _make_object(rng, side)
        thing.paste(still, Pose(*thing.start))
    things = [_make_object(rng, side) for _ in range(movers)]
    strays = [(_make_object(rng, side), rng.permutation(np.eye(4))[0], rng.random()) for _ in range(distractors)]
    camera = _camera(rng, num_frames, shake)
    parts = CLASSES[class_name]
    travel = np.zeros(4)
    for number, (left, top) in enumerate(camera):
        frame = still.copy()
        boxes = []
        for thing, axis, phase in strays:
            swing = abs((number / fps / (2 * SWING_S) + phase) % 1 * 2 - 1) * SWING_S
            boxes += thing.paste(frame, move(thing, swing * axis))
        for thing in things:
            boxes += thing.paste(frame, move(thing, travel))
        travel = travel + parts[number * len(parts) // num_frames] / fps
        corners = np.array(boxes, float) - (left, top, left, top)
        corners = np.clip(corners, 0, (width, height, width, height))
        seen = [box for box in corners.tolist() if box[0] < box[2] and box[1] < box[3]]
        yield np.asarray(frame)[top : top + height, left : left + width], seen


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, num_videos=640, num_frames=32, side=64)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES), metavar="CLASS")
    parser.add_argument("--movers", type=int, default=2, help="objects that move by the class (default 2)")
    parser.add_argument("--distractors", type=int, default=1, help="objects that move back and forth (default 1)")
    parser.add_argument("--shake", type=int, default=0, help="maximum displacement of the camera in pixels")
    parser.add_argument("--object-size", type=float, default=0.7, help="largest object ÷ picture side (default 0.7)")
    parsed = parser.parse_args(arguments)
    require_at_least(parsed, 1, "num_videos", "num_frames", "fps", "movers")
    require_at_least(parsed, 0, "distractors", "shake", "seed")
    if not 0 < parsed.object_size <= 1:
        raise InputError(f"--object-size must be above 0 and at most 1, not {parsed.object_size}")
    for index in progress_bar(range(parsed.num_videos), unit="video"):
        name = parsed.classes[index % len(parsed.classes)]
        rng = np.random.default_rng([parsed.seed, index])
        options = {option: getattr(parsed, option) for option in ("movers", "distractors", "shake", "object_size")}
        frames = draw_frames(rng, name, parsed.size, parsed.num_frames, parsed.fps, **options)
        write_labeled_video(parsed, index, name, frames)
    classes = f"{len(parsed.classes)} classes"
    log(f"wrote {parsed.num_videos} videos of {parsed.num_frames} frames in {classes} to {parsed.output}")


if __name__ == "__main__":
    run_command(main)
