"""Synthetic videos: their truth is true, motion alone tells the class, and the same seed gives the same files."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from frame_numbers import read_frame_number
from PIL import Image
from shard_making import decode

from common.errors import InputError
from shard_tools import synthetic_videos
from shard_tools.encoding.codecs import CODECS
from shard_tools.synthetic_videos import DATASETS, DIRECTIONS, MOTIONS, draw_directions, draw_motion

SIZE, NUM_FRAMES, FPS = (48, 48), 32, 30
NAMES = list(MOTIONS)
Video = tuple[np.ndarray, list[list[list[float]]]]  # frames, boxes


@pytest.mark.parametrize("codec", CODECS)
def test_frame_numbers_survive_every_codec_and_scaling(generate: Callable[..., Path], codec: str) -> None:
    frames = decode(generate("--codec", codec, "--num-frames", "12"))
    assert len(frames) == 12
    for number, frame in enumerate(frames):
        assert read_frame_number(frame) == number
        for size in ((48, 48), (96, 64), (224, 224)):
            scaled = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR))
            assert read_frame_number(scaled) == number


def cover(boxes: list[list[float]], side: int, margin: int) -> np.ndarray:
    covered = np.zeros((side, side), bool)
    for x0, y0, x1, y1, *_ in boxes:
        assert 0 <= x0 < x1 <= side
        assert 0 <= y0 < y1 <= side
        covered[int(max(0, y0 - margin)) : int(y1) + 2 * margin, int(max(0, x0 - margin)) : int(x1) + 2 * margin] = True
    return covered


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_same_seed_gives_the_same_files(tmp_path: Path, dataset: str) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arguments = ["--num-videos", "2", "--num-frames", "4", "--size", "48", "--seed", seed]
        synthetic_videos.main(["--dataset", dataset, str(tmp_path / name), *arguments])
    a, b, c = (
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*")} for n in ("a", "b", "c")
    )
    assert len(a) == 4
    assert a == b
    assert a.keys() == c.keys()
    assert all(a[name] != c[name] for name in a if name.suffix == ".mp4")


@pytest.mark.parametrize(
    "options",
    ["--classes northwest", "--num-frames 0", "--num-videos 0", "--seed -1", "--object-size 1.5", "--size 32"],
)
def test_impossible_options_are_refused(tmp_path: Path, options: str) -> None:
    with pytest.raises(InputError, match=options.split()[0]):
        synthetic_videos.main([str(tmp_path / "out"), *options.split()])
    assert not (tmp_path / "out").exists()


def test_frames_can_be_stored_unencoded(tmp_path: Path) -> None:
    arguments = ["--num-videos", "2", "--size", "48x32", "--num-frames", "8", "--classes", "up", "recede"]
    synthetic_videos.main([str(tmp_path), "--dataset", "motion", *arguments, "--codec", "npy"])
    expected = draw_motion(np.random.default_rng([0, 1]), "recede", (48, 32), 8, 30)
    assert np.array_equal(np.load(tmp_path / "recede/video_000001.npy"), [frame for frame, _ in expected])
    assert json.loads((tmp_path / "recede/video_000001.motion.json").read_text())["class"] == "recede"


def draw(seed: int, name: str) -> Video:
    rng = np.random.default_rng(seed)
    frames, boxes = zip(*draw_motion(rng, name, SIZE, NUM_FRAMES, FPS), strict=True)
    return np.stack(frames), list(boxes)


def test_poses_are_spread_alike_at_every_time_in_every_class() -> None:
    """Place, angle and size are circles: moved by any class for any time, a uniform distribution stays uniform."""
    first = draw(7, NAMES[0])[0]
    rng = np.random.default_rng(0)
    for name, directions in MOTIONS.items():
        frames = draw(7, name)[0]
        np.testing.assert_array_equal(frames[0], first[0])
        assert name == NAMES[0] or (frames[-1] != first[-1]).any()
        travel = sum(directions) * rng.random()
        speeds = synthetic_videos.SPEEDS
        objects = [synthetic_videos.MovingObject(None, None, rng.random(4), rng.uniform(*speeds)) for _ in range(2000)]  # type: ignore[arg-type]
        poses = np.array([synthetic_videos.move(it, travel) for it in objects])
        histograms = np.stack([np.histogram(column, 10, (0, 1))[0] for column in poses.T])
        chi_square = ((histograms - 200) ** 2 / 200).sum(1)
        assert chi_square.max() < 33.7, name  # p = 1e-4 at 9 degrees of freedom


def test_what_moves_is_where_its_displacement_says() -> None:
    """Compared are boxes that no border cuts, of classes in which all that moves keeps its size and angle."""
    compared = 0
    for seed, name in ((0, "right"), (1, "up"), (2, "right_then_down")):
        _, boxes = zip(*draw_motion(np.random.default_rng(seed), name, SIZE, 32, FPS, distractors=0), strict=True)
        for now, later in itertools.pairwise(boxes):
            whole = [
                np.array([box for box in frame if min(box[:2]) > 0 and max(box[2:4]) < SIZE[0]])
                for frame in (now, later)
            ]
            if len(whole[0]) == len(whole[1]) > 0:
                moved = whole[1][:, :4] - whole[0][:, :4]
                assert np.abs(moved - np.tile(whole[0][:, 4:], 2)).max() <= 1, "rounded to pixels twice"
                compared += len(moved)
    assert compared > 20


@pytest.mark.parametrize(("draw", "names"), [(draw_motion, NAMES), (draw_directions, list(DIRECTIONS))])
def test_boxes_cover_all_that_changes(draw: Callable, names: list[str]) -> None:
    for seed in range(6):
        pictures, boxes = zip(*draw(np.random.default_rng(seed), names[seed], SIZE, NUM_FRAMES, FPS), strict=True)
        frames = np.stack(pictures)
        if draw == draw_directions:
            frames[:, :10, :10] = 0  # the frame number
        for t in range(NUM_FRAMES - 1):
            covered = cover(boxes[t] + boxes[t + 1], SIZE[0], 1)
            assert not ((frames[t] != frames[t + 1]).any(-1) & ~covered).any()
        assert (frames[0] != frames[-1]).any()


def test_a_sidecar_says_what_moves(generate: Callable[..., Path]) -> None:
    truth = json.loads(generate("--size", "96", "--num-frames", "30").with_suffix(".motion.json").read_text())
    assert (truth["width"], truth["height"], truth["num_frames"], truth["class"]) == (96, 96, 30, "right")
    assert len(truth["moving_boxes"]) == 30
