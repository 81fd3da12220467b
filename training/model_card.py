"""Write the README.md of exported weights: how to load them, and how they were trained."""

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
# Options that are paths or devices on the machine of the run, which must not be published.
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
    """Write a README.md beside `file`, which holds the tensors `exported`.

    weights: as they were read from `source`, a run, a checkpoint or a file. where: the name to load
    the exported ones by, a path or user/name on the Hugging Face Hub.
    """
    config = weights.config
    height, width = config.frame_size
    recipe: dict[str, str] = {}
    results: dict[str, float] = {}
    run = run_of(find_file(source))
    if run:
        for key, value in changed_keys(run_config(run)).items():
            if key not in LOCAL:
                recipe[key] = printable(value)
        # Later rows replace earlier ones.
        for row in read_metrics(run):
            results |= {
                name: value
                for name, value in row.items()
                if "loss" in name or name.startswith("evaluation/")
            }
    model_options = {name: value for name, value in vars(config).items() if value is not None}
    sampling = [f"{name} {value:g}" for name, value in trained_rate(source).items()]
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
        configuration=json.dumps(model_options),
        channels={3: "RGB", 1: "grayscale"}.get(
            config.in_channels, f"{config.in_channels} channels"
        ),
        rate="".join(sampling),
        num_parameters=sum(value.numel() for value in exported.values()),
        # Without the folders of this machine.
        source=source.name,
        title=where.rpartition("/")[2] if where != file.name else "AdaMAE encoder",
        sha256=hash_file(file),
        has_transformers=(file.parent / "preprocessor_config.json").exists(),
        has_timm=(file.parent / TIMM_FILE).exists(),
        recipe=recipe,
        results=results,
    )
    write_text(file.parent / "README.md", card)
