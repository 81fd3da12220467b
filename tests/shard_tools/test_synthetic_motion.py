"""Motion tells the class of these videos, and nothing else does."""

import json
from itertools import pairwise

import av
import numpy as np
import pytest
from PIL import Image

from common.errors import InputError
from shard_tools import synthetic_motion
from shard_tools.synthetic_motion import CLASSES, draw_frames

SIZE, NUM_FRAMES, FPS = (48, 48), 32, 30
NAMES = list(CLASSES)


def drawn(seed: int, name: str, **options) -> tuple[np.ndarray, list[list[list[float]]]]:
    frames, boxes = zip(*draw_frames(np.random.default_rng(seed), name, SIZE, NUM_FRAMES, FPS, **options), strict=True)
    return np.stack(frames), list(boxes)


@pytest.fixture(scope="module")
def videos() -> list[tuple[int, np.ndarray, list]]:
    """(class, frames, boxes) of 300 videos, 30 of each class."""
    return [(seed % len(NAMES), *drawn(seed, NAMES[seed % len(NAMES)])) for seed in range(300)]


def accuracy_of_ridge(features: np.ndarray, labels: np.ndarray, strength: float) -> float:
    """Test accuracy, the first 70 % used to fit."""
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    features = np.hstack((features, np.ones((len(features), 1))))
    split = int(0.7 * len(labels))
    x, y = features[:split], np.eye(len(NAMES))[labels[:split]]
    weights = x.T @ np.linalg.solve(x @ x.T + strength * np.eye(split), y)
    return float((np.argmax(features[split:] @ weights, 1) == labels[split:]).mean())


def motion_features(frames: np.ndarray, boxes: list) -> np.ndarray:
    """How well each of the four ways to move explains the change of brightness, in both halves: 8 numbers.

    At every pixel that something moves over, -dI/dt is a velocity times the gradient; right, down, clockwise and
    approach have velocities (1, 0), (0, 1), (-y, x) and (x, y) about the middle of the thing.
    """
    grey = frames.mean(-1).astype(np.float32)
    explained = np.zeros((len(grey) - 1, 4))
    places = np.mgrid[: SIZE[1], : SIZE[0]]
    for t, (now, after) in enumerate(pairwise(grey)):
        middle = (now + after) / 2
        dy, dx = np.gradient(middle)
        for x0, y0, x1, y1 in boxes[t]:
            box = np.s_[int(y0) : int(y1) + 1, int(x0) : int(x1) + 1]
            y, x = places[:, *box]
            x, y = x - (x0 + x1) / 2, y - (y0 + y1) / 2
            change, across, down = (now - after)[box], dx[box], dy[box]
            ways = across, down, x * down - y * across, x * across + y * down
            explained[t] += [float((change * way).sum()) / (float((way**2).sum()) + 1) for way in ways]
    half = len(explained) // 2
    return np.concatenate((np.median(explained[:half], 0), np.median(explained[half:], 0)))


def test_a_still_frame_says_nothing_and_motion_says_it(videos):
    labels = np.array([label for label, _, _ in videos])
    rng = np.random.default_rng(0)
    small = [
        np.asarray(Image.fromarray(frames[rng.integers(len(frames))]).resize((16, 16)), np.float32).ravel()
        for _, frames, _ in videos
    ]
    # Ten classes, 90 test videos: chance is .100, and three standard deviations of it .095.
    assert accuracy_of_ridge(np.stack(small), labels, strength=300) < 0.195
    moving = np.stack([motion_features(frames, boxes) for _, frames, boxes in videos])
    assert accuracy_of_ridge(moving, labels, strength=1) > 0.5


@pytest.mark.parametrize("name", NAMES[1:])
def test_all_classes_start_from_the_same_frame(name):
    one, other = drawn(7, NAMES[0])[0], drawn(7, name)[0]
    np.testing.assert_array_equal(one[0], other[0])
    assert (one[-1] != other[-1]).any()


