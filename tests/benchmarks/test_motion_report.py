"""The motion report of constructed videos, and of a model on synthetic ones."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adamae.benchmarks.motion_report import (
    describe,
    measure,
    measure_brightness_change,
    read_true_motion,
)
from adamae.common.errors import InputError
from adamae.figures.clips import Clip
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.pipeline.config import DataConfig
from adamae.shard_tools import synthetic_videos

# Patches of 8 pixels in frames of 32, and tubelets of 2 in 4 frames: 2 × 4 × 4 tokens.
CONFIG = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75)


def test_true_motion_is_that_of_the_boxes(tmp_path: Path) -> None:
    """A box moves in two frames of a video of 64 × 32, whose center crop begins at column 16.

    It covers 12 columns of the crop in the clip's first frame and 22 in its second: of the first
    token 8 and 8, of the second one 4 and 8, of the third one 0 and 6.
    """
    first_box = [16, 0, 28, 8, 2, -1]
    second_box = [16, 0, 38, 8, 2, -1]
    recorded = {
        "width": 64,
        "height": 32,
        "moving_boxes": [[], [first_box], [second_box], [], []],
    }
    (tmp_path / "a.motion.json").write_text(json.dumps(recorded))
    frames = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
    clip = Clip("a", frames, tmp_path / "a.npy", [1, 2, 3, 4], [0.0] * 4, "")
    motion = read_true_motion(clip, CONFIG)
    assert motion.amount.tolist() == [1, 0.75, 0.375, *[0] * 29]
    assert motion.is_moving.nonzero().flatten().tolist() == [0, 1]


def test_change_of_brightness_marks_a_fifth() -> None:
    frames = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
    frames[1, :8, :24] = 200
    motion = measure_brightness_change(Clip("a", frames, Path(), [], [], ""), CONFIG)
    # Three tokens brighten in the second frame and darken in the third, of the next tubelet.
    assert motion.is_moving.nonzero().flatten().tolist() == [0, 1, 2, 16, 17, 18]


def test_a_model_is_measured_on_videos_with_and_without_truth(tmp_path: Path) -> None:
    synthetic_videos.main(
        [str(tmp_path), "--num-videos=6", "--size=48", "--num-frames=8", "--classes=up"]
    )
    model = AdaMAE(CONFIG).eval()
    data = DataConfig(frame_stride=2)
    row = measure(model, tmp_path, data)
    assert row["num_clips"] == 6
    assert row["motion"] == "moving objects"
    assert -1 <= row["correlation"] <= 1
    assert 0 < row["moving_fraction_visible"] < 1
    assert 0 < row["moving_fraction_all"] < 1

    loss, correlation = describe(row)
    assert loss.startswith(f"loss: {row['reconstruction_loss']:.3f} on 6 videos")
    number = f"{row['correlation']:.2f}"
    assert f"motion: {number} (0: uniform sampler; motion by moving objects)" in correlation

    random = AdaMAE(replace(CONFIG, masking="random")).eval()
    row = measure(random, tmp_path, data)
    assert row["reconstruction_loss"] > 0
    assert "correlation" not in row, "random masks have no probabilities to compare"

    for sidecar in tmp_path.rglob("*.motion.json"):
        sidecar.unlink()
    row = measure(model, tmp_path, data)
    assert row["motion"] == "change of brightness"


def test_videos_without_motion_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((8, 32, 32, 3), np.uint8))
    with pytest.raises(InputError, match="nothing moves in"):
        measure(AdaMAE(CONFIG).eval(), tmp_path, DataConfig(frame_stride=2))
