"""Ranks that are slower than others are found and named."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torchrun
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
    detector, model = StragglerDetector(ranks), torch.nn.Identity()
    detector.watch(model)
    model(torch.zeros(1))
    means, found = detector.gather({"loss": 3.0}, 10, 0.6, COUNTERS)
    assert means == {"loss": 4.0}, "of 3, 6 and 3"
    assert found["step_ms"] == Spread(60, 60, 120, 1, "two")
    assert found["wait_ms"] == Spread(50, 50, 100, 1, "two")
    assert found["batches_ready"] == Spread(2, 2, 4, 0, "one"), "the fewest are the worst"
    assert 0 < found["forward_ms"].min < 60
    (sentence,) = detector.find_stragglers(found)
    assert "rank 1 on two slows down the others: it waits 100 ms per step for data" in sentence
    assert detector.find_stragglers(found) == [], "once"
    assert detector.gather({}, 10, 0.6, COUNTERS)[1]["wait_ms"].max == 0, "since the report before"


@pytest.mark.slow
def test_a_slow_rank_is_seen_in_the_log_and_said_once(tmp_path: Path, synthetic_shards: Path) -> None:
    arguments = [*TINY, "log_every=3", f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}"]
    with torchrun.started(arguments, tmp_path / "log", before=partial(torchrun.slow_down_rank_1, 0.6, 1.0)) as job:
        assert job.wait() == [0], job.said()
        said = job.said()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name in ("forward_ms", "wait_ms"):
        spread = lines[-1]["ranks"][name]
        assert spread["worst_rank"] == 1
        assert spread["worst_host"] == os.uname().nodename
        assert spread["max"] > 1.5 * spread["median"] + 200, "of 1000; a busy machine slows both"
    assert lines[-1]["ranks"]["step_ms"]["max"] < 1.3 * lines[-1]["ranks"]["step_ms"]["min"], "all wait for it"
    assert said.count("rank 1 on ") == 2
    assert "slows down the others: its forward pass takes" in said
    assert "slows down the others: it waits" in said
