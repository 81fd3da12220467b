"""Runs that start from weights, as a fork of a run, or in the shape of a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import is_same, load_weights, read_losses
from torch import Tensor

from adamae.common.arithmetic import round_up
from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.weights.external_layouts import to_external
from adamae.model.weights.pretrained import save
from adamae.model.weights.read_config import config_of_run, run_config
from adamae.train import train
from adamae.training import remote_run
from adamae.training.config import TrainConfig
from adamae.training.load_config import load_config


def run(*arguments: str) -> TrainConfig:
    """Train by a command line; return its configuration."""
    config = load_config(list(arguments))
    train(config)
    return config


def fork(source: Path, folder: Path, *overrides: str) -> TrainConfig:
    """Continue a run, with its optimizer, in another folder."""
    return run(f"init_from={source}", "init_keep=optimizer", f"run={folder}", *overrides)


def take_back(run: Path, step: int) -> dict[str, Tensor]:
    """Remove a run's last checkpoint; return its weights."""
    weights = load_weights(run, step)
    shutil.rmtree(run / f"checkpoints/step-{step:08d}")
    return weights


@pytest.fixture
def source(tiny_run: Path, tmp_path: Path) -> Path:
    """Copy a run that may be changed or removed."""
    return Path(shutil.copytree(tiny_run, tmp_path / "source"))


def test_a_fork_with_the_same_settings_ends_as_its_source_and_resumes_without_it(
    source: Path, tmp_path: Path
) -> None:
    fork(source / "checkpoints/step-00000003", tmp_path / "run", "checkpoint_every=2")
    assert list(read_losses(tmp_path / "run")) == [4, 5, 6]
    whole = load_weights(source)
    assert is_same(take_back(tmp_path / "run", 6), whole)
    shutil.rmtree(source)
    run(f"run={tmp_path / 'run'}")
    assert is_same(load_weights(tmp_path / "run"), whole)


