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
from training import checkpoint
from training.checkpoint import Contents, TrainState
from training.config import OptimizerConfig
from training.optimizer import make_optimizer, update

PLACE = TrainState(step=1, global_batch=16, videos="these")


def updated(model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, str]) -> Contents:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    update(optimizer, 1e-3, None)
    return Contents({"model": model}, optimizer, about)


@pytest.fixture
def adamae() -> Contents:
    model = AdaMAE(ModelConfig(size="tiny", num_frames=4, image_size=16, patch_size=8, mask_ratio=0.5))
    return updated(model, make_optimizer(model, OptimizerConfig()), pretrained.make_metadata(model.config))


def small(width: int = 3) -> Contents:
    """Two layers, which are made and saved in no time."""
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))
    return updated(model, torch.optim.AdamW(model.parameters(), fused=True), {})


@pytest.fixture
def trained() -> Contents:
    return small()


@pytest.fixture
def two(tmp_path, trained) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        checkpoint.save(tmp_path / "checkpoints", replace(PLACE, step=step), trained.state())
    return tmp_path / "checkpoints"


def test_what_is_loaded_is_what_was_saved(tmp_path, adamae):
    model = adamae.modules["model"]
    checkpoint.save(tmp_path, replace(PLACE, step=3), adamae.state())
    other = AdaMAE(model.config)
    other_optimizer = make_optimizer(other, OptimizerConfig())
    assert checkpoint.load_newest(tmp_path, Contents({"model": other}, other_optimizer, {}), PLACE, 6).step == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(adamae.optimizer.state[a]["exp_avg_sq"], other_optimizer.state[b]["exp_avg_sq"])


def test_a_checkpoint_carried_elsewhere_says_what_model_it_is(tmp_path, adamae):
    folder = checkpoint.save(tmp_path / "run" / "checkpoints", PLACE, adamae.state())
    file = (folder / "model.safetensors").rename(tmp_path / "carried.safetensors")
    assert pretrained.load(file).config == adamae.modules["model"].config


def test_only_the_newest_are_kept(tmp_path, trained):
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, replace(PLACE, step=step), trained.state())
    checkpoint.remove_old(tmp_path, keep=2)
    assert [p.name for p in checkpoint.existing(tmp_path)] == ["step-00000002", "step-00000010"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 917440")])
def test_a_save_that_dies_leaves_the_older_checkpoint_and_nothing_else(tmp_path, trained, monkeypatch, error):
    checkpoint.save(tmp_path, PLACE, trained.state())

    def no_space_left(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch, "save", no_space_left)
    with pytest.raises(InputError, match="step-00000002 cannot be written"):
        checkpoint.save(tmp_path, replace(PLACE, step=2), trained.state())
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_other_clips_are_refused(tmp_path, trained):
    checkpoint.save(tmp_path, PLACE, trained.state())
    with pytest.raises(InputError, match="took 16 clips a step and would now take 32: set global_batch=16"):
        checkpoint.load_newest(tmp_path, trained, replace(PLACE, global_batch=32), 6)
    with pytest.raises(InputError, match=r"has learnt from other shards than data\.shards names now"):
        checkpoint.load_newest(tmp_path, trained, replace(PLACE, videos="others"), 6)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_one_flipped_bit_is_noticed(tmp_path, trained, name):
    folder = checkpoint.save(tmp_path, PLACE, trained.state())
    data = bytearray((folder / name).read_bytes())
    data[-100] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(InputError, match=f"step-00000001 cannot be resumed \\({name} has changed since it was written"):
        checkpoint.load_newest(tmp_path, trained, PLACE, 6)


def edited(folder: Path, change: Callable[[dict], object]) -> None:
    described = json.loads((folder / "train_state.json").read_text())
    change(described)
    (folder / "train_state.json").write_text(json.dumps(described))


PLACES = [
    ("", "no JSON"),
    ("[" * 100_000, "no JSON"),
    (chr(255), "no JSON"),
    ("[]", "does not say place"),
    ("{}", "does not say place"),
    (json.dumps({"place": {"step": 2}, "sha256": {}}), "does not say global_batch"),
    (json.dumps({"place": [], "sha256": {}}), r"place in its train_state\.json is \[\]"),
    (" " * 2**21, "far too large"),
]


@pytest.mark.parametrize(("place", "why"), PLACES)
def test_a_place_that_cannot_be_read_is_named_with_the_one_before(two, trained, place, why):
    (two / "step-00000002/train_state.json").write_text(place, encoding="latin-1")
    with pytest.raises(InputError, match=f"step-00000002 cannot be resumed .*{why}.* to go on from step-00000001$"):
        checkpoint.load_newest(two, trained, PLACE, 6)


@pytest.mark.parametrize("step", ["5", -5, 2.5, 10**12, 1, float("nan"), None, True])
def test_a_step_that_is_none_is_said(two, trained, step):
    edited(two / "step-00000002", lambda described: described["place"].update(step=step))
    with pytest.raises(InputError, match=r"step-00000002 cannot be resumed .*remove it to go on from step-00000001$"):
        checkpoint.load_newest(two, trained, PLACE, 6)


def test_a_step_beyond_the_run_is_said(two, trained):
    far = (two / "step-00000002").rename(two / f"step-{10**12}")
    edited(far, lambda described: described["place"].update(step=10**12))
    with pytest.raises(InputError, match=r"this run has 6 steps\): remove it to go on from step-00000001$"):
        checkpoint.load_newest(two, trained, PLACE, 6)


@pytest.mark.parametrize("name", ["../config.yaml", "model.safetensors"])
def test_a_list_of_hashes_that_is_none_is_said(two, trained, name):
    edited(two / "step-00000002", lambda described: described.update(sha256={name: "0"}))
    with pytest.raises(InputError, match=r"sha256 in its train_state.json says '0' of"):
        checkpoint.load_newest(two, trained, PLACE, 6)
    edited(two / "step-00000002", lambda described: described.update(sha256={}))
    with pytest.raises(InputError, match=r"its train_state.json does not know model.safetensors"):
        checkpoint.load_newest(two, trained, PLACE, 6)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "train_state.json"])
