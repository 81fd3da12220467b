import pytest
import torch

from errors import InputError
from model.adamae import AdaMAE
from model.config import ModelConfig
from training import checkpoint
from training.optimizer import OptimizerConfig, make_optimizer, update


@pytest.fixture
def trained():
    model = AdaMAE(ModelConfig(size="tiny", num_frames=4, image_size=16, patch_size=8, mask_ratio=0.5))
    optimizer = make_optimizer(model, OptimizerConfig())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    update(optimizer, 1e-3, None)
    return {"model": model}, optimizer


def test_what_is_loaded_is_what_was_saved(tmp_path, trained):
    modules, optimizer = trained
    model = modules["model"]
    checkpoint.save(tmp_path, checkpoint.Place(3, 16), modules, optimizer, keep=2)
    other = AdaMAE(model.config)
    other_optimizer = make_optimizer(other, OptimizerConfig())
    assert checkpoint.load_newest(tmp_path, {"model": other}, other_optimizer, global_batch=16) == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["exp_avg_sq"], other_optimizer.state[b]["exp_avg_sq"])


def test_only_the_newest_are_kept(tmp_path, trained):
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, checkpoint.Place(step, 16), *trained, keep=2)
    assert [p.name for p in checkpoint.existing(tmp_path)] == ["step-00000002", "step-00000010"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 917440")])
def test_a_save_that_dies_leaves_the_older_checkpoint_and_nothing_else(tmp_path, trained, monkeypatch, error):
    checkpoint.save(tmp_path, checkpoint.Place(1, 16), *trained, keep=2)

    def no_space_left(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch, "save", no_space_left)
    with pytest.raises(InputError, match="step-00000002 cannot be written"):
        checkpoint.save(tmp_path, checkpoint.Place(2, 16), *trained, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_damaged_checkpoint_and_another_batch_size_are_named(tmp_path, trained):
    folder = checkpoint.save(tmp_path, checkpoint.Place(1, 16), *trained, keep=2)
    with pytest.raises(InputError, match="took 16 clips a step and would now take 32"):
        checkpoint.load_newest(tmp_path, *trained, global_batch=32)
    (folder / "optimizer.pt").write_bytes(b"PK not really")
    with pytest.raises(InputError, match="step-00000001 cannot be resumed"):
        checkpoint.load_newest(tmp_path, *trained, global_batch=16)
