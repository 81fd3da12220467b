"""Every row of the paper's Table 1 is a matter of overrides."""

from pathlib import Path

import pytest
import torch
import yaml

from adamae.model.adamae import AdaMAE
from adamae.training.config import parse

ROOT = Path(__file__).parents[2]
TABLES = yaml.safe_load((ROOT / "benchmarks/ablations.yaml").read_text())
ROWS = dict.fromkeys(tuple(row["overrides"]) for table in TABLES.values() for row in table["rows"])
# test_teacher.py has those that need another model.
PIXELS = [row for row in ROWS if "model.target=teacher" not in row]


@pytest.mark.parametrize("overrides", PIXELS, ids=" ".join)
def test_a_row_builds_at_full_size(overrides: tuple[str, ...]) -> None:
    recipe = str(ROOT / "configs/ssv2_pretrain.yaml")
    config = parse(["--config", recipe, "data.shards=none", *overrides])
    with torch.device("meta"):
        model = AdaMAE(config.model)
    for text in overrides:
        name, value = text.split("=")
        section, _, key = name.rpartition(".")
        owner = config.model if section else config
        assert getattr(owner, key) == yaml.safe_load(value), text
    assert sum(value.numel() for value in model.parameters()) > 9e7