def test_a_missing_file_is_said(two, trained, name):
    (two / "step-00000002" / name).unlink()
    with pytest.raises(InputError, match=rf"\(.*{name}.*\): remove it to go on from step-00000001$"):
        checkpoint.load_newest(two, trained, PLACE, 6)


def test_a_file_where_a_checkpoint_should_be_is_said(two, trained):
    (two / "step-00000003").write_text("")
    with pytest.raises(InputError, match=r"it is no folder\): remove it to go on from step-00000002$"):
        checkpoint.load_newest(two, trained, PLACE, 6)


def test_what_has_another_name_is_said_and_left_alone(two, trained, capsys):
    strays = ["step-backup", "step-00000001 (copy)", "step-3", "step--0000005", "step-٣"]
    for name in strays:
        shutil.copytree(two / "step-00000001", two / name)
    assert checkpoint.load_newest(two, trained, PLACE, 6).step == 2
    said = capsys.readouterr().err
    assert all(f"{name}' is none of this run's checkpoints, and is left alone" in said for name in strays)
    checkpoint.remove_old(two, keep=1)
    assert {p.name for p in two.iterdir()} == {"step-00000002", *strays}


def test_what_is_not_whole_pushes_nothing_out(two):
    for name in ("step-00000003", "step-00000004"):
        (two / name).mkdir()
    checkpoint.remove_old(two, keep=2)
    assert [p.name for p in checkpoint.whole(two)] == ["step-00000001", "step-00000002"]


def test_files_of_another_model_are_said(tmp_path, trained):
    other = small(width=5)
    twin = Contents(trained.modules, other.optimizer, {})
    checkpoint.save(tmp_path / "moments", PLACE, twin.state())
    with pytest.raises(InputError, match=r"optimizer.pt is of another model"):
        checkpoint.load_newest(tmp_path / "moments", trained, PLACE, 6)
    checkpoint.save(tmp_path / "weights", PLACE, other.state())
    with pytest.raises(InputError, match=r"cannot be resumed \(Error.* size mismatch for"):
        checkpoint.load_newest(tmp_path / "weights", trained, PLACE, 6)


def test_weights_that_are_not_finite_are_not_gone_on_with(two, trained):
    weight = trained.modules["model"].state_dict()["0.weight"]
    weight[..., 0] = math.nan
    checkpoint.save(two, replace(PLACE, step=3), trained.state())
    with pytest.raises(InputError, match=r"0.weight of model.safetensors is not finite\): .* from step-00000002$"):
        checkpoint.load_newest(two, trained, PLACE, 6)


def test_one_process_a_machine_reads_the_files_twice(tmp_path, trained, monkeypatch):
    checkpoint.save(tmp_path, PLACE, trained.state())
    hashed: list[Path] = []
    monkeypatch.setattr(checkpoint, "_sha256s", lambda files: hashed.extend(files) or {})
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert checkpoint.load_newest(tmp_path, trained, PLACE, 6).step == 1
    assert not hashed


def test_the_verdict_of_one_process_is_everyones(two, trained, monkeypatch):
    monkeypatch.setattr(checkpoint.distributed, "gathered", lambda mine: [(2, "it is damaged"), mine])
    with pytest.raises(InputError, match="it is damaged"):
        checkpoint.load_newest(two, trained, PLACE, 6)
