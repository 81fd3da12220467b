"""Loading in a process of its own gives the same clips and errors, and leaves nothing behind."""

import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import (
    CPU,
    check_frames,
    check_replaced,
    first_batches,
    list_descendants,
    plan_of,
    take_interrupts,
    wait_for_the_end,
)
from made_videos import broken_copy

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.loader import ClipLoader
from pipeline.loader_process import LoaderProcess
from pipeline.planning.plan import ClipPlan, EvaluationPlan
from pipeline.shards.dataset import ShardDataset

CONFIG = DataConfig(frame_stride=1, num_threads=2, max_bad_fraction=0.9)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.loader.HostLoader", make_process)


def make_process(dataset: ShardDataset, plan: ClipPlan, policy: object, *others: Any) -> LoaderProcess:
    return LoaderProcess(dataset, plan, *others)


def host_of(loader: ClipLoader) -> LoaderProcess:
    assert isinstance(loader._host, LoaderProcess)
    return loader._host


def test_batches_are_the_plans_wherever_it_begins(short: ShardDataset) -> None:
    """Also when it begins anew. Memory is used again, but not while clips are."""
    plan = plan_of(short, CONFIG)
    with ClipLoader(short, plan, CPU, CONFIG, None) as loader:
        for first in (7, 2):
            batches = list(islice(loader.batches(first), 24))
            check_frames(batches, plan, short, first)
        allocated = os.fstat(host_of(loader)._memory.fileno()).st_blocks * 512
        assert allocated < 9 * batches[0].clip.numel(), "of 24 batches"
        counters = loader.counters
        assert counters["clips"] == 48 * 4
        assert counters["videos_read"] >= counters["clips"]


def test_the_end_of_a_plan_is_the_end(short: ShardDataset) -> None:
    plan = EvaluationPlan(short, CONFIG, num_frames=8, image_size=32, batch_size=5)
    with ClipLoader(short, plan, CPU, CONFIG, None) as loader:
        batches = list(loader.batches(0))
        check_frames(batches, plan, short)
        assert [len(batch.keys) for batch in batches] == [5, 5, 2]
        assert not list(loader.batches(3))


def test_bad_videos_are_replaced_and_too_many_of_them_are_an_error(short_shards: Path, tmp_path: Path) -> None:
    bad, report = {"v02", "v05"}, tmp_path / "quarantine.jsonl"
    dataset = broken_copy(short_shards, tmp_path / "broken", bad)
    plan = plan_of(dataset, CONFIG)
    with ClipLoader(dataset, plan, CPU, CONFIG, report) as loader:
        batches = list(islice(loader.batches(0), 6))
        assert 0 < check_replaced(batches, plan, dataset, bad) <= loader.counters["bad_clips"]
    assert {json.loads(line)["key"] for line in report.read_text().splitlines()} == bad
    strict = replace(CONFIG, max_bad_fraction=0.01)
    with (
        ClipLoader(dataset, plan_of(dataset, strict), CPU, strict, report) as loader,
        pytest.raises(InputError, match=r"v0[25].* \(.*sha256 differs\)\): more than data.max_bad_fraction = 0.01"),
    ):
        list(islice(loader.batches(0), 20))


def test_datasets_of_a_mix_are_opened_again(
    short_shards: Path, vp9_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, shards=[str(short_shards), str(vp9_shards)], weights=[1, 3])
    dataset = ShardDataset.open(config)
    found = first_batches(dataset, config, 4)
    monkeypatch.undo()
    expected = first_batches(dataset, config, 4)
    for one, other in zip(expected, found, strict=True):
        assert (one.keys, one.positions) == (other.keys, other.positions)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.clip, other.clip)


def test_a_process_that_is_killed_is_named(short: ShardDataset) -> None:
    with ClipLoader(short, plan_of(short, CONFIG), CPU, CONFIG, None) as loader:
        batches = loader.batches(0)
        next(batches)
        process = host_of(loader)._process
        assert process is not None
        process.kill()
        with pytest.raises(InputError, match="the process that loads clips was ended by SIGKILL; if memory was short"):
            list(islice(batches, 5))


def test_what_keeps_it_from_starting_is_the_error(short_shards: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(short_shards, tmp_path / "shards")
    dataset = ShardDataset.open(folder)
    plan = plan_of(dataset, CONFIG)
    with (
        ClipLoader(dataset, plan, CPU, CONFIG, tmp_path) as loader,
        pytest.raises(IsADirectoryError),
    ):
        next(loader.batches(0))
    folder.rename(tmp_path / "gone")
    with ClipLoader(dataset, plan, CPU, CONFIG, None) as loader, pytest.raises(InputError, match="shards"):
        next(loader.batches(0))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_whole_job_does_not_end_it(short: ShardDataset, number: signal.Signals) -> None:
    plan = plan_of(short, CONFIG)
    with ClipLoader(short, plan, CPU, CONFIG, None) as loader:
        batches = loader.batches(0)
        first = next(batches)
        process = host_of(loader)._process
        assert process is not None
        process.send_signal(number)
        check_frames([first, *islice(batches, 5)], plan, short)


def test_closing_leaves_no_process_and_no_file(short: ShardDataset) -> None:
    assert short.samples[0].key == "v00"  # opens a file that stays open
    gc.collect()  # of other tests
    before, others = os.listdir("/proc/self/fd"), list_descendants(os.getpid())
    for count in (0, 3):
        loader = ClipLoader(short, plan_of(short, CONFIG), CPU, CONFIG, None)
        used = list(islice(loader.batches(0), count))
        pids = [pid for pid in list_descendants(os.getpid()) if pid not in others]
        assert len(pids) == (1 + CONFIG.threads if count else 0)
        for _ in range(2):
            loader.close()
        wait_for_the_end(pids)
        check_frames(used, plan_of(short, CONFIG), short)
    assert os.listdir("/proc/self/fd") == before


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from test_loader_process import *
import pipeline.loader
pipeline.loader.HostLoader = make_process
dataset = ShardDataset.open({shards!r})
with ClipLoader(dataset, plan_of(dataset, CONFIG), CPU, CONFIG, None) as loader:
    next(loader.batches(0))
    print(flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_whom_it_works_for(short_shards: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(path=sys.path, shards=str(short_shards))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=take_interrupts,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stdout.readline() == "\n"
        pids = list_descendants(program.pid)
        assert len(pids) == 1 + CONFIG.threads
        program.send_signal(number)
        program.wait(20)
    wait_for_the_end(pids)


def test_a_pickled_dataset_and_plan_are_the_same(short: ShardDataset) -> None:
    plan = plan_of(short, CONFIG, seed=3)
    dataset, found = pickle.loads(pickle.dumps((short, plan)))
    assert dataset.digest == short.digest
    assert [found.batch(number) for number in range(5)] == [plan.batch(number) for number in range(5)]
