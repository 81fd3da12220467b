"""Write the README.md of exported weights: how to load them, and what the run they are of says of its training."""

import json
from pathlib import Path

import jinja2

from adamae.common.atomic_io import hash_file, write_text
from adamae.common.logging import printable
from adamae.model.state_dict import StateDict
from adamae.model.weights.find_weights import find_file, run_of
from adamae.model.weights.hub import TIMM_FILE
from adamae.model.weights.pretrained import Weights
from adamae.model.weights.read_config import run_config, trained_rate
from adamae.training.config import changed_keys
from adamae.training.report import read_metrics

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
# Options that say where something lies on the machine of the run.
LOCAL = (
    "run",
    "device",
    "data.shards",
    "data.cache_dir",
    "evaluation.shards",
    "init_from",
    "model.teacher",
)


def write_card(
    file: Path, weights: Weights, exported: StateDict, source: Path, where: str, license: str
) -> None:
    """Write a README.md beside `file`, which holds the tensors `exported`; `where`: what to load them by."""
    config = weights.config
    height, width = config.frame_size
    run = run_of(find_file(source))
    changed = changed_keys(run_config(run)) if run else {}
    newest = {
        name: value for row in (read_metrics(run) if run else ()) for name, value in row.items()
    }
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    card = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        config=config,
        size=config.dimensions,
        height=height,
        width=width,
        file=file,
        where=where,
        license=license,
        configuration=json.dumps(
            {name: value for name, value in vars(config).items() if value is not None}
        ),
        channels={3: "RGB", 1: "grayscale"}.get(
            config.in_channels, f"{config.in_channels} channels"
        ),
        rate="".join(f"{name} {value:g}" for name, value in trained_rate(source).items()),
        num_parameters=sum(value.numel() for value in exported.values()),
        source=source.name,  # not where it lies on this machine
        title=where.rpartition("/")[2] if where != file.name else "AdaMAE encoder",
        sha256=hash_file(file),
        has_transformers=(file.parent / "preprocessor_config.json").exists(),
        has_timm=(file.parent / TIMM_FILE).exists(),
        recipe={key: printable(value) for key, value in changed.items() if key not in LOCAL},
        results={
            name: value
            for name, value in newest.items()
            if "loss" in name or name.startswith("evaluation/")
        },
    )
    write_text(file.parent / "README.md", card)
