"""What the judges say of constructed features and masks, and of a model on synthetic videos."""

from pathlib import Path

import pytest
import torch
from runs import read_rows
from tiny import TINY

from common.errors import InputError
from figures.clips import Clip
from kernels.gumbel_topk import gumbel_topk
from model.adamae import AdaMAE
from model.config import ModelConfig
from pipeline.config import DataConfig
from shard_tools import synthetic_videos
from train import train
from training.config import parse
from training.motion import (
    Motion,
    evaluate_motion,
    measure,
    measure_brightness_change,
    predict_moving_fraction,
    probe_densely,
    read_true_motion,
)

CONFIG = ModelConfig(size="tiny", num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75)


def make_motions(num_clips: int, num_tokens: int) -> list[Motion]:
    torch.manual_seed(0)
    return [
        Motion(moving.float(), moving, torch.randn(num_tokens, 2) * moving[:, None])
        for moving in torch.rand(num_clips, num_tokens) < 0.2
    ]


def test_a_probe_of_features_that_hold_the_answer_is_perfect() -> None:
    motions = make_motions(10, 64)
    answer = torch.stack([torch.cat((m.displacement, m.is_moving[:, None]), dim=1) for m in motions])  # type: ignore[arg-type]
    mixed = answer @ torch.randn(3, 5) + torch.randn(5)  # a linear layer gets it back
    found = probe_densely(mixed, motions)
    assert found["displacement_r2"] == pytest.approx(1, abs=1e-6)
    assert found["moving_iou"] == 1


def test_a_probe_of_half_the_answer_explains_half_and_of_noise_nothing() -> None:
    motions = make_motions(400, 64)
    displacement = torch.stack([motion.displacement for motion in motions])  # type: ignore[misc]
    assert probe_densely(displacement[..., :1], motions)["displacement_r2"] == pytest.approx(0.5, abs=0.02)
    noise = probe_densely(torch.randn(400, 64, 8), motions)
    assert noise["displacement_r2"] == pytest.approx(0, abs=0.01)
    assert noise["moving_iou"] == pytest.approx(0.2 * 0.2 / (0.4 - 0.2 * 0.2), abs=0.02), "chance"


def write_sidecar(folder: Path) -> Clip:
    """A box in two frames of a wide video, the second time longer."""
    (folder / "a.motion.json").write_text(
        '{"width": 64, "height": 32, "moving_boxes": [[], [[16, 0, 28, 8, 2, -1]], [[16, 0, 38, 8, 2, -1]], [], []]}'
    )
    return Clip("a", torch.zeros(4, 32, 32, 3, dtype=torch.uint8), folder / "a.npy", [1, 2, 3, 4], [0.0] * 4)


def test_true_motion_is_that_of_the_boxes(tmp_path: Path) -> None:
    motion = read_true_motion(write_sidecar(tmp_path), CONFIG)
    assert motion.amount.tolist() == [1, 0.75, 0.375, *[0] * 29]  # the crop begins at 16 of 64
    assert motion.is_moving.nonzero().flatten().tolist() == [0, 1]
    assert motion.displacement is not None
    assert motion.displacement[:3].allclose(torch.tensor([[2.0, -1.0]]))
    assert not motion.displacement[3:].any()


def test_change_of_brightness_marks_a_fifth() -> None:
    frames = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
    frames[1, :8, :24] = 200
    motion = measure_brightness_change(Clip("a", frames, Path(), [], []), CONFIG)
    assert motion.is_moving.nonzero().flatten().tolist() == [0, 1, 2, 16, 17, 18]
    assert motion.displacement is None


@pytest.mark.parametrize("ratio", [1.0, 1.5, 3.0])
def test_the_predicted_fraction_is_where_the_gradient_is_zero(ratio: float) -> None:
    """Sampled with the probabilities that it says, moving tokens are visible as often, and P ∝ (1 - π)·e."""
    num_tokens, num_visible, num_moving = 1000, 100, 200
    predicted = predict_moving_fraction(ratio, num_moving / num_tokens, num_visible / num_tokens)
    chance = torch.full((num_tokens,), (1 - predicted) * num_visible / (num_tokens - num_moving))
    chance[:num_moving] = predicted * num_visible / num_moving
    probability = (1 - chance) * torch.where(torch.arange(num_tokens) < num_moving, ratio, 1.0)
    visible, *_ = gumbel_topk(probability.log().expand(500, -1), num_visible, 0, 0)
    assert (visible < num_moving).float().mean().item() == pytest.approx(predicted, abs=0.005)


def test_a_model_is_judged_on_videos_with_truth(tmp_path: Path) -> None:
    made = ["--dataset=motion", "--num-videos=6", "--size=32", "--num-frames=8", "--codec=npy", "--classes=up"]
    synthetic_videos.main([str(tmp_path), *made])
    model = AdaMAE(CONFIG).eval()
    row = measure(model, tmp_path, DataConfig(frame_stride=2))
    assert (row["num_clips"], row["motion"]) == (6, "moving objects")
    for name in ("own", "random"):
        assert row[f"error_moving_{name}"] > 0 < row[f"error_static_{name}"]
    assert -1 <= row["correlation"] <= 1
    assert 0 < row["moving_fraction_predicted"] < 1
    assert 0 <= row["moving_iou"] <= 1 > row["displacement_r2"]
    for sidecar in tmp_path.rglob("*.motion.json"):
        sidecar.unlink()
    row = measure(model, tmp_path, DataConfig(frame_stride=2), limit=3)
    assert (row["num_clips"], row["motion"]) == (3, "change of brightness")
    assert "displacement_r2" not in row


def test_videos_without_motion_are_refused(tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "a.npy", np.zeros((8, 32, 32, 3), np.uint8))
    with pytest.raises(InputError, match="nothing moves in"):
        measure(AdaMAE(CONFIG).eval(), tmp_path, DataConfig(frame_stride=2))


def test_a_run_evaluates_motion_without_a_trace(
    synthetic_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.launch.triton_on_cpu", False)  # the interpreter is slow
    made = ["--dataset=motion", "--num-videos=6", "--size=32", "--num-frames=8", "--codec=npy", "--classes=up"]
    synthetic_videos.main([str(tmp_path / "videos"), *made])
    given = [*TINY, "model.mask_ratio=0.5", f"data.shards={synthetic_shards}", "steps=1", f"run={tmp_path / 'run'}"]
    config = parse([*given, "evaluation.every=1", f"evaluation.motion_videos={tmp_path / 'videos'}"])
    train(config)
    (row,) = (row for row in read_rows(tmp_path / "run") if "evaluation/displacement_r2" in row)
    assert {"evaluation/moving_iou", "evaluation/error_moving_random", "evaluation/correlation"} <= row.keys()
    model, random = AdaMAE(config.model), torch.get_rng_state()
    evaluate_motion(model, config)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)


def test_videos_that_are_missing_are_said_before_the_first_step(synthetic_shards: Path, tmp_path: Path) -> None:
    given = [*TINY, f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}", "evaluation.motion_videos=nowhere"]
    with pytest.raises(InputError, match="nowhere does not exist"):
        train(parse(given))
    with pytest.raises(InputError, match="motion_videos is for pre-training: remove it with task=finetune"):
        parse([*given, "task=finetune"])
