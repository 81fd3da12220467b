import json
from dataclasses import replace

import pytest
import torch

from errors import InputError
from model import pretrained
from model.adamae import AdaMAE
from model.config import ModelConfig
from training import checkpoint
from training.checkpoint import Contents, Place
from training.optimizer import OptimizerConfig, make_optimizer, update

PLACE = Place(step=1, global_batch=16, videos="these")


@pytest.fixture
def trained() -> Contents:
    model = AdaMAE(ModelConfig(size="tiny", num_frames=4, image_size=16, patch_size=8, mask_ratio=0.5))
    optimizer = make_optimizer(model, OptimizerConfig())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    update(optimizer, 1e-3, None)
    return Contents({"model": model}, optimizer, pretrained.about(model.config))


def test_what_is_loaded_is_what_was_saved(tmp_path, trained):
    model = trained.modules["model"]
    checkpoint.save(tmp_path, replace(PLACE, step=3), trained, keep=2)
    other = AdaMAE(model.config)
    other_optimizer = make_optimizer(other, OptimizerConfig())
    assert checkpoint.load_newest(tmp_path, Contents({"model": other}, other_optimizer, {}), PLACE) == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(trained.optimizer.state[a]["exp_avg_sq"], other_optimizer.state[b]["exp_avg_sq"])


def test_a_checkpoint_carried_elsewhere_says_what_model_it_is(tmp_path, trained):
    folder = checkpoint.save(tmp_path / "run" / "checkpoints", PLACE, trained, keep=1)
    file = (folder / "model.safetensors").rename(tmp_path / "carried.safetensors")
    assert pretrained.load(file).config == trained.modules["model"].config


def test_only_the_newest_are_kept(tmp_path, trained):
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, replace(PLACE, step=step), trained, keep=2)
    assert [p.name for p in checkpoint.existing(tmp_path)] == ["step-00000002", "step-00000010"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 917440")])
def test_a_save_that_dies_leaves_the_older_checkpoint_and_nothing_else(tmp_path, trained, monkeypatch, error):
    checkpoint.save(tmp_path, PLACE, trained, keep=2)

    def no_space_left(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch, "save", no_space_left)
    with pytest.raises(InputError, match="step-00000002 cannot be written"):
        checkpoint.save(tmp_path, replace(PLACE, step=2), trained, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_other_clips_are_refused(tmp_path, trained):
    checkpoint.save(tmp_path, PLACE, trained, keep=2)
    with pytest.raises(InputError, match="took 16 clips a step and would now take 32: set global_batch=16"):
        checkpoint.load_newest(tmp_path, trained, replace(PLACE, global_batch=32))
    with pytest.raises(InputError, match=r"has learnt from other shards than data\.shards names now"):
        checkpoint.load_newest(tmp_path, trained, replace(PLACE, videos="others"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_one_flipped_bit_is_noticed(tmp_path, trained, name):
    folder = checkpoint.save(tmp_path, PLACE, trained, keep=2)
    data = bytearray((folder / name).read_bytes())
    data[-100] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(InputError, match=f"step-00000001 cannot be resumed \\({name} has changed since it was written"):
        checkpoint.load_newest(tmp_path, trained, PLACE)


@pytest.mark.parametrize("place", ["", "{}", json.dumps({"place": {"step": 1}, "sha256": {}})])
def test_a_place_that_cannot_be_read_is_named(tmp_path, trained, place):
    folder = checkpoint.save(tmp_path, PLACE, trained, keep=2)
    (folder / "place.json").write_text(place)
    with pytest.raises(InputError, match="step-00000001 cannot be resumed"):
        checkpoint.load_newest(tmp_path, trained, PLACE)
