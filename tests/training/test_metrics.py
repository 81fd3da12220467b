"""What a run writes about itself, also beside damaged lines, on a full disk, and of processes that are not alike."""

import errno
import gc
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchrun

from common.errors import run_command
from pipeline.config import DataConfig
from pipeline.loader import ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.shards.dataset import ShardDataset
from training.distributed import Distributed
from training.reviews.metrics import SKIPPED, Metrics, figures_of, forget_after
from training.reviews.sinks import TensorBoard
from training.stragglers import ForwardClock, Ranks, Spread

ALONE = Distributed(0, 1, torch.device("cpu"))
COUNTERS = {"wait_seconds": 0.5, "batches_ready": 20.0, "clips": 40.0}


def metrics_in(folder: Path) -> Metrics:
    places = SimpleNamespace(metrics=folder / "metrics.jsonl", tensorboard=folder / "tensorboard")
    horizon = SimpleNamespace(total_steps=100, global_batch=4)
    return Metrics(places, ALONE, horizon, 0, [TensorBoard(places.tensorboard, 0)])  # type: ignore[arg-type]


def report(metrics: Metrics, step: int) -> None:
    metrics.add({"loss": torch.tensor(1.0), SKIPPED: torch.tensor(0.0)})
    metrics.report(step, 0.1, COUNTERS)


@pytest.mark.parametrize(
    "foreign",
    [b"\xff\xfe\n", b"hello\n", b"[1]\n", b'"step"\n', b'{"loss": 1}\n', b'{"step": "2"}\n', b"[" * 10**5 + b"\n"],
    ids=["a bad byte", "words", "a list", "a string", "no step", "a step that is text", "brackets"],
)
def test_lines_that_no_run_wrote_are_put_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], foreign: bytes
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss": NaN}\n' + foreign + b'{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    forget_after(file, 2)
    assert file.read_bytes() == b'{"step": 1, "loss": NaN}\n{"step": 2}\n'
    assert (tmp_path / "metrics.jsonl.foreign").read_bytes() == foreign
    assert "held 1 lines that no run has written" in capsys.readouterr().err
    forget_after(file, 2)
    assert capsys.readouterr().err == ""


def test_what_a_kill_has_cut_short_is_no_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    forget_after(file, 2)
    assert file.read_bytes() == b'{"step": 1}\n'
    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_a_disk_that_is_full_is_named_with_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """TensorBoard's file is written by a thread of its own, whose errors come with the next figure, or at the end."""

    def run() -> None:
        with metrics_in(tmp_path) as metrics:
            if name == "tensorboard":  # whose records are larger than lines; so its file would be full first
                metrics.file.close()
                metrics.file = Path(os.devnull).open("w")  # noqa: SIM115
            else:
                metrics.sinks[0].writer.add_scalar = lambda *_: None
            for step in range(1, 100):
                report(metrics, step)
                if name == "tensorboard":
                    metrics.sinks[0].writer.flush()

    with pytest.raises(SystemExit) as ended, files_of_at_most(8000):
        run_command(run)
    said = capfd.readouterr().err
    assert ended.value.code == 74
    assert said.splitlines()[-1] == f"error: cannot use {tmp_path / name}: {os.strerror(errno.EFBIG)}"
    assert "Traceback" not in said


def test_a_full_disk_is_said_with_the_room_that_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "no" / "file"))

    with pytest.raises(SystemExit):
        run_command(full)
    assert "No space left on device (" in (said := capsys.readouterr().err)
    assert said.endswith(" MiB are free there)\n")


def test_a_full_collection_does_not_hold_up_a_step(tmp_path: Path) -> None:
    with metrics_in(tmp_path):
        assert gc.get_freeze_count() > 10_000
        started = time.process_time()
        gc.collect()
        assert time.process_time() - started < 0.05
    assert gc.get_freeze_count() == 0


def test_clips_leave_no_garbage_behind(synthetic_shards: Path) -> None:
    """A type with a shape, made anew for every clip, was 2 MiB a minute until garbage was collected."""
    config = DataConfig(shards=str(synthetic_shards), frame_stride=2, num_threads=1)
    dataset = ShardDataset.open(config)
    plan = TrainingPlan(dataset, config, num_frames=4, image_size=32, seed=0, batch_size=4)
    with ClipLoader(dataset, plan, torch.device("cpu"), config, None) as loader:
        batches = loader.batches(0)
        for _ in range(3):
            next(batches)
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                next(batches)
            assert gc.collect() < 10
        finally:
            gc.enable()


def test_the_same_batch_again_and_again(synthetic_shards: Path) -> None:
    config = DataConfig(shards=str(synthetic_shards), frame_stride=2, num_threads=1, cached_batch=True)
    dataset = ShardDataset.open(config)
    plan = TrainingPlan(dataset, config, num_frames=4, image_size=32, seed=0, batch_size=4)
    with ClipLoader(dataset, plan, torch.device("cpu"), config, None) as loader:
        batches = loader.batches(0)
        first = next(batches)
        waited = loader.counters["wait_seconds"]
        assert all(next(batches) is first for _ in range(5))
        assert loader.counters["wait_seconds"] == waited
        assert loader.counters["clips"] == 4


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


def test_one_process_compares_nothing(tmp_path: Path) -> None:
    with metrics_in(tmp_path) as metrics:
        report(metrics, 1)
    figures = figures_of((tmp_path / "metrics.jsonl").read_bytes())
    assert figures is not None
    assert "ranks" not in figures


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
