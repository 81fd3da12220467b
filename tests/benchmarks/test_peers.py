"""The steps to compare with have AdaMAE's loss on the same weights, clips and masks, and learn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adamae.benchmarks import train_throughput
from adamae.benchmarks.harness import Row
from adamae.benchmarks.peers import steps
from adamae.benchmarks.peers.naive_adamae import NaiveAdaMAE
from adamae.benchmarks.peers.steps import HUGGING_FACE, PEERS, PUBLISHED, make_step
from adamae.benchmarks.train_throughput import COMPILED, EAGER, GRAPHS, Case, list_cases, make_rows
from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.training.timing import noise_clip

CPU = torch.device("cpu")
TINY = ModelConfig(size="tiny", num_frames=4, image_size=64, mask_ratio=0.75)
RANDOM = replace(TINY, masking="random")


def make_example(config: ModelConfig) -> tuple[AdaMAE, Tensor, Tensor, Tensor]:
    """Return a model, clips, the mask that it samples for them, and its loss."""
    model = AdaMAE(config).eval()
    # Biases, norms and positions start at 0 and 1, where an error in them would not show. The noise
    # is small, since Categorical cuts probabilities off at 1e-7.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    clip = noise_clip(config, 3, CPU)
    output = model(clip, 0, 0)
    mask = torch.zeros(3, config.num_tokens, dtype=torch.bool).scatter_(1, output.masked_ids, True)
    return model, clip, mask, output.loss


@pytest.mark.parametrize(
    ("name", "config", "rtol"),
    [
        # The sampling loss weighs as much as the reconstruction loss, so that its errors show.
        (PUBLISHED, replace(TINY, sampling_loss_weight=1.0), 1e-5),
        (HUGGING_FACE, RANDOM, 2e-5),
    ],
)
def test_the_loss_of_a_peer_is_adamaes(name: str, config: ModelConfig, rtol: float) -> None:
    model, clip, mask, loss = make_example(config)
    peer = PEERS[name](model).eval()
    torch.testing.assert_close(peer(peer.prepare(clip), mask), loss, rtol=rtol, atol=0)


def test_the_naive_gradients_are_adamaes_where_the_published_code_and_the_paper_agree() -> None:
    model, clip, mask, loss = make_example(replace(TINY, detach_sampler_input=False))
    loss.backward()
    naive = NaiveAdaMAE(model).eval()
    naive(naive.prepare(clip), mask).backward()
    gradients = {name: parameter.grad for name, parameter in naive.named_parameters()}
    for name, parameter in model.named_parameters():
        # The naive tokenizer is a 3-D convolution, whose weights have another layout.
        if name.startswith("tokenizer."):
            continue
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(("name", "config"), [(PUBLISHED, TINY), (HUGGING_FACE, RANDOM)])
def test_steps_change_the_weights(
    name: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizers = []

    class KeptAdamW(torch.optim.AdamW):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            optimizers.append(self)

    monkeypatch.setattr(torch.optim, "AdamW", KeptAdamW)
    step = make_step(name, config, noise_clip(config, 2, CPU))
    weights = optimizers[0].param_groups[0]["params"]
    before = [weight.detach().clone() for weight in weights]
    step()
    changed = [not torch.equal(old, new) for old, new in zip(before, weights, strict=True)]
    # Hugging Face's model has a norm that it does not use.
    assert sum(changed) >= len(changed) - 1


class WrongAdaMAE(NaiveAdaMAE):
    def forward(self, pixels: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.tensor(0.5)


def test_nothing_is_timed_when_a_loss_is_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        pytest.fail("timed all the same")

    monkeypatch.setitem(steps.PEERS, PUBLISHED, WrongAdaMAE)
    monkeypatch.setattr(train_throughput, "in_fresh_process", fail)
    message = r"because a check failed: published step, .* has AdaMAE's"
    with pytest.raises(InputError, match=message):
        train_throughput.main(["--size", "tiny", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_adaptive_masking_alone_has_larger_batches_and_graphs() -> None:
    cases = set(list_cases([64, 128], on_gpu=True))
    assert Case("adaptive", COMPILED, 64) in cases
    assert Case("adaptive", GRAPHS, 64) in cases
    assert Case("adaptive", COMPILED, 128) in cases
    assert {case.batch_size for case in cases if case.masking == "random"} == {64}


def test_rows_are_relative_to_the_peer_of_their_race() -> None:
    slow: Row = {"milliseconds": [10.0, 30.0, 20.0], "cpu_seconds": 0.6, "peak_memory_gib": 1.0}
    fast: Row = {"milliseconds": [10.0, 10.0, 10.0], "cpu_seconds": 0.3, "peak_memory_gib": 0.5}
    disturbed = fast | {"cpu_seconds": 0.4}
    results = {case: [slow] for case in list_cases([2], on_gpu=False)}
    results[Case("adaptive", EAGER, 4)] = [slow]
    results[Case("adaptive", EAGER, 2)] = [fast, disturbed]

    bounds = {"adaptive": 400.0, "random": 400.0}
    published, eager, hugging_face, _, larger = make_rows(bounds, results)
    assert published["implementation"] == PUBLISHED
    assert published["step_median_ms"] == 20
    assert published["clips_per_second"] == 100
    assert published["speed_up"] == 1
    assert "mfu" not in published
    assert hugging_face["implementation"] == HUGGING_FACE
    assert eager["repetitions"] == 6
    assert eager["memory_ratio"] == 0.5
    assert eager["mfu"] == 0.5
    # CPU time is that of the least disturbed round: 0.3 s for 3 steps of 2 clips.
    assert eager["cpu_ms_per_clip"] == 50
    assert eager["speed_up"] == 2
    assert "memory_ratio" not in larger, "another batch size"
