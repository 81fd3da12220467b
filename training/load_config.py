"""The configuration of a command line, on top of that of the run that it resumes or starts from."""

import sys
from dataclasses import replace
from pathlib import Path

from adamae.common.logging import log
from adamae.model.config import ModelConfig
from adamae.pipeline.reading.storage import is_remote
from adamae.training.config import TrainConfig, parse

# What is taken over of the model that a run starts from: by pre-training, the encoder and, where no config file says
# another one, the clip; by a classifier, both. How that was masked only decides whether the shape is a possible one.
BLOCKS = ("encoder_width", "encoder_depth", "encoder_heads")
ENCODER = ("size", *BLOCKS, "tubelet_size", "patch_size")
CLIP = ("num_frames", "image_size", "positions", "differences")
CLASSIFIER = (*ENCODER, *CLIP, "in_channels", "masking", "mask_ratio")


def load_config(arguments: list[str]) -> TrainConfig:
    """Parse a command line; the model has the shape of init_from where the command line does not set it.

    Without a configuration, `run=RUN` resumes that run with its own, and `init_keep=optimizer` forks one with that of
    the source. Raise InputError if the configuration is not valid, or what it names cannot be read.
    """
    from adamae.common.config_parser import split_overrides

    options = dict(option.partition("=")[::2] for option in split_overrides(arguments))
    if "--config" not in options and "--data.shards" not in options:
        own_config = _find_own_config(options)
        if own_config is not None:
            arguments = ["--config", str(own_config), *arguments]
    config = parse(arguments)
    if not config.init_from:
        return config
    source = _read_source(config)
    shape = {name: getattr(source, name) for name in _list_taken_over(config, options)}
    changed = [
        f"{name} {value}" for name, value in shape.items() if value != getattr(config.model, name)
    ]
    if changed:
        log(f"from checkpoint {config.init_from}: {', '.join(changed)}", sys.stderr)
    return replace(config, model=replace(config.model, **shape))


def _read_source(config: TrainConfig) -> ModelConfig:
    """Read the configuration of the model that a run starts from."""
    from adamae.model.weights.read_config import config_of_run, read_config
    from adamae.training.remote_run import local_run

    # Once the run has begun, what it started from may be gone.
    own_run = _find_run(config.run)
    if own_run is not None:
        return config_of_run(own_run)
    return read_config(local_run(config.init_from), like=config.model)


def _list_taken_over(config: TrainConfig, options: dict[str, str]) -> list[str]:
    """List the fields of ModelConfig whose values are those of init_from: all that the command line does not set."""
    names = list(CLASSIFIER)
    if config.task == "pretrain":
        default = ModelConfig()
        unset = [name for name in CLIP if getattr(config.model, name) == getattr(default, name)]
        names = [*ENCODER, *unset]
    if "--model.size" in options:
        names = [name for name in names if name not in BLOCKS]
    return [name for name in names if f"--model.{name}" not in options]


def _find_own_config(options: dict[str, str]) -> Path | None:
    """Return the config.yaml of the run that is resumed, or else of the one that is forked."""
    run = None
    if options.get("--run"):
        run = _find_run(options["--run"])
    if run is None and options.get("--init_keep") == "optimizer" and options.get("--init_from"):
        from adamae.model.weights.find_weights import find_file, run_of
        from adamae.training.remote_run import local_run

        run = run_of(find_file(local_run(options["--init_from"])))
    if run is None:
        return None
    return run / "config.yaml"


def _find_run(run: str) -> Path | None:
    """Return a folder with the config.yaml of a run that has checkpoints; None if it has not begun."""
    from adamae.training.checkpoint import list_checkpoints
    from adamae.training.remote_run import fetch_config, staging

    path = staging(run) if is_remote(run) else Path(run)
    if list_checkpoints(path / "checkpoints"):
        return path
    if is_remote(run):
        return fetch_config(run)
    return None
