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
# After so many seconds, an event that a test waits for will not come.
TIMEOUT_S = 120


class Small:
    """A model and an optimizer that take no time to make and save, and their run directory."""

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
        """Take an optimizer step with a gradient of ones."""
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        update(self.optimizer, 0.1, None)

    def save(self, step: int) -> None:
        """Save a checkpoint in a thread, as the loop does."""
        self.run.save(replace(STATE, step=step), {"model": self.model}, self.optimizer, {})

    def write(self, step: int) -> Path:
        """Write a checkpoint at once."""
        modules = {"model": self.model.state_dict()}
        return save_checkpoint(
            self.folder, replace(STATE, step=step), modules, self.optimizer.state_dict(), {}
        )

    def load(self) -> TrainState:
        """Check and load the newest checkpoint, as a run that resumes does."""
        newest = list_checkpoints(self.folder)[-1]
        checkpoint.check_checkpoint(newest, STATE)
        return checkpoint.load_checkpoint(newest, {"model": self.model}, self.optimizer)

    def saved(self) -> list[str]:
        """List the names of all checkpoints."""
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """Make a run without checkpoints."""
    (tmp_path / "run").mkdir()
    return Small(tmp_path / "run")


@pytest.fixture
def two(small: Small) -> Path:
    """Write two checkpoints; return the newer one."""
    small.write(1)
    return small.write(2)


def edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Return a function that changes the contents of train_state.json."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "train_state.json").read_text())
        change(manifest)
        (folder / "train_state.json").write_text(json.dumps(manifest))

    return damage


def write_state(content: str) -> Callable[[Path], object]:
    """Return a function that replaces train_state.json."""
    return lambda folder: (folder / "train_state.json").write_text(content, encoding="latin-1")


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


WEIGHTS = "model.safetensors"
MOMENTS = "optimizer.pt"
NO_STATES = ("", "[" * 100_000, chr(255), "[]", "{}", "3", json.dumps({"step": [], "sha256": {}}))


@pytest.mark.parametrize(
    ("damage", "fault"),
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
def test_a_damaged_checkpoint_is_named_with_its_fault_and_the_one_before(
    small: Small, two: Path, damage: Callable[[Path], object], fault: str
) -> None:
    damage(two)
    message = f"step-00000002 cannot be loaded .*{fault}.*to resume from step-00000001$"
    with pytest.raises(InputError, match=message):
        small.load()


def test_only_the_newest_are_kept_and_strays_do_not_count(small: Small, two: Path) -> None:
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
    names = [path.name for path in list_checkpoints(small.folder)]
    assert names == ["step-00000001", "step-00000002"]
    with small.run:
        small.save(10)
    assert set(small.saved()) == {*strays, "step-00000002", "step-00000010"}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_disk_that_fails_stops_the_run_and_leaves_the_older_checkpoint(
    small: Small, file: str
) -> None:
    size = (small.write(1) / file).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = rf"File too large: '.*step-00000002(\.[^/]*\.partial/{file})?'"
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))
    try:
        with pytest.raises(OSError, match=message):
            small.write(2)
        assert small.saved() == ["step-00000001"]
        small.run.__enter__()
        small.save(2)
        # The loop asks this at every step.
        while not small.run.writer.failed:
            threading.Event().wait(0.01)
        with pytest.raises(OSError, match=message):
            small.save(3)
        small.save(2)
        with pytest.raises(OSError, match=message):
            small.run.__exit__(None, None, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_training_continues_and_what_is_saved_is_of_the_step(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    write = run_dir.save_checkpoint
    monkeypatch.setattr(
        run_dir, "save_checkpoint", lambda *inputs: (gate.wait(TIMEOUT_S), write(*inputs))
    )
    before = {name: value.clone() for name, value in small.model.state_dict().items()}
    moment = small.optimizer.state[small.model[0].weight]["exp_avg"].clone()
    with small.run:
        small.save(1)
        # A forward pass changes the running statistics, a step the weights.
        small.model(torch.randn(4, 2))
        small.step()
        assert not torch.equal(before["0.weight"], small.model[0].weight)
        assert not small.folder.exists(), "it was not written beside training"
        gate.set()
    written = load_file(small.folder / "step-00000001/model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in before.items())
    written = torch.load(small.folder / "step-00000001/optimizer.pt")
    assert torch.equal(written["state"][0]["exp_avg"], moment)


def test_a_second_ctrl_c_does_not_wait_for_the_writer() -> None:
    gate = threading.Event()
    done = threading.Event()
    writer = BackgroundWriter()
    writer.start(lambda: (gate.wait(TIMEOUT_S), done.set()))

    def interrupt_and_wait() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        writer.wait()

    with pytest.raises(KeyboardInterrupt):
        interrupt_and_wait()
    writer.wait()
    assert not done.is_set()
    gate.set()
    assert done.wait(TIMEOUT_S)


def test_weights_that_are_not_finite_are_not_saved_and_push_nothing_out(small: Small) -> None:
    with small.run:
        small.save(1)
        small.save(2)
    small.model[0].weight.data[0, 0] = torch.nan
    message = (
        r"after step 3, model's 0\.weight is not finite; lower .*init_from=.*step-00000002, which"
        " is finite$"
    )
    with pytest.raises(DivergedError, match=message), small.run:
        small.save(3)
    assert small.saved() == ["step-00000001", "step-00000002"]


def test_a_run_directory_is_one_jobs_at_a_time(small: Small, tmp_path: Path) -> None:
    with small.run:
        small.save(1)
        with (
            pytest.raises(InputError, match="is locked by another training job"),
            Small(tmp_path / "run").run,
        ):
            pytest.fail("two jobs")
    assert small.saved() == ["step-00000001"]
