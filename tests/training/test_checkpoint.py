"""Checkpoints: complete or absent, checked before they are loaded, written beside training."""

import json
import math
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from adamae.common.atomic_io import write_text
from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.training import checkpoint, run_dir
from adamae.training.checkpoint import TrainState, list_checkpoints, load_file, save_checkpoint
from adamae.training.config import TrainConfig, to_yaml
from adamae.training.distributed import Distributed
from adamae.training.failures import DivergedError
from adamae.training.optimizer import update
from adamae.training.run_dir import BackgroundWriter, RunDir

STATE = TrainState(step=1, global_batch=16, dataset="these")
SECONDS = 20  # after which what should happen has not


class Small:
    """A model and an optimizer that are made and saved in no time, and their run directory."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(
            TrainConfig(DataConfig(shards="s"), run=str(path), keep_checkpoints=2),
            Distributed("cpu"),
        )
        write_text(path / "config.yaml", to_yaml(self.run.config))
        self.folder = self.run.checkpoints
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.step()

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        update(self.optimizer, 0.1, None)

    def save(self, step: int) -> None:
        self.run.save(replace(STATE, step=step), {"model": self.model}, self.optimizer, {})

    def write(self, step: int) -> Path:
        modules = {"model": self.model.state_dict()}
        return save_checkpoint(
            self.folder, replace(STATE, step=step), modules, self.optimizer.state_dict(), {}
        )

    def load(self) -> TrainState:
        """As a run does with its newest checkpoint."""
        newest = list_checkpoints(self.folder)[-1]
        checkpoint.check_checkpoint(newest, STATE)
        return checkpoint.load_checkpoint(newest, {"model": self.model}, self.optimizer)

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def small(tmp_path) -> Small:
    (tmp_path / "run").mkdir()
    return Small(tmp_path / "run")


@pytest.fixture
def two(small) -> Path:
    """The newer one of two checkpoints."""
    small.write(1)
    return small.write(2)


def edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Damage train_state.json by this change of what it holds."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "train_state.json").read_text())
        change(manifest)
        (folder / "train_state.json").write_text(json.dumps(manifest))

    return damage


def write_state(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "train_state.json").write_text(content, encoding="latin-1")


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


WEIGHTS, MOMENTS = "model.safetensors", "optimizer.pt"
NO_STATES = ("", "[" * 100_000, chr(255), "[]", "{}", "3", json.dumps({"step": [], "sha256": {}}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        *(
            (lambda folder, name=name: flip_bit(folder / name), f"{name} has changed")
            for name in (WEIGHTS, MOMENTS)
        ),
        *(
            (lambda folder, name=name: (folder / name).unlink(), f"{name} is missing")
            for name in (WEIGHTS, MOMENTS, "train_state.json")
        ),
        (become_a_file, "Not a directory"),
        *((write_state(content), "is damaged") for content in NO_STATES),
        (edit(lambda manifest: manifest.pop("global_batch")), "is damaged.*global_batch"),
        *(
            (edit(lambda manifest, step=step: manifest.update(step=step)), "is damaged")
            for step in ("5", -5, 0, 2.5, math.nan, None, True)
        ),
        *(
            (edit(lambda manifest, step=step: manifest.update(step=step)), f"is of step {step}")
            for step in (10**12, 1)
        ),
        *(
            (edit(lambda manifest, sha256=sha256: manifest.update(sha256=sha256)), "is damaged")
            for sha256 in ({"../config.yaml": "0" * 64}, {WEIGHTS: "0"}, {WEIGHTS: 1}, 3, ["a"])
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_with_its_fault_and_the_one_before(small, two, damage, said):
    damage(two)
    with pytest.raises(
        InputError, match=f"step-00000002 cannot be loaded .*{said}.*to resume from step-00000001$"
    ):
        small.load()


def test_only_the_newest_are_kept_and_strays_do_not_count(small, two):
    strays = [
        "step-backup",
        "step-00000001 (copy)",
        "step-3",
        "step--0000005",
        "step-٣",
        "step-00000000",
    ]
    for name in strays:
        shutil.copytree(two, small.folder / name)
    assert [path.name for path in list_checkpoints(small.folder)] == [
        "step-00000001",
        "step-00000002",
    ]
    with small.run:
        small.save(10)
    assert set(small.saved()) == {*strays, "step-00000002", "step-00000010"}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_disk_that_fails_stops_the_run_and_leaves_the_older_checkpoint(small, file):
    size = (small.write(1) / file).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = rf"File too large: '.*step-00000002(\.[^/]*\.partial/{file})?'"
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))
    try:
        with pytest.raises(OSError, match=said):
            small.write(2)
        assert small.saved() == ["step-00000001"]
        small.run.__enter__()
        small.save(2)
        while not small.run.writer.failed:  # which the loop asks at every step
            threading.Event().wait(0.01)
        with pytest.raises(OSError, match=said):
            small.save(3)
        small.save(2)
        with pytest.raises(OSError, match=said):
            small.run.__exit__(None, None, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_training_continues_and_what_is_saved_is_of_the_step(small, monkeypatch):
    gate, write = threading.Event(), run_dir.save_checkpoint
    monkeypatch.setattr(
        run_dir, "save_checkpoint", lambda *given: (gate.wait(SECONDS), write(*given))
    )
    before = {name: value.clone() for name, value in small.model.state_dict().items()}
    moment = small.optimizer.state[small.model[0].weight]["exp_avg"].clone()
    with small.run:
        small.save(1)
        small.model(torch.randn(4, 2))  # moves the statistics
        small.step()
        assert not torch.equal(before["0.weight"], small.model[0].weight)
        assert not small.folder.exists(), "it was not written beside training"
        gate.set()
    written = load_file(small.folder / "step-00000001/model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in before.items())
    written = torch.load(small.folder / "step-00000001/optimizer.pt")
    assert torch.equal(written["state"][0]["exp_avg"], moment)


def test_a_second_ctrl_c_does_not_wait_for_the_writer():
    gate, done, writer = threading.Event(), threading.Event(), BackgroundWriter()
    writer.start(lambda: (gate.wait(SECONDS), done.set()))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        writer.wait()
    writer.wait()
    assert not done.is_set()
    gate.set()
    assert done.wait(SECONDS)


def test_weights_that_are_not_finite_are_not_saved_and_push_nothing_out(small):
    with small.run:
        for step in (1, 2):
            small.save(step)
    small.model[0].weight.data[0, 0] = torch.nan
    said = r"after step 3, model's 0\.weight is not finite; lower .*init_from=.*step-00000002, which is finite$"
    with pytest.raises(DivergedError, match=said), small.run:
        small.save(3)
    assert small.saved() == ["step-00000001", "step-00000002"]


def test_a_run_directory_is_one_jobs_at_a_time(small, tmp_path):
    with small.run:
        small.save(1)
        with (
            pytest.raises(InputError, match="is locked by another training job"),
            Small(tmp_path / "run").run,
        ):
            pytest.fail("two jobs")
    assert small.saved() == ["step-00000001"]
