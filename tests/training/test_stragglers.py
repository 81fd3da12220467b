"""Ranks that are slower than others are found and named."""

import pytest
import torch

from training import stragglers
from training.distributed import Distributed
from training.stragglers import StragglerDetector


def test_of_several_ranks_the_slow_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Distributed("cpu")
    ranks.world_size = 3
    monkeypatch.setattr(ranks, "gather", lambda host: ["one", "two", "three"])
    monkeypatch.setattr(
        stragglers, "sum_over_ranks", lambda table: table[:1] * torch.tensor([[1.0], [2.0], [1.0]]).to(table)
    )
    clock = iter((0.0, 0.25) * 2)
    monkeypatch.setattr(stragglers.time, "perf_counter", lambda: next(clock))
    detector, model = StragglerDetector(ranks), torch.nn.Identity()
    detector.watch(model)
    model(torch.zeros(1))
    assert detector.gather({"loss": 3.0}, steps=10, seconds=0.6, wait_seconds=0.5)[1] == [], "loading, compiling"
    model(torch.zeros(1))
    means, (forward, wait) = detector.gather({"loss": 3.0}, steps=10, seconds=0.6, wait_seconds=0.5)
    assert means == {"loss": 4.0}, "of 3, 6 and 3"
    assert "rank 1 on two slows down the others: its forward pass takes 50 ms per step" in forward
    assert "rank 1 on two slows down the others: it waits 100 ms per step for data" in wait
    assert "(median of 3 ranks: 50 ms)" in wait
    assert detector.gather({"loss": 3.0}, steps=10, seconds=0.6, wait_seconds=0.5)[1] == [], "once"
