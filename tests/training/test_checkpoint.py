import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from common.errors import InputError
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.weights import pretrained
from training.checkpoint import (
    Snapshot,
    TrainState,
    check_checkpoint,
    complete_checkpoints,
    list_checkpoints,
    load_checkpoint,
    remove_old,
    save_checkpoint,
)  # fmt: skip
from training.config import OptimizerConfig
from training.optimizer import make_optimizer, parameter_groups, update
from training.saving import take_snapshot

STATE = TrainState(step=1, global_batch=16, dataset="these")


class Small:
    """Two layers and an optimizer, which are made and saved in no time."""

    def __init__(self, width: int = 3) -> None:
        self.model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        update(self.optimizer, 1e-3, None)

    @property
    def snapshot(self) -> Snapshot:
        return take_snapshot({"model": self.model}, self.optimizer, {}, None)

    def load(self, folder: Path, expected: TrainState = STATE) -> TrainState:
        """As a run does with its newest checkpoint."""
        newest = list_checkpoints(folder)[-1]
        check_checkpoint(newest, expected, ["model"])
        return load_checkpoint(newest, {"model": self.model}, self.optimizer)


@pytest.fixture
def small() -> Small:
    return Small()


@pytest.fixture
def two(tmp_path, small) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save_checkpoint(tmp_path / "checkpoints", replace(STATE, step=step), small.snapshot)
    return tmp_path / "checkpoints"


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((folder / "train_state.json").read_text())
    change(manifest)
    (folder / "train_state.json").write_text(json.dumps(manifest))


def test_what_is_loaded_is_what_was_saved_but_for_the_optimizers_settings(tmp_path):
    def make(weight_decay: float) -> tuple[AdaMAE, torch.optim.Optimizer]:
        model = AdaMAE(ModelConfig(size="tiny", num_frames=4, image_size=16, patch_size=8, mask_ratio=0.5))
        return model, make_optimizer(parameter_groups(model, weight_decay, set()), OptimizerConfig())

    (model, optimizer), (other, other_optimizer) = make(0.05), make(0.5)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    update(optimizer, 1e-3, None)
    metadata = pretrained.make_metadata(model.config)
    folder = save_checkpoint(
        tmp_path / "run/checkpoints", STATE, take_snapshot({"model": model}, optimizer, metadata, None)
    )
    assert load_checkpoint(folder, {"model": other}, other_optimizer) == STATE
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg_sq"], other_optimizer.state[b]["exp_avg_sq"])
    assert {group["weight_decay"] for group in other_optimizer.param_groups} == {0, 0.5}
    carried = (folder / "model.safetensors").rename(tmp_path / "carried.safetensors")
    assert pretrained.load(carried).config == model.config, "the file says what model it is of"


def test_only_the_newest_are_kept_and_incomplete_ones_push_nothing_out(tmp_path, two, small):
    save_checkpoint(two, replace(STATE, step=10), small.snapshot)
    for name in ("step-00000011", "step-00000012"):
        (two / name).mkdir()
    remove_old(two, keep=2)
    assert [p.name for p in complete_checkpoints(two)] == ["step-00000002", "step-00000010"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 917440")])
def test_a_save_that_fails_leaves_the_older_checkpoint_and_nothing_else(tmp_path, small, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    save_checkpoint(tmp_path, STATE, small.snapshot)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(InputError, match="step-00000002 cannot be written"):
        save_checkpoint(tmp_path, replace(STATE, step=2), small.snapshot)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_other_steps_are_refused(two, small):
    with pytest.raises(InputError, match="with 16 clips per step, and this command gives 32: set global_batch=16"):
        small.load(two, replace(STATE, global_batch=32))
    with pytest.raises(InputError, match=r"trained on other shards than data\.shards"):
        small.load(two, replace(STATE, dataset="others"))
    with pytest.raises(InputError, match=r"computed on ; now it would be on another GPU"):
        small.load(two, replace(STATE, fingerprint="another GPU"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_one_flipped_bit_is_noticed(two, small, name):
    file = two / "step-00000002" / name
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match=f"step-00000002 cannot be loaded \\({name} has changed since it was written"):
        small.load(two)


STATES = [
    ("", "not JSON"),
    ("[" * 100_000, "not JSON"),
    (chr(255), "not JSON"),
    ("[]", "does not have state"),
    (json.dumps({"state": {"step": 2}, "sha256": {}}), "does not have global_batch"),
    (json.dumps({"state": [], "sha256": {}}), r"has state \[\]"),
    (" " * 2**21, "too large"),
]


@pytest.mark.parametrize(("content", "why"), STATES)
def test_a_state_that_cannot_be_read_is_named_with_the_checkpoint_before(two, small, content, why):
    (two / "step-00000002/train_state.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=f"step-00000002 cannot be loaded .*{why}.* to resume from step-00000001$"):
        small.load(two)


@pytest.mark.parametrize("step", ["5", -5, 2.5, 10**12, 1, float("nan"), None, True])
def test_a_step_that_is_none_is_said(two, small, step):
    edit(two / "step-00000002", lambda manifest: manifest["state"].update(step=step))
    with pytest.raises(InputError, match=r"step-00000002 cannot be loaded .*remove it to resume from step-00000001$"):
        small.load(two)


@pytest.mark.parametrize("name", ["../config.yaml", "model.safetensors"])
def test_hashes_that_are_none_are_said(two, small, name):
    edit(two / "step-00000002", lambda manifest: manifest.update(sha256={name: "0"}))
    with pytest.raises(InputError, match=r"train_state\.json has sha256 '0' for"):
        small.load(two)
    edit(two / "step-00000002", lambda manifest: manifest.update(sha256={}))
    with pytest.raises(InputError, match=r"train_state\.json does not list model.safetensors"):
        small.load(two)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "train_state.json"])
def test_a_missing_file_is_said(two, small, name):
    (two / "step-00000002" / name).unlink()
    with pytest.raises(InputError, match=rf"\({name} is missing\): remove it to resume from step-00000001$"):
        small.load(two)


def test_a_file_where_a_checkpoint_should_be_is_said(two, small):
    (two / "step-00000003").write_text("")
    with pytest.raises(InputError, match=r"it is not a folder\): remove it to resume from step-00000002$"):
        small.load(two)


def test_folders_of_other_names_are_left_alone(two):
    strays = ["step-backup", "step-00000001 (copy)", "step-3", "step--0000005", "step-٣"]
    for name in strays:
        shutil.copytree(two / "step-00000001", two / name)
    assert [p.name for p in list_checkpoints(two)] == ["step-00000001", "step-00000002"]
    remove_old(two, keep=1)
    assert {p.name for p in two.iterdir()} == {"step-00000002", *strays}


def test_files_of_another_model_are_said(tmp_path, small):
    other = Small(width=5)
    moments = take_snapshot({"model": small.model}, other.optimizer, {}, None)
    save_checkpoint(tmp_path / "moments", STATE, moments)
    with pytest.raises(InputError, match=r"optimizer.pt is of another model"):
        small.load(tmp_path / "moments")
    save_checkpoint(tmp_path / "weights", STATE, other.snapshot)
    with pytest.raises(InputError, match=r"cannot be loaded \(Error.* size mismatch for"):
        small.load(tmp_path / "weights")


def test_weights_that_are_not_finite_are_not_resumed_from(two, small):
    small.model[0].weight.data[0, 0] = math.nan
    save_checkpoint(two, replace(STATE, step=3), small.snapshot)
    with pytest.raises(InputError, match=r"0.weight of model.safetensors is not finite\): .* from step-00000002$"):
        small.load(two)