def test_a_fork_may_be_longer_and_have_other_settings(tiny_run: Path, tmp_path: Path) -> None:
    fork(tiny_run, tmp_path / "run", "steps=9", "optimizer.weight_decay=0.5")
    assert list(read_losses(tmp_path / "run")) == [7, 8, 9]
    state = torch.load(tmp_path / "run/checkpoints/step-00000009/optimizer.pt", weights_only=True)
    assert {int(moments["step"]) for moments in state["state"].values()} == {9}
    assert {group["weight_decay"] for group in state["param_groups"]} == {0, 0.5}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "init_from={folder}/w.safetensors",
            "needs a run or one of its checkpoints, and init_from=.*w.safetensors is",
        ),
        (
            "init_from={source} batch_size=2",
            "was trained with 4 clips per step, and this command gives 2: set global_batch=4"
            ".*with its weights alone",
        ),
        (
            "init_from={source} model.decoder_depth=1",
            "step-00000006 does not fit .*: set model and task as in",
        ),
        ("", "init_keep=optimizer continues another run: set init_from"),
    ],
)
def test_what_cannot_be_forked_is_one_sentence(
    source: Path, arguments: list[str], tmp_path: Path, overrides: str, message: str
) -> None:
    shutil.copy(source / "checkpoints/step-00000006/model.safetensors", tmp_path / "w.safetensors")
    changes = overrides.format(source=source, folder=tmp_path).split()
    with pytest.raises(InputError, match=message) as raised:
        run(*arguments, "init_keep=optimizer", *changes)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_run_at_a_url_resumes_on_a_fresh_node_when_its_source_is_gone(
    source: Path, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node knows whether a run is new only when it has downloaded it.

    The clips of the run are not square, unlike those of its source.
    """
    bucket = tmp_path / "bucket/run"
    arguments = [
        *arguments,
        f"run=file://{bucket}",
        f"init_from={source}",
        "steps=3",
        "checkpoint_every=2",
        "model.image_size=[16,48]",
        "data.crop=random_resized",
    ]
    monkeypatch.setattr(remote_run, "user_cache_dir", lambda: tmp_path / "first")
    run(*arguments)
    whole = take_back(bucket, 3)
    assert whole["token_sampler.positions"].shape == (2 * 2 * 6, 96)
    shutil.rmtree(source)
    monkeypatch.setattr(remote_run, "user_cache_dir", lambda: tmp_path / "second")
    run(*arguments)
    assert is_same(load_weights(bucket, 3), whole)


def test_pretraining_starts_from_weights(
    tiny_run: Path, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first loss is near the source's last one, although its clips are others."""
    run(*arguments, f"init_from={tiny_run}", "steps=1", "seed=1")
    assert f"weights of {tiny_run}: tokenizer, encoder's blocks" in capsys.readouterr().err
    before = read_losses(tiny_run)
    assert read_losses(tmp_path / "run")[1] < (before[1] + before[6]) / 2


def labeled(arguments: list[str], checkpoint: Path, *overrides: str) -> list[str]:
    """Return the command line of a probe, without any option of the model."""
    others = [argument for argument in arguments if not argument.startswith("model.")]
    return [*others, "task=linear_probe", f"init_from={checkpoint}", "steps=1", *overrides]


def test_a_probe_has_the_shape_of_its_checkpoint_and_resumes_without_it(
    source: Path, arguments: list[str], tmp_path: Path
) -> None:
    arguments = labeled(arguments, source, "steps=3", "checkpoint_every=2")
    config = run(*arguments)
    assert config.model.dimensions == ModelConfig(size="tiny").dimensions
    assert (config.model.num_frames, config.model.image_size, config.model.patch_size) == (4, 32, 8)
    assert run_config(tmp_path / "run")["model"]["image_size"] == 32
    whole = take_back(tmp_path / "run", 3)
    shutil.rmtree(source)
    assert run(*arguments).model == config.model
    assert is_same(load_weights(tmp_path / "run", 3), whole)


def test_the_rate_of_frames_is_the_checkpoints_unless_something_sets_it(
    tiny_run: Path, tmp_path: Path
) -> None:
    words = ["data.shards=s", "task=attentive_probe", f"init_from={tiny_run}"]
    assert load_config(words).data.frame_stride == 2
    assert load_config([*words, "data.frame_stride=4"]).data.frame_stride == 4
    assert load_config([*words, "data.fps=8"]).data.frame_stride is None
    by_time = tmp_path / "by_time.yaml"
    by_time.write_text("data: {fps: 8}")
    assert load_config(["--config", str(by_time), *words]).data.fps == 8
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    config = (run / "config.yaml").read_text()
    config = config.replace("frame_stride: 2", "frame_stride: null").replace("fps: null", "fps: 8")
    (run / "config.yaml").write_text(config)
    data = load_config([*words[:2], f"init_from={run}"]).data
    assert (data.fps, data.frame_stride) == (8, None)


def test_only_what_was_asked_for_and_differs_is_an_error(
    tiny_run: Path, arguments: list[str], tmp_path: Path
) -> None:
    config = load_config(labeled(arguments, tiny_run, "model.image_size=48", "model.num_frames=8"))
    assert (config.model.num_frames, config.model.image_size, config.model.patch_size) == (8, 48, 8)
    message = r"encoder_width 96 instead of 384.*patch_size 8 instead of 16"
    with pytest.raises(InputError, match=message):
        run(*labeled(arguments, tiny_run, "model.size=small", "model.patch_size=16"))
    assert not (tmp_path / "run").exists()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model:\n  size: small\n  image_size: 64\n")
    config = load_config(["--config", str(recipe), *labeled(arguments, tiny_run)])
    assert config.model.dimensions == ModelConfig(size="tiny").dimensions
    assert config.model.image_size == 32


def test_published_weights_give_what_they_know(arguments: list[str], tmp_path: Path) -> None:
    shape = ModelConfig(size="tiny", num_frames=16, image_size=32, patch_size=8)
    weights = to_external(AdaMAE(shape).state_dict(), "adamae")
    torch.save({"model": weights}, tmp_path / "published.pth")
    config = load_config(labeled(arguments, tmp_path / "published.pth"))
    assert (config.model.patch_size, config.model.grid) == (8, (8, 4, 4))
    assert config.model.dimensions[:3] == shape.dimensions[:3]


def test_an_average_goes_on_in_a_fork(tiny_run: Path, arguments: list[str], tmp_path: Path) -> None:
    run(*labeled(arguments, tiny_run, "finetune.ema_decay=0.5", "checkpoint_every=1", "steps=2"))
    fork(tmp_path / "run/checkpoints/step-00000001", tmp_path / "fork")
    for name in ("model", "average"):
        weights = load_weights(tmp_path / "run", 2, name)
        assert is_same(load_weights(tmp_path / "fork", 2, name), weights)


def test_pretraining_takes_the_shape_of_the_encoder_that_it_starts_from(
    tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of the command line stay; all others, also those of the clip, are the source's."""
    options = ["model.patch_size=16", "model.image_size=64", "model.mask_ratio=0.5"]
    config = load_config(["data.shards=s", f"init_from={tiny_run}", *options])
    source = config_of_run(tiny_run)
    assert config.model.dimensions == source.dimensions
    assert config.model.tubelet_size == source.tubelet_size
    assert config.model.num_frames == source.num_frames
    assert (config.model.patch_size, config.model.image_size) == (16, 64)
    assert f"from checkpoint {tiny_run}: size tiny" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["external.safetensors", "external.pth"])
def test_the_shape_of_a_model_is_learned_without_its_numbers(
    name: str, arguments: list[str], tmp_path: Path
) -> None:
    """All numbers are NaN, and the file of safetensors has 64 GiB, most of it a hole."""
    shape = ModelConfig(size="tiny", num_frames=16, image_size=32, patch_size=8)
    weights = to_external(AdaMAE(shape).state_dict(), "adamae")
    path = tmp_path / name
    save(path, {name: torch.full_like(value, torch.nan) for name, value in weights.items()})
    if path.suffix == ".safetensors":
        add_hole(path)
    config = load_config(labeled(arguments, path))
    assert (config.model.patch_size, config.model.grid) == (8, (8, 4, 4))
    assert config.model.dimensions[:3] == shape.dimensions[:3]


def add_hole(file: Path) -> None:
    """Add a tensor of 64 GiB to a safetensors file, as a hole that takes no space on the disk."""
    contents = file.read_bytes()
    end = 8 + int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8:end])
    start = len(contents) - end
    header["hole"] = {
        "dtype": "F32",
        "shape": [2**17, 2**17],
        "data_offsets": [start, start + 2**36],
    }
    text = json.dumps(header).encode()
    # The format pads the header to a multiple of 8 bytes.
    text = text.ljust(round_up(len(text), 8))
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text + contents[end:])
        opened.truncate(8 + len(text) + start + 2**36)
