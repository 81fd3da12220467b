"""What is measured of constructed motion, and of a model on synthetic videos."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import InputError
from figures.clips import Clip
from model.adamae import AdaMAE
from model.config import ModelConfig
from pipeline.config import DataConfig
from shard_tools import synthetic_videos
from training.motion import Motion, measure, measure_brightness_change, measure_sampling, read_true_motion

CONFIG = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75)


def test_true_motion_is_that_of_the_boxes(tmp_path: Path) -> None:
    """A box in two frames of a wide video, the second time longer."""
    (tmp_path / "a.motion.json").write_text(
        '{"width": 64, "height": 32, "moving_boxes": [[], [[16, 0, 28, 8, 2, -1]], [[16, 0, 38, 8, 2, -1]], [], []]}'
    )
    clip = Clip("a", torch.zeros(4, 32, 32, 3, dtype=torch.uint8), tmp_path / "a.npy", [1, 2, 3, 4], [0.0] * 4)
    motion = read_true_motion(clip, CONFIG)
    assert motion.amount.tolist() == [1, 0.75, 0.375, *[0] * 29]  # the crop begins at 16 of 64
    assert motion.is_moving.nonzero().flatten().tolist() == [0, 1]


def test_change_of_brightness_marks_a_fifth() -> None:
    frames = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
    frames[1, :8, :24] = 200
    motion = measure_brightness_change(Clip("a", frames, Path(), [], []), CONFIG)
    assert motion.is_moving.nonzero().flatten().tolist() == [0, 1, 2, 16, 17, 18]


def test_a_sampler_that_knows_what_moves_correlates_and_one_that_knows_nothing_shows_chance() -> None:
    motions = [Motion(moving.float(), moving) for moving in torch.rand(20, 32) < 0.25]
    moving = torch.stack([motion.is_moving for motion in motions])
    model = AdaMAE(CONFIG).eval()
    knows = measure_sampling(model, torch.where(moving, 4.0, 0.0).log_softmax(dim=1), motions)
    assert knows["correlation"] == pytest.approx(1, abs=1e-5)
    assert knows["moving_fraction_visible"] > 2 * knows["moving_fraction_all"]
    nothing = measure_sampling(model, torch.randn(20, 32).mul(1e-3).log_softmax(dim=1), motions)
    assert nothing["correlation"] == pytest.approx(0, abs=0.15)
    assert nothing["moving_fraction_visible"] == pytest.approx(nothing["moving_fraction_all"], abs=0.02)


def test_a_model_is_measured_on_videos_with_and_without_truth(tmp_path: Path) -> None:
    made = ["--dataset=motion", "--num-videos=6", "--size=32", "--num-frames=8", "--codec=npy", "--classes=up"]
    synthetic_videos.main([str(tmp_path), *made])
    model = AdaMAE(CONFIG).eval()
    row = measure(model, tmp_path, DataConfig(frame_stride=2))
    assert (row["num_clips"], row["motion"]) == (6, "moving objects")
    assert row["reconstruction_loss"] > 0
    assert -1 <= row["correlation"] <= 1
    assert 0 < row["moving_fraction_all"] < 1
    for sidecar in tmp_path.rglob("*.motion.json"):
        sidecar.unlink()
    row = measure(model.with_masking(masking="random"), tmp_path, DataConfig(frame_stride=2), limit=3)
    assert (row["num_clips"], row["motion"]) == (3, "change of brightness")
    assert "correlation" not in row


def test_videos_without_motion_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((8, 32, 32, 3), np.uint8))
    with pytest.raises(InputError, match="nothing moves in"):
        measure(AdaMAE(CONFIG).eval(), tmp_path, DataConfig(frame_stride=2))
