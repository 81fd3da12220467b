"""Ranks that are slower than others are found and named."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torchrun
from runs import read_rows
from tiny import TINY

from training import stragglers
from training.distributed import Distributed
from training.stragglers import Spread, StragglerDetector

COUNTERS = {"wait_seconds": 0.5, "batches_ready": 20.0, "clips": 40.0}


def test_of_several_ranks_the_slow_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Distributed("cpu")
    ranks.world_size = 3
    monkeypatch.setattr(ranks, "gather", lambda host: ["one", "two", "three"])
    monkeypatch.setattr(
        stragglers, "sum_over_ranks", lambda table: table[:1] * torch.tensor([[1.0], [2.0], [1.0]]).to(table)
    )
    clock = iter((0.0, 0.25))
    monkeypatch.setattr(stragglers.time, "perf_counter", lambda: next(clock))
    detector, model = StragglerDetector(ranks), torch.nn.Identity()
    detector.watch(model)
    model(torch.zeros(1))
    means, found = detector.gather({"loss": 3.0}, 10, 0.6, COUNTERS)
    assert means == {"loss": 4.0}, "of 3, 6 and 3"
    assert found["step_ms"] == Spread(60, 60, 120, 1, "two")
    assert found["wait_ms"] == Spread(50, 50, 100, 1, "two")
    assert found["forward_ms"] == Spread(25, 25, 50, 1, "two")
    assert found["batches_ready"] == Spread(2, 2, 4, 0, "one"), "the fewest are the worst"
    assert detector.find_stragglers(found, 9) == [], "loading, compiling"
    forward, wait = detector.find_stragglers(found, 1)
    assert "rank 1 on two slows down the others: its forward pass takes 50 ms per step" in forward
    assert "rank 1 on two slows down the others: it waits 100 ms per step for data" in wait
    assert detector.find_stragglers(found, 10) == [], "once"


@pytest.mark.slow
def test_a_slow_rank_is_in_the_log_and_named_once(tmp_path: Path, synthetic_shards: Path) -> None:
    arguments = [*TINY, "log_every=2", "steps=12", f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}"]
    metrics = [{"step_ms": 100.0, "forward_ms": forward, "wait_ms": 5.0} for forward in (20.0, 60.0)]
    with torchrun.started(arguments, tmp_path / "log", before=partial(torchrun.report, metrics)) as job:
        assert job.wait() == [0], job.said()
        said = job.said()
    ranks = read_rows(tmp_path / "run")[-1]["ranks"]
    host = os.uname().nodename
    assert ranks["forward_ms"] == {"min": 20, "median": 20, "max": 60, "worst_rank": 1, "worst_host": host}
    assert said.count(f"rank 1 on {host} slows down the others: its forward pass takes 60 ms") == 1
