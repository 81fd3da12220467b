"""Runs of several processes, and what happens to those on a cluster: signals, frozen and lost processes."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torchrun
from safetensors.torch import load_file

from train import train
from training.config import parse

TINY = [
    "model.size=tiny", "model.num_frames=4", "model.image_size=32", "model.patch_size=8", "model.mask_ratio=0.75",
    "data.frame_stride=2", "global_batch=4", "batch_size=1", "precision=fp32", "optimizer.base_lr=0.06",
    "optimizer.warmup_epochs=0", "device=cpu", "log_every=1", "data.num_threads=1", "evaluation.every=null",
]  # fmt: skip
SLOW_S = 0.3  # of a step that is waited for


@pytest.fixture
def arguments(synthetic_shards, tmp_path) -> list[str]:
    return [*TINY, "steps=6", f"data.shards={synthetic_shards}", f"run={tmp_path / 'run'}"]


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "log"


def figures(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until(happens: Callable[[], bool], seconds: float) -> float:
    """Seconds that it took; fails where it does not happen in time."""
    started = time.monotonic()
    while not happens():
        assert time.monotonic() < started + seconds, f"not within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - started


def saved(run: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*"))


def test_a_resumed_run_ends_with_the_same_weights_however_its_processes_lie(arguments, log, tmp_path):
    last = tmp_path / "run/checkpoints/step-00000006"
    torchrun.run([*arguments, "checkpoint_every=3"], log, per_node=4)
    whole = load_file(last / "model.safetensors")
    shutil.rmtree(last)
    torchrun.run([*arguments, "checkpoint_every=3"], log, nodes=2, per_node=2)
    assert all(torch.equal(whole[name], value) for name, value in load_file(last / "model.safetensors").items())


@pytest.mark.parametrize(
    ("processes", "overrides"), [(2, ["global_batch=null", "batch_size=2"]), (3, ["batch_size=2"])]
)
def test_a_run_goes_on_in_any_number_of_processes(arguments, log, tmp_path, processes, overrides):
    """In more of them, and then in one again."""
    checkpoints = tmp_path / "run/checkpoints"
    arguments = [*arguments, "model.masking=random", "checkpoint_every=2"]
    in_one = parse([*arguments, "global_batch=null", "batch_size=4"])
    train(in_one)
    alone = figures(tmp_path / "run")
    for step in (4, 6):
        shutil.rmtree(checkpoints / f"step-{step:08d}")
    torchrun.run([*arguments, *overrides], log, per_node=processes)
    shutil.rmtree(checkpoints / "step-00000006")
    train(in_one)
    for one, several in zip(alone, figures(tmp_path / "run"), strict=True):
        for name in ("loss", "grad_norm"):  # of the same four clips
            assert several[name] == pytest.approx(one[name], rel=1e-4), f"{name} of step {one['step']}"


def everybody(job: torchrun.Job, number: int) -> None:
    for pid in (*job.workers().values(), *(agent.pid for agent in job.agents)):
        os.kill(pid, number)


def agent_only(job: torchrun.Job, number: int) -> None:
    os.kill(job.agents[0].pid, number)


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (everybody, signal.SIGTERM),
        (everybody, signal.SIGUSR1),
        (agent_only, signal.SIGHUP),
        (agent_only, signal.SIGINT),
        (agent_only, signal.SIGKILL),
    ],
)
def test_whatever_ends_a_run_it_has_saved_its_last_step(arguments, log, tmp_path, send, number):
    with torchrun.started([*arguments, "steps=1000"], log, before=partial(torchrun.slowed, SLOW_S)) as job:
        until(lambda: len(figures(tmp_path / "run")) > 1, 120)
        send(job, number)
        assert job.gone(20), job.said()
        assert saved(tmp_path / "run") == [len(figures(tmp_path / "run"))], job.said()


def test_steps_of_four_seconds_are_saved_ten_seconds_after_the_signal(arguments, log, tmp_path):
    arguments = [*arguments, "steps=1000", "log_every=10", "batch_size=2"]
    with torchrun.started(arguments, log, before=partial(torchrun.slowed, 4.0)) as job:
        until((tmp_path / "run/tensorboard").exists, 120)
        time.sleep(4.0 + 4.2)  # DDP's buckets, and a little of the first step
        everybody(job, signal.SIGTERM)
        assert until(lambda: bool(saved(tmp_path / "run")), 10) < 10
        assert job.gone(10)


def test_a_run_that_waits_for_clips_hears_signals(arguments, log, tmp_path):
    with torchrun.started([*arguments, "steps=1000"], log, before=partial(torchrun.stuck_after, 20)) as job:
        until(lambda: len(figures(tmp_path / "run")) > 0, 120)
        before = -1
        while before != len(figures(tmp_path / "run")):
            before = len(figures(tmp_path / "run"))
            time.sleep(1)
        everybody(job, signal.SIGTERM)
        until(lambda: saved(tmp_path / "run") == [before], 5)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_does_not_answer_is_named_and_nothing_is_lost(arguments, log, tmp_path, number):
    with torchrun.started([*arguments, "steps=1000", "distributed.timeout_s=5"], log) as job:
        until(lambda: len(figures(tmp_path / "run")) > 1, 120)
        os.kill(job.workers()[1], number)
        until(lambda: not torchrun.is_alive(job.workers()[0]), 30)
        assert f"error: process 1 on {os.uname().nodename} does not answer" in job.said()
        assert saved(tmp_path / "run") == [len(figures(tmp_path / "run"))]
