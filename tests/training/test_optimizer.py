"""The schedule, the parameter groups, and updates that clip or skip."""

import pytest
import torch

from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.pipeline.config import DataConfig
from adamae.training.config import OptimizerConfig, TrainConfig
from adamae.training.optimizer import make_optimizer, parameter_groups, update
from adamae.training.schedule import Schedule


def tiny_model() -> AdaMAE:
    config = ModelConfig(
        "tiny",
        num_frames=4,
        image_size=16,
        patch_size=8,
        mask_ratio=0.5,
        encoder_depth=1,
        decoder_depth=1,
    )
    return AdaMAE(config)


def make(model: AdaMAE) -> torch.optim.Optimizer:
    config = OptimizerConfig()
    return make_optimizer(parameter_groups(model, config.weight_decay), config)


def test_schedule_warms_up_linearly_then_follows_half_a_cosine() -> None:
    optimizer = OptimizerConfig(base_lr=1e-3, min_lr=1e-5, warmup_lr=1e-6, warmup_ratio=1 / 11)
    config = TrainConfig(DataConfig(shards="s"), optimizer=optimizer, global_batch=512, steps=110)
    schedule = Schedule(config, clips_per_epoch=5 * 512)
    assert schedule.warmup_steps == 10
    assert schedule.lr(0) == pytest.approx(2e-6)
    assert schedule.lr(5) == pytest.approx((2e-6 + 2e-3) / 2)
    assert schedule.lr(10) == pytest.approx(2e-3)
    assert schedule.lr(60) == pytest.approx((2e-3 + 2e-5) / 2)
    assert schedule.lr(110) == pytest.approx(2e-5)
    assert schedule.lr(500) == pytest.approx(2e-5)


def test_epochs_count_videos_at_any_number_of_ranks() -> None:
    config = TrainConfig(DataConfig(shards="s"), epochs=3.0, batch_size=4)
    assert Schedule(config, 16).total_steps == 12
    assert Schedule(config, 16, world_size=2).total_steps == 6


def test_biases_norms_positions_and_mask_token_do_not_decay() -> None:
    model = tiny_model()
    optimizer = make(model)
    decay_of = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            decay_of[parameter] = group["weight_decay"]
    assert len(decay_of) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        is_free = name.endswith(("bias", "positions", "mask_token")) or "norm" in name
        assert decay_of[parameter] == (0 if is_free else 0.05), name


@pytest.mark.parametrize("clip_grad_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(clip_grad_norm: float | None) -> None:
    model = tiny_model()
    optimizer = make(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.decoder.mask_token.grad[0] = float("nan")
    assert not update(optimizer, 1e-3, clip_grad_norm).isfinite()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert update(optimizer, 1e-3, clip_grad_norm).isfinite()
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_clipping_scales_the_gradient_to_the_norm_asked_for() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([parameter], betas=(0.0, 0.0), fused=True)
    parameter.grad = torch.full((4,), 3.0)
    assert update(optimizer, 1e-3, clip_grad_norm=2.0).item() == pytest.approx(6.0)
    assert optimizer.state[parameter]["exp_avg"].norm().item() == pytest.approx(2.0, rel=1e-4)
