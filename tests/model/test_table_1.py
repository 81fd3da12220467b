"""Every row of the paper's Table 1 is a matter of overrides: it builds, trains, is exported and comes back."""

from pathlib import Path

import pytest
import torch
import yaml
from material import random_clip, same

from model.adamae import AdaMAE
from model.weights.layouts import from_external, to_external
from training.config import parse

ROOT = Path(__file__).parents[2]
TABLES = yaml.safe_load((ROOT / "benchmarks/ablations.yaml").read_text())
ROWS = list(dict.fromkeys(tuple(row["overrides"]) for table in TABLES.values() for row in table["rows"]))
TINY = ["model.size=tiny", "model.encoder_depth=1", "model.image_size=32", "model.patch_size=8", "data.shards=none"]


PIXELS = [row for row in ROWS if "model.target=teacher" not in row]  # test_teacher has those that need another model


@pytest.mark.parametrize("overrides", PIXELS, ids=" ".join)
def test_a_row_builds_at_full_size(overrides: tuple[str, ...]) -> None:
    config = parse(["--config", str(ROOT / "configs/ssv2_pretrain.yaml"), "data.shards=none", *overrides])
    with torch.device("meta"):
        model = AdaMAE(config.model)
    for text in overrides:
        name, value = text.split("=")
        section, _, key = name.rpartition(".")
        assert getattr(config.model if section else config, key) == yaml.safe_load(value), text
    assert sum(value.numel() for value in model.parameters()) > 9e7


@pytest.mark.parametrize("overrides", [row for row in PIXELS if not row[0].startswith("epochs")], ids=" ".join)
def test_a_row_trains_and_travels(overrides: tuple[str, ...]) -> None:
    scaled = [text.replace("=384", "=48").replace("=768", "=96") for text in overrides]
    config = parse([*TINY, *scaled]).model
    model = AdaMAE(config)
    model(random_clip(config, 1), 0, 0).loss.backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in model.parameters())
    state = model.state_dict()
    if "token_sampler.logit.weight" in state and config.sampler_width is None:
        again = from_external(to_external(state, "adamae"))
    else:
        again = from_external(to_external(state, "videomae"))
        state = {name: value for name, value in state.items() if not name.startswith("token_sampler.")}
    assert same(again, state)
