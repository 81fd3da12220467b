"""Checkpoints written beside training."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torchao.optim.subclass_8bit import OptimState8bit

from common.errors import InputError
from training import checkpoint, saving
from training.checkpoint import Contents, TrainState
from training.failures import DivergedError, way_back_explained
from training.saving import Saver

SECONDS = 20  # after which what should happen has not


class Folder:
    """As much of a RunDir as a Saver needs."""

    def __init__(self, path: Path, is_main: bool = True) -> None:
        self.path, self.checkpoints, self.is_main, self.remote = path, path / "checkpoints", is_main, None


def step(contents: Contents) -> None:
    for p in contents.modules["model"].parameters():
        p.grad = torch.ones_like(p)
    contents.optimizer.step()


def place(number: int) -> TrainState:
    return TrainState(number, 2, "these")


@pytest.fixture
def contents() -> Contents:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    made = Contents({"model": model}, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), {})
    step(made)
    return made


@pytest.fixture
def saver(tmp_path, contents) -> Iterator[Saver]:
    with Saver(Folder(tmp_path), contents, keep=2) as made:
        yield made


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Nothing is written before it is set."""
    opened, write = threading.Event(), checkpoint.save

    def late(*arguments: object) -> Path:
        assert opened.wait(SECONDS)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "save", late)
    return opened


def weights(folder: Path, number: int) -> dict[str, torch.Tensor]:
    return checkpoint.load_file(folder / f"checkpoints/step-{number:08d}/model.safetensors")


def test_training_goes_on_and_what_is_saved_is_of_the_step(tmp_path, contents, saver, gate):
    model = contents.modules["model"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moment = contents.optimizer.state[model[0].weight]["exp_avg"].clone()
    saver.save(place(1))
    model(torch.randn(4, 2))  # moves the statistics, before any update
    step(contents)
    assert not torch.equal(before["0.weight"], model[0].weight)
    assert not (tmp_path / "checkpoints").exists(), "it was not written beside training"
    gate.set()
    saver.join()
    assert all(torch.equal(value, weights(tmp_path, 1)[name]) for name, value in before.items())
    saved = torch.load(tmp_path / "checkpoints/step-00000001/optimizer.pt", weights_only=True)
    assert torch.equal(saved["state"][0]["exp_avg"], moment)


def test_an_update_waits_for_the_copy(contents, saver, monkeypatch):
    copying, copied = threading.Event(), saving.copy
    before = contents.modules["model"][0].weight.clone()

    def slow(pairs: saving.Copies) -> None:
        if threading.current_thread().name == "saving":
            assert copying.wait(SECONDS)
        copied(pairs)

    monkeypatch.setattr(saving, "copy", slow)
    saver.save(place(1))
    other = threading.Thread(target=step, args=(contents,))
    other.start()
    time.sleep(0.05)
    assert torch.equal(before, contents.modules["model"][0].weight)
    copying.set()
    other.join()
    assert not torch.equal(before, contents.modules["model"][0].weight)


def test_buffers_are_used_again(tmp_path, contents, saver):
    pointers = []
    for number in (1, 2):
        saver.save(place(number))
        saver.join()
        pointers.append(saver._host.modules["model"]["0.weight"].data_ptr())
        step(contents)
    assert pointers[0] == pointers[1] != contents.modules["model"][0].weight.data_ptr()
    assert not torch.equal(weights(tmp_path, 1)["0.weight"], weights(tmp_path, 2)["0.weight"])


@pytest.mark.parametrize("asks", ["update", "save", "end"])
def test_a_save_that_fails_ends_the_run(tmp_path, contents, monkeypatch, asks):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    saver = Saver(Folder(tmp_path), contents, keep=2)
    saver.save(place(1))
    saver._thread.join()
    ask = {"update": lambda: step(contents), "save": lambda: saver.save(place(2)), "end": saver.__exit__}[asks]
    with pytest.raises(
        InputError, match=r"step-00000001 cannot be written \(No space left on device; \d+ MiB are free"
    ):
        ask()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_end_waits_for_what_is_being_written(tmp_path, contents, gate):
    saver = Saver(Folder(tmp_path), contents, keep=2)
    saver.save(place(1))
    threading.Timer(0.05, gate.set).start()
    saver.__exit__(KeyboardInterrupt)
    assert weights(tmp_path, 1)


def test_a_second_request_in_the_wait_is_granted(tmp_path, contents, gate, monkeypatch):
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    saver = Saver(Folder(tmp_path), contents, keep=2)
    saver.save(place(1))
    writing = saver._thread
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.join()
    saver.__exit__(KeyboardInterrupt)
    assert not (tmp_path / "checkpoints").exists()
    gate.set()
    writing.join()


def test_a_review_is_marked_when_its_checkpoint_is_there(tmp_path, saver, gate):
    saver.save(place(1))
    assert not saver.is_reviewed(1)
    saver.mark_reviewed(1)  # does not wait
    gate.set()
    saver.join()
    assert saver.is_reviewed(1)


def test_weights_that_are_not_finite_are_not_saved_and_push_nothing_out(tmp_path, contents, saver):
    for number in (1, 2):
        saver.save(place(number))
    saver.join()
    contents.modules["model"][0].weight.data[0, 0] = torch.nan
    saver.save(place(3))
    with pytest.raises(DivergedError, match=r"after step 3, model's 0\.weight is not finite"):
        saver.join()
    assert [p.name for p in checkpoint.existing(tmp_path / "checkpoints")] == ["step-00000001", "step-00000002"]


def test_a_run_that_does_not_learn_pushes_nothing_out(tmp_path, saver):
    for number in (1, 2, 3, 4):
        saver.save(place(number), is_learning=number < 3)
    saver.join()
    assert len(checkpoint.whole(tmp_path / "checkpoints")) == 4
    saver.save(place(5))
    saver.join()
    assert len(checkpoint.whole(tmp_path / "checkpoints")) == 2


def test_a_run_that_has_diverged_says_what_to_go_on_from_and_how(tmp_path, saver):
    class Config:
        run = str(tmp_path)

    @way_back_explained
    def train(config: object) -> None:
        raise DivergedError("the run has diverged: so it is")

    with pytest.raises(InputError, match=r"so it is; take a lower optimizer\.base_lr"):
        train(Config)
    for number in (1, 2):
        saver.save(place(number))
    saver.join()
    said = r"so it is; .*`train.py --config THERE/config.yaml run=THERE` goes on from step-00000002, .* step-00000001$"
    with pytest.raises(InputError, match=said):
        train(Config)


def test_only_the_first_process_keeps_a_copy(tmp_path, contents):
    with Saver(Folder(tmp_path, is_main=False), contents, keep=2) as saver:
        step(contents)
    assert saver._host is None


def test_moments_of_8_bits_are_copied_as_they_are():
    moment = OptimState8bit.zeros((64, 256), signed=True)
    moment.copy_(torch.randn(64, 256))
    copies: saving.Copies = []
    host = saving._like({"exp_avg": moment}, None, copies)["exp_avg"]
    saving.copy(copies)
    assert isinstance(host, OptimState8bit)
    assert torch.equal(host.dequantize(), moment.dequantize())
    assert host.codes.data_ptr() != moment.codes.data_ptr()
    again = saving._like({"exp_avg": moment}, {"exp_avg": host}, [])["exp_avg"]
    assert again.codes.data_ptr() == host.codes.data_ptr()
