"""The steps to compare with: AdaMAE's loss on the same weights, clips and masks, and they do learn."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adamae.benchmarks import train_throughput
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
    with torch.no_grad():
        for parameter in (
            model.parameters()
        ):  # biases, norms and positions start at 0 and 1: errors would not show
            parameter.add_(
                0.01 * torch.randn_like(parameter)
            )  # little: Categorical cuts probabilities at 1e-7
    clip = noise_clip(config, 3, CPU)
    output = model(clip, 0, 0)
    mask = torch.zeros(3, config.num_tokens, dtype=torch.bool).scatter_(1, output.masked_ids, True)
    return model, clip, mask, output.loss


@pytest.mark.parametrize(
    ("name", "config", "rtol"),
    [
        (PUBLISHED, replace(TINY, sampling_loss_weight=1.0), 1e-5),
        (HUGGING_FACE, RANDOM, 2e-5),
    ],  # 1: as much as L_R
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
    parameters = dict(naive.named_parameters())
    for name, parameter in model.named_parameters():
        if not name.startswith("tokenizer."):  # which lies there as a 3-D convolution
            torch.testing.assert_close(
                parameters[name].grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name
            )


@pytest.mark.parametrize(("name", "config"), [(PUBLISHED, TINY), (HUGGING_FACE, RANDOM)])
def test_steps_change_the_weights(name: str, config: ModelConfig, monkeypatch) -> None:
    optimizers = []
    adamw = torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *a, **k: optimizers.append(adamw(*a, **k)) or optimizers[-1]
    )
    step = make_step(name, config, noise_clip(config, 2, CPU))
    weights = optimizers[0].param_groups[0]["params"]
    before = [weight.detach().clone() for weight in weights]
    step()
    changed = [not torch.equal(old, new) for old, new in zip(before, weights, strict=True)]
    assert (
        sum(changed) >= len(changed) - 1
    )  # Hugging Face's model holds a norm that it does not use


def test_nothing_is_timed_when_a_loss_is_off(monkeypatch, tmp_path) -> None:
    wrong = type("Wrong", (NaiveAdaMAE,), {"forward": lambda *_: torch.tensor(0.5)})
    monkeypatch.setitem(steps.PEERS, PUBLISHED, wrong)
    monkeypatch.setattr(
        train_throughput, "in_fresh_process", lambda *_: pytest.fail("timed all the same")
    )
    with pytest.raises(
        InputError, match=r"because a check failed: published step, .* has AdaMAE's"
    ):
        train_throughput.main(["--size", "tiny", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_rows_are_relative_to_the_peer_of_their_race() -> None:
    adaptive = [
        Case("adaptive", name, size)
        for name, size in ((COMPILED, 64), (GRAPHS, 64), (COMPILED, 128))
    ]
    assert {*list_cases([64, 128], on_gpu=True)} > {*adaptive}
    found = {
        case: [{"milliseconds": [10.0, 30.0, 20.0], "cpu_seconds": 0.6, "peak_memory_gib": 1.0}]
        for case in (*list_cases([2], on_gpu=False), Case("adaptive", EAGER, 4))
    }
    found[Case("adaptive", EAGER, 2)] = [
        {"milliseconds": [10.0, 10.0, 10.0], "cpu_seconds": seconds, "peak_memory_gib": 0.5}
        for seconds in (0.3, 0.4)
    ]
    published, eager, hugging_face, _, larger = make_rows(
        {"adaptive": 400.0, "random": 400.0}, found
    )
    assert (published["implementation"], hugging_face["implementation"]) == (
        PUBLISHED,
        HUGGING_FACE,
    )
    assert (published["step_median_ms"], published["clips_per_second"], published["speed_up"]) == (
        20,
        100,
        1,
    )
    assert (eager["repetitions"], eager["memory_ratio"], eager["mfu"]) == (6, 0.5, 0.5)
    assert (eager["cpu_ms_per_clip"], eager["speed_up"]) == (50, 2), (
        "of CPU time: of the least disturbed round"
    )
    assert "mfu" not in published
    assert "memory_ratio" not in larger, "another batch size"
