"""Ranks that are slower than others are found and named."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torchrun

from training.distributed import Distributed
from training.stragglers import ForwardClock, Ranks, Spread

COUNTERS = {"wait_seconds": 0.5, "batches_ready": 20.0, "clips": 40.0}


def test_of_several_processes_the_slow_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "_names_of_hosts", lambda _: ["one", "two", "three"])
    ranks = Ranks(Distributed(0, 3, torch.device("cpu")))
    monkeypatch.setattr(ranks, "_table", lambda row: [row, [2 * value for value in row], row])
    means, found = ranks.gather({"loss": 3.0}, 10, 0.6, COUNTERS)
    assert means == {"loss": 4.0}, "of 3, 6 and 3"
    assert found["step_ms"] == Spread(60, 60, 120, 1, "two")
    assert found["wait_ms"] == Spread(50, 50, 100, 1, "two")
    assert found["batches_ready"] == Spread(2, 2, 4, 0, "one"), "the fewest are the worst"
    sentences = ranks.slow_ones(found)
    assert len(sentences) == 1
    assert "process 1 on two holds up the others: it waits 100 ms a step for its clips" in sentences[0]
    assert ranks.slow_ones(found) == [], "once"
    assert ranks.gather({}, 10, 0.6, COUNTERS)[1]["wait_ms"].max == 0, "since the report before"


def test_the_forward_pass_is_timed_alone() -> None:
    clock, model = ForwardClock(torch.device("cpu")), torch.nn.Identity()
    clock.watch(model)
    started = time.perf_counter()
    model(torch.zeros(1))
    assert 0 < clock.take_ms() < 1000 * (time.perf_counter() - started)
    assert clock.take_ms() == 0


def test_a_slow_process_is_seen_in_the_log_and_said_once(tmp_path: Path, synthetic_shards: Path) -> None:
    arguments = [
        "model.size=tiny", "model.num_frames=4", "model.image_size=32", "model.patch_size=8", "model.mask_ratio=0.75",
        "data.frame_stride=2", "batch_size=4", "steps=6", "precision=fp32", "device=cpu", "log_every=3",
        "data.num_threads=1", "evaluation.every=null", f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}",
    ]  # fmt: skip
    with torchrun.started(arguments, tmp_path / "log", before=partial(torchrun.slow_process_1, 0.3, 0.6)) as job:
        assert job.wait() == [0], job.said()
        said = job.said()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name in ("forward_ms", "wait_ms"):
        spread = lines[-1]["ranks"][name]
        assert spread["worst_rank"] == 1
        assert spread["worst_host"] == os.uname().nodename
        assert spread["max"] > 1.5 * spread["median"] + 200, "of 600; a busy machine slows both"
    assert lines[-1]["ranks"]["step_ms"]["max"] < 1.3 * lines[-1]["ranks"]["step_ms"]["min"], "all wait for it"
    assert said.count("process 1 on ") == 2
    assert "holds up the others: its forward pass takes" in said
    assert "holds up the others: it waits" in said
