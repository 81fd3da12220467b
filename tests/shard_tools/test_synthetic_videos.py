import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_making import decode

from common.errors import InputError
from shard_tools import synthetic_videos
from shard_tools.encoding.codecs import CODECS
from shard_tools.synthetic_videos import draw_frame_number, read_frame_number


@pytest.mark.parametrize("codec", CODECS)
def test_frame_numbers_survive_every_codec_and_scaling(generate, codec: str) -> None:
    frames = decode(generate("--codec", codec, "--num-frames", "12"))
    assert len(frames) == 12
    for number, frame in enumerate(frames):
        assert read_frame_number(frame) == number
        for size in ((48, 48), (96, 64), (224, 224)):
            scaled = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR))
            assert read_frame_number(scaled) == number


@pytest.mark.parametrize("number", [0, 1, 255, 2048, 4095])
def test_every_number_can_be_written(number: int) -> None:
    frame = np.full((64, 96, 3), 128, np.uint8)
    draw_frame_number(frame, number)
    assert read_frame_number(frame) == number


@pytest.mark.parametrize("grey", [0, 255])
def test_a_corner_without_a_number_is_not_read_as_one(grey: int) -> None:
    with pytest.raises(ValueError, match="no frame number"):
        read_frame_number(np.full((64, 64, 3), grey, np.uint8))


def test_boxes_hold_all_that_moves(generate) -> None:
    path = generate("--seed", "3", "--size", "96", "--num-frames", "30")
    truth = json.loads(path.with_suffix(".motion.json").read_text())
    frames = np.stack(decode(path)).astype(int)
    assert (truth["width"], truth["height"], truth["num_frames"], truth["class"]) == (96, 96, 30, "right")
    assert len(truth["moving_boxes"]) == len(frames) == 30
    inside_changes, outside_changes = [], []
    for number in range(1, 30):
        inside = np.zeros((96, 96), bool)
        for x0, y0, x1, y1 in (box for n in (number - 1, number) for box in truth["moving_boxes"][n]):
            assert 0 <= x0 < x1 <= 96
            assert 0 <= y0 < y1 <= 96
            inside[int(y0) : int(y1), int(x0) : int(x1)] = True
        inside[:20, :20] = False  # the frame number's corner
        outside = ~inside
        outside[:20, :20] = False
        change = np.abs(frames[number] - frames[number - 1]).max(axis=2)
        inside_changes.append(change[inside].mean())
        outside_changes.append(change[outside].mean())
    assert np.mean(inside_changes) > 10 * np.mean(outside_changes), "the background moves, or the objects do not"


def test_same_seed_same_files_and_other_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arguments = ["--num-videos", "2", "--num-frames", "4", "--size", "48", "--seed", seed]
        synthetic_videos.main([str(tmp_path / name), *arguments])
    a, b, c = (
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*")} for n in ("a", "b", "c")
    )
    assert a == b
    assert a.keys() == c.keys()
    assert all(a[name] != c[name] for name in a if name.suffix == ".mp4")


@pytest.mark.parametrize(
    "options", [["--classes", "9"], ["--num-frames", "0"], ["--num-videos", "0"], ["--seed", "-1"]]
)
def test_impossible_wishes_are_refused(tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(InputError, match=options[0]):
        synthetic_videos.main([str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()
