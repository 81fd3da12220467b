"""What the motion report says of constructed videos, and of a model on synthetic ones."""

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

CONFIG = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75)


def test_true_motion_is_that_of_the_boxes(tmp_path: Path) -> None:
    """A box in two frames of a wide video, the second time longer; the crop begins at 16 of 64."""
    (tmp_path / "a.motion.json").write_text(
        '{"width": 64, "height": 32, "moving_boxes": [[], [[16, 0, 28, 8, 2, -1]], [[16, 0, 38, 8, 2, -1]], [], []]}'
    )
    clip = Clip(
        "a",
        torch.zeros(4, 32, 32, 3, dtype=torch.uint8),
        tmp_path / "a.npy",
        [1, 2, 3, 4],
        [0.0] * 4,
        "",
    )
    motion = read_true_motion(clip, CONFIG)
    assert motion.amount.tolist() == [1, 0.75, 0.375, *[0] * 29]
    assert motion.is_moving.nonzero().flatten().tolist() == [0, 1]


def test_change_of_brightness_marks_a_fifth() -> None:
    frames = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
    frames[1, :8, :24] = 200
    motion = measure_brightness_change(Clip("a", frames, Path(), [], [], ""), CONFIG)
    assert motion.is_moving.nonzero().flatten().tolist() == [0, 1, 2, 16, 17, 18]


def test_a_model_is_measured_on_videos_with_and_without_truth(tmp_path: Path) -> None:
    synthetic_videos.main(
        [str(tmp_path), "--num-videos=6", "--size=48", "--num-frames=8", "--classes=up"]
    )
    model = AdaMAE(CONFIG).eval()
    row = measure(model, tmp_path, DataConfig(frame_stride=2))
    assert (row["num_clips"], row["motion"]) == (6, "moving objects")
    assert -1 <= row["correlation"] <= 1
    assert 0 < row["moving_fraction_visible"] < 1 > row["moving_fraction_all"] > 0
    loss, correlation = describe(row)
    assert loss.startswith(f"loss: {row['reconstruction_loss']:.3f} on 6 videos")
    assert (
        f"motion: {row['correlation']:.2f} (0: uniform sampler; motion by moving objects)"
        in correlation
    )
    random = measure(
        AdaMAE(replace(CONFIG, masking="random")).eval(), tmp_path, DataConfig(frame_stride=2)
    )
    assert random["reconstruction_loss"] > 0
    assert "correlation" not in random, "random masks have no probabilities to compare"
    for sidecar in tmp_path.rglob("*.motion.json"):
        sidecar.unlink()
    assert measure(model, tmp_path, DataConfig(frame_stride=2))["motion"] == "change of brightness"


def test_videos_without_motion_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((8, 32, 32, 3), np.uint8))
    with pytest.raises(InputError, match="nothing moves in"):
        measure(AdaMAE(CONFIG).eval(), tmp_path, DataConfig(frame_stride=2))