def test_poses_are_spread_alike_at_every_time_in_every_class():
    """Place, angle and size are circles: moved by any class for any time, an even spread stays even."""
    rng = np.random.default_rng(0)
    for name, parts in CLASSES.items():
        travel = sum(parts) * rng.random()
        things = [
            synthetic_motion.MovingObject(None, None, rng.random(4), rng.uniform(*synthetic_motion.SPEEDS))
            for _ in range(2000)
        ]
        poses = np.array([synthetic_motion._move(thing, travel) for thing in things])
        histograms = np.stack([np.histogram(column, 10, (0, 1))[0] for column in poses.T])
        chi_square = ((histograms - 200) ** 2 / 200).sum(1)
        assert chi_square.max() < 33.7, name  # p = 1e-4 at 9 degrees of freedom


def test_opposite_classes_are_each_other_backwards_in_direction():
    for name, opposite in (
        ("right", "left"),
        ("down", "up"),
        ("clockwise", "counterclockwise"),
        ("approach", "recede"),
    ):
        for one, other in zip(CLASSES[name], CLASSES[opposite], strict=True):
            np.testing.assert_array_equal(one, -other)


def test_shake_moves_the_background_and_nothing_else_does():
    still, shaken = drawn(3, "clockwise")[0], drawn(3, "clockwise", shake=4)[0]
    assert still.shape == shaken.shape
    share_still = (still[0] == still[10]).all(-1).mean()
    share_shaken = (shaken[0] == shaken[10]).all(-1).mean()
    assert share_still > 0.3
    assert share_shaken < 0.1


def test_boxes_cover_all_that_changes_and_lie_in_the_picture():
    for seed in range(10):
        frames, boxes = drawn(seed, NAMES[seed])
        for t in range(NUM_FRAMES - 1):
            covered = np.zeros(frames.shape[1:3], bool)
            for x0, y0, x1, y1 in boxes[t] + boxes[t + 1]:
                assert 0 <= x0 < x1 <= SIZE[0]
                assert 0 <= y0 < y1 <= SIZE[1]
                covered[int(max(0, y0 - 1)) : int(y1) + 2, int(max(0, x0 - 1)) : int(x1) + 2] = True
            assert not ((frames[t] != frames[t + 1]).any(-1) & ~covered).any()


def test_files_and_sidecars_are_the_same_every_time(tmp_path):
    arguments = ["--num-videos", "3", "--size", "48", "--num-frames", "8", "--classes", "up", "recede", "--shake", "2"]
    for folder in ("one", "two"):
        synthetic_motion.main([str(tmp_path / folder), *arguments])
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert [str(file) for file in files] == [
        "recede/video_000001.motion.json", "recede/video_000001.mp4", "up/video_000000.motion.json",
        "up/video_000000.mp4", "up/video_000002.motion.json", "up/video_000002.mp4",
    ]  # fmt: skip
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    sidecar = json.loads((tmp_path / "one/up/video_000000.motion.json").read_text())
    assert sidecar["class"] == "up"
    assert len(sidecar["moving_boxes"]) == sidecar["num_frames"] == 8
    with av.open(str(tmp_path / "one/up/video_000000.mp4")) as video:
        assert sum(1 for _ in video.decode(video=0)) == 8


def test_drawn_frames_can_be_stored_as_they_are(tmp_path):
    arguments = ["--num-videos", "2", "--size", "48x32", "--num-frames", "8", "--classes", "up", "recede"]
    synthetic_motion.main([str(tmp_path), *arguments, "--codec", "npy"])
    drawn = draw_frames(np.random.default_rng([0, 1]), "recede", (48, 32), 8, 30)
    assert np.array_equal(np.load(tmp_path / "recede/video_000001.npy"), [frame for frame, _ in drawn])


def test_impossible_numbers_are_refused(tmp_path):
    with pytest.raises(InputError, match="at least 1"):
        synthetic_motion.main([str(tmp_path), "--num-videos", "0"])
    with pytest.raises(InputError, match="at least 0"):
        synthetic_motion.main([str(tmp_path), "--shake", "-1"])
