"""Synthetic videos: their truth is true, and the same seed gives the same files.

Motion alone tells the class.
"""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_making import decode, hashes, read_frame_number

from adamae.common.errors import InputError
from adamae.shard_tools import synthetic_videos
from adamae.shard_tools.synthetic_videos import DIRECTIONS, draw_directions

SIDE = 48
NUM_FRAMES = 32


def test_frame_numbers_survive_scaling(generate: Callable[..., Path]) -> None:
    frames = decode(generate("--num-frames", "12"))
    assert len(frames) == 12
    for number, frame in enumerate(frames):
        assert read_frame_number(frame) == number
        for size in ((48, 48), (96, 64), (224, 224)):
            scaled = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR))
            assert read_frame_number(scaled) == number


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arguments = ["--num-videos", "2", "--num-frames", "4", "--size", "48", "--seed", seed]
        synthetic_videos.main([str(tmp_path / name), *arguments])
    a, b, c = (hashes(tmp_path / name) for name in "abc")
    assert len(a) == 4
    assert a == b
    assert a.keys() == c.keys()
    assert all(a[name] != c[name] for name in a if name.endswith(".mp4"))


@pytest.mark.parametrize(
    "options",
    [
        "--classes northwest",
        "--num-frames 0",
        "--num-videos 0",
        "--seed -1",
        "--size 32",
        "--size 49",
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    with pytest.raises((InputError, SystemExit)) as refused:
        synthetic_videos.main([str(tmp_path / "out"), *options.split()])
    message = f"{refused.value} {capsys.readouterr().err.splitlines()[-1:]}"
    assert options.split()[0] in message
    assert not (tmp_path / "out").exists()


def cover(boxes: Iterable[list[float]]) -> np.ndarray:
    """Return which pixels lie in any of the boxes; all boxes must lie in the picture."""
    covered = np.zeros((SIDE, SIDE), bool)
    for x0, y0, x1, y1, *_ in boxes:
        assert 0 <= x0 < x1 <= SIDE
        assert 0 <= y0 < y1 <= SIDE
        covered[int(y0) : int(y1), int(x0) : int(x1)] = True
    return covered


def select_whole(boxes: list[list[float]]) -> np.ndarray:
    """Return the boxes that no border cuts."""
    return np.array([box for box in boxes if min(box[:2]) > 0 and max(box[2:4]) < SIDE])


@pytest.mark.parametrize("name", DIRECTIONS)
def test_boxes_cover_all_that_changes_and_say_how_far_it_moves(name: str) -> None:
    num_compared = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        pictures, boxes = zip(*draw_directions(rng, name, (SIDE, SIDE), NUM_FRAMES), strict=True)
        frames = np.stack(pictures)
        # Leave out the frame number.
        frames[:, :10, :10] = 0
        assert (frames[0] != frames[-1]).any()
        for number, (now, later) in enumerate(itertools.pairwise(boxes)):
            changed = (frames[number] != frames[number + 1]).any(-1)
            assert not (changed & ~cover([*now, *later])).any()
            whole_now = select_whole(now)
            whole_later = select_whole(later)
            if len(whole_now) == len(whole_later) > 0:
                moved = whole_later[:, :4] - whole_now[:, :4]
                expected = np.tile(whole_now[:, 4:], 2)
                assert np.abs(moved - expected).max() <= 1, "rounded to pixels twice"
                num_compared += len(moved)
    assert num_compared > 20


def test_a_sidecar_says_what_moves(generate: Callable[..., Path]) -> None:
    video = generate("--size", "96", "--num-frames", "30")
    truth = json.loads(video.with_suffix(".motion.json").read_text())
    moving_boxes = truth.pop("moving_boxes")
    assert truth == {"fps": 30, "width": 96, "height": 96, "num_frames": 30, "class": "right"}
    assert len(moving_boxes) == 30
