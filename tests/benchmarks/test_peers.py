"""The steps to compare with: AdaMAE's loss on the same weights, clips and masks, and they do learn."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks import train_throughput
from benchmarks.harness import Row, Timing, noise_clip
from benchmarks.peers import steps
from benchmarks.peers.naive_adamae import NaiveAdaMAE
from benchmarks.peers.token_path import normalized_clip
from common.errors import InputError
from model.adamae import AdaMAE
from model.config import ModelConfig

CPU = torch.device("cpu")
TINY = ModelConfig(size="tiny", num_frames=4, image_size=64, mask_ratio=0.75)
RANDOM = replace(TINY, masking="random")


def make_example(config: ModelConfig) -> tuple[AdaMAE, Tensor, Tensor, Tensor]:
    """Return a model, clips, the mask that it samples for them, and its loss."""
    torch.manual_seed(0)
    model = AdaMAE(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases, norms and positions start at 0 and 1: errors would not show
            parameter.add_(0.01 * torch.randn_like(parameter))  # little: Categorical cuts probabilities at 1e-7
    clip = noise_clip(config, 3, CPU)
    output = model(clip, 0, 0)
    mask = torch.zeros(3, config.num_tokens, dtype=torch.bool).scatter_(1, output.masked_ids, True)
    return model, clip, mask, output.loss


@pytest.mark.parametrize(
    ("name", "config", "rtol"),
    [("naive", replace(TINY, sampling_loss_weight=1.0), 1e-5), ("hugging_face", RANDOM, 2e-5)],  # 1: as much as L_R
)
def test_the_loss_of_a_peer_is_adamaes(name: str, config: ModelConfig, rtol: float) -> None:
    model, clip, mask, loss = make_example(config)
    torch.testing.assert_close(getattr(steps, name)(model)(clip, mask), loss, rtol=rtol, atol=0)


def test_the_naive_gradients_are_adamaes_where_the_published_code_and_the_paper_agree() -> None:
    model, clip, mask, loss = make_example(replace(TINY, detach_sampler_input=False))
    loss.backward()
    naive = NaiveAdaMAE(model).eval()
    naive(normalized_clip(clip), mask).backward()
    parameters = dict(naive.named_parameters())
    for name, parameter in model.named_parameters():
        if not name.startswith("tokenizer."):  # which lies there as a 3-D convolution
            torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_the_naive_step_masks_the_right_number_without_repetition() -> None:
    naive = NaiveAdaMAE(AdaMAE(TINY))
    mask, _ = naive.token_sampler(torch.randn(3, TINY.num_tokens, 96))
    assert mask.sum(dim=1).tolist() == [TINY.num_tokens - TINY.num_visible] * 3


@pytest.mark.parametrize(("make", "config"), [(steps.naive_step, TINY), (steps.hugging_face_step, RANDOM)])
def test_steps_change_the_weights(make, config, monkeypatch) -> None:
    optimizers = []
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: optimizers.append(adamw(*a, **k)) or optimizers[-1])
    step = make(config, noise_clip(config, 2, CPU))
    weights = optimizers[0].param_groups[0]["params"]
    before = [weight.detach().clone() for weight in weights]
    step()
    changed = [not torch.equal(old, new) for old, new in zip(before, weights, strict=True)]
    assert sum(changed) >= len(changed) - 1  # Hugging Face's model holds a norm that it does not use


def test_nothing_is_timed_when_a_loss_is_off(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(steps, "naive", lambda model: lambda clip, mask: torch.tensor(0.5))
    monkeypatch.setattr(train_throughput, "in_fresh_process", lambda *_: pytest.fail("timed all the same"))
    with pytest.raises(InputError, match="no results written, because a check failed: naive has AdaMAE's loss"):
        train_throughput.main(["--size", "tiny", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_race_that_ended_keeps_its_rows(monkeypatch, tmp_path) -> None:
    """A stage on a GPU may be given up in the middle."""
    monkeypatch.setattr(train_throughput, "check_losses", lambda *_: None)
    monkeypatch.setattr(train_throughput, "matmul_tflops", lambda *_: 1.0)
    measured: list[str] = []

    def measure(_: object, implementation: str, *__: object) -> tuple[Timing, Row]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(implementation)
        return Timing([10.0 * len(measured)]), {"measured_peak_gib": 4.0 / len(measured)}

    monkeypatch.setattr(train_throughput, "in_fresh_process", measure)
    small = ["--size", "tiny", "--rounds", "1", "--repetitions", "1"]
    with pytest.raises(KeyboardInterrupt):
        train_throughput.main([*small, "--output", str(tmp_path)])
    published, eager = json.loads((tmp_path / "train_throughput.json").read_text())["rows"]
    assert [published["implementation"], eager["implementation"]] == measured[:2]
    assert (eager["speed_up"], eager["memory_ratio"]) == (0.5, 0.5)
    assert eager["mfu"] > 0
    assert "mfu" not in published


def test_on_a_cpu_the_speed_up_is_of_cpu_time() -> None:
    row = {"batch_size": 2, "clips_per_second": 8.0, "peak_memory_gib": 1.0, "cpu_ms_per_clip": 40.0}
    train_throughput.compare(rows := [row, {**row, "batch_size": 4, "cpu_ms_per_clip": 10.0}])
    assert rows[1]["speed_up"] == 4
    assert "memory_ratio" not in rows[1], "another batch size"
