"""Every row of the paper's Table 1 is a matter of overrides: it builds, trains, resumes, goes out and comes back."""

from pathlib import Path

import pytest
import torch
import yaml
from made_videos import encode, write_shards
from safetensors.torch import load_file

import export
from model.adamae import AdaMAE
from train import train
from training.config import parse


def run_export(arguments: list[str]) -> None:
    export.main(export.parse_arguments(arguments))


ROOT = Path(__file__).parents[2]
TABLES = yaml.safe_load((ROOT / "benchmarks/ablations.yaml").read_text())
ROWS = list(dict.fromkeys(tuple(row["overrides"]) for table in TABLES.values() for row in table["rows"]))
NUM_STEPS = 20
TINY = [
    "model.size=tiny", "model.encoder_depth=1", "model.num_frames=16", "model.image_size=32", "model.patch_size=8",
    "data.frame_stride=1", "batch_size=2", "precision=fp32", "device=cpu", "log_every=100", "data.num_threads=1",
    "evaluation.every=null", "checkpoint_every=100", "optimizer.warmup_epochs=0",
]  # fmt: skip


def tiny(overrides: tuple[str, ...]) -> list[str]:
    """The same row for a model that trains in a second; lengths of training are what the tests say."""
    return [text.replace("=384", "=48").replace("=768", "=96") for text in overrides if not text.startswith("epochs")]


# The paper's default is in every table: once is enough.
DIFFERENT = {str(parse([*TINY, "data.shards=none", *tiny(row)]).model): row for row in ROWS}.values()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    videos = [(f"v{i}", encode(20, first=i, pattern=True)) for i in range(8)]
    return write_shards(tmp_path_factory.mktemp("table") / "shards", videos)


@pytest.mark.parametrize("overrides", ROWS, ids=" ".join)
def test_a_row_builds_at_full_size(overrides: tuple[str, ...]) -> None:
    config = parse(["--config", str(ROOT / "configs/ssv2_pretrain.yaml"), "data.shards=none", *overrides])
    with torch.device("meta"):
        model = AdaMAE(config.model)
    for text in overrides:
        name, value = text.split("=")
        section, _, key = name.rpartition(".")
        assert getattr(config.model if section else config, key) == yaml.safe_load(value), text
    assert sum(value.numel() for value in model.parameters()) > 9e7


@pytest.mark.parametrize("overrides", DIFFERENT, ids=" ".join)
def test_a_row_trains_resumes_and_travels(overrides: tuple[str, ...], shards: Path, tmp_path: Path) -> None:
    common = [*TINY, f"data.shards={shards}", f"run={tmp_path / 'run'}", *tiny(overrides)]
    train(parse([*common, f"steps={NUM_STEPS // 2}"]))
    halfway = load_file(tmp_path / f"run/checkpoints/step-{NUM_STEPS // 2:08d}/model.safetensors")
    (tmp_path / "run/config.yaml").unlink()  # another number of steps is another run: let this one go on all the same
    train(parse([*common, f"steps={NUM_STEPS}"]))
    state = load_file(tmp_path / f"run/checkpoints/step-{NUM_STEPS:08d}/model.safetensors")
    assert any(not torch.equal(state[name], halfway[name]) for name in state)
    assert all(torch.isfinite(value).all() for value in state.values())

    adaptive, narrow = any("token_sampler" in name for name in state), "token_sampler.projection.weight" in state
    layout = "adamae" if adaptive and not narrow else "videomae"
    run_export(["export", str(tmp_path / "run"), str(tmp_path / "theirs.safetensors"), "--to", layout])
    run_export(["import", str(tmp_path / "theirs.safetensors"), str(tmp_path / "ours.safetensors")])
    again = load_file(tmp_path / "ours.safetensors")
    kept = state if layout == "adamae" else {k: v for k, v in state.items() if not k.startswith("token_sampler.")}
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[name], kept[name]) for name in kept)
