"""Checkpoints written beside training."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torchao.optim.subclass_8bit import OptimState8bit

from common.errors import InputError
from pipeline.config import DataConfig
from training import run_dir
from training.checkpoint import TrainState, load_file
from training.config import TrainConfig
from training.distributed import Distributed
from training.failures import DivergedError
from training.run_dir import RunDir
from training.saving import BackgroundWriter, take_snapshot

SECONDS = 20  # after which what should happen has not


class Trained:
    """A small model in a run directory."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.run = RunDir(TrainConfig(DataConfig(shards="s"), run=str(path), keep_checkpoints=keep), Distributed("cpu"))
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.step()

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()

    def save(self, step: int) -> None:
        self.run.save(TrainState(step, 2, "these"), {"model": self.model}, self.optimizer, {})

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.run.checkpoints / f"step-{step:08d}/model.safetensors")


@pytest.fixture
def trained(tmp_path) -> Trained:
    return Trained(tmp_path / "run")


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Nothing is written before it is set."""
    opened, write = threading.Event(), run_dir.save_checkpoint

    def write_late(*arguments) -> Path:
        assert opened.wait(SECONDS)
        return write(*arguments)

    monkeypatch.setattr(run_dir, "save_checkpoint", write_late)
    return opened


def test_training_continues_and_what_is_saved_is_of_the_step(trained, gate):
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    moment = trained.optimizer.state[trained.model[0].weight]["exp_avg"].clone()
    with trained.run:
        trained.save(1)
        trained.model(torch.randn(4, 2))  # moves the statistics
        trained.step()
        assert not torch.equal(before["0.weight"], trained.model[0].weight)
        assert not trained.run.checkpoints.exists(), "it was not written beside training"
        gate.set()
    assert all(torch.equal(value, trained.saved(1)[name]) for name, value in before.items())
    saved = torch.load(trained.run.checkpoints / "step-00000001/optimizer.pt", weights_only=True)
    assert torch.equal(saved["state"][0]["exp_avg"], moment)


def test_buffers_are_used_again(trained):
    first = take_snapshot({"model": trained.model}, trained.optimizer, {}, None)
    trained.step()
    second = take_snapshot({"model": trained.model}, trained.optimizer, {}, first)
    assert first.modules["model"]["0.weight"].data_ptr() == second.modules["model"]["0.weight"].data_ptr()
    assert torch.equal(second.modules["model"]["0.weight"], trained.model[0].weight)


def test_a_save_that_fails_stops_the_run(trained, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    said = r"step-00000001 cannot be written \(No space left on device; \d+ MiB free"
    trained.run.__enter__()
    trained.save(1)
    while not trained.run.has_failed:  # which the loop asks at every step
        threading.Event().wait(0.01)
    with pytest.raises(InputError, match=said):
        trained.save(2)
    trained.save(1)
    with pytest.raises(InputError, match=said):
        trained.run.__exit__(None, None, None)


def test_a_second_ctrl_c_does_not_wait_for_the_writer(monkeypatch):
    gate, done = threading.Event(), threading.Event()
    writer = BackgroundWriter()
    writer.start(lambda: (gate.wait(SECONDS), done.set()))

    def interrupt(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
    writer.wait()
    assert not done.is_set()
    gate.set()
    assert done.wait(SECONDS)


def test_weights_that_are_not_finite_are_not_saved_and_push_nothing_out(trained):
    with trained.run:
        for step in (1, 2):
            trained.save(step)
    trained.model[0].weight.data[0, 0] = torch.nan
    said = (
        r"after step 3, model's 0\.weight is not finite; all checkpoints are finite: .*step-00000002, .*step-00000001$"
    )
    with pytest.raises(DivergedError, match=said), trained.run:
        trained.save(3)
    assert sorted(p.name for p in trained.run.checkpoints.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_run_directory_is_one_jobs_at_a_time(trained, tmp_path):
    with trained.run:
        trained.save(1)
        with pytest.raises(InputError, match="is locked by another training job"), Trained(tmp_path / "run").run:
            pytest.fail("two jobs")
    assert trained.saved(1)


def test_moments_of_8_bits_are_copied_as_they_are():
    moment = OptimState8bit.zeros((64, 256), signed=True)
    moment.copy_(torch.randn(64, 256))

    class Optimizer:
        def state_dict(self) -> dict:
            return {"exp_avg": moment}

    host = take_snapshot({}, Optimizer(), {}, None)
    copied = host.optimizer["exp_avg"]
    assert isinstance(copied, OptimState8bit)
    assert torch.equal(copied.dequantize(), moment.dequantize())
    assert copied.codes.data_ptr() != moment.codes.data_ptr()
    again = take_snapshot({}, Optimizer(), {}, host).optimizer["exp_avg"]
    assert again.codes.data_ptr() == copied.codes.data_ptr()
