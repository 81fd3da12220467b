"""The configuration of a command line, on top of what the run that it resumes or starts from says."""

import sys
from dataclasses import replace
from pathlib import Path

from common.logging import log
from model.config import ModelConfig
from pipeline.reading.storage import is_remote
from training.config import TrainConfig, parse

# What is taken over of the model that a run starts from: by pre-training, the encoder and, where no config file says
# another one, the clip; by a classifier, both. How that was masked only decides whether the shape is a possible one.
ENCODER = ("size", "encoder_width", "encoder_depth", "encoder_heads", "tubelet_size", "patch_size")
CLIP = ("num_frames", "image_size", "positions", "differences")
SHAPE = (*ENCODER, *CLIP, "in_channels", "masking", "mask_ratio")


def load_config(arguments: list[str]) -> TrainConfig:
    """Parse a command line; the model has the shape of init_from where the command line says nothing else. Without a
    configuration, `run=RUN` resumes that run, and `init_keep=optimizer` forks one, with its own.

    Raise InputError.
    """
    from common.config_parser import split_overrides

    options = dict(option.partition("=")[::2] for option in split_overrides(arguments))
    if not {"--config", "--data.shards"} & options.keys() and (own := _find_own_config(options)):
        arguments = ["--config", str(own), *arguments]
    config = parse(arguments)
    if not config.init_from:
        return config
    from model.weights import pretrained
    from training.remote_run import local_run

    # Once the run has begun, what it started from may be gone.
    own = _find_run(config.run)
    source = (
        pretrained.config_of_run(own) if own else pretrained.load(local_run(config.init_from), like=config.model).config
    )
    names: tuple[str, ...] = SHAPE
    if config.task == "pretrain":
        names = (*ENCODER, *(name for name in CLIP if getattr(config.model, name) == getattr(ModelConfig(), name)))
    left = [name for name in names if f"--model.{name}" not in options]
    if "--model.size" in options:
        left = [name for name in left if name not in ("encoder_width", "encoder_depth", "encoder_heads")]
    shape = {name: getattr(source, name) for name in left}
    if changed := [f"{name} {value}" for name, value in shape.items() if value != getattr(config.model, name)]:
        log(f"from checkpoint {config.init_from}: {', '.join(changed)}", sys.stderr)
    return replace(config, model=replace(config.model, **shape))


def _find_own_config(options: dict[str, str]) -> Path | None:
    """Return the config.yaml of the run that is resumed, or else of the one that is forked."""
    run = _find_run(options["--run"]) if options.get("--run") else None
    if run is None and options.get("--init_keep") == "optimizer" and options.get("--init_from"):
        from model.weights.pretrained import find_file, run_of
        from training.remote_run import local_run

        run = run_of(find_file(local_run(options["--init_from"])))
    return run and run / "config.yaml"


def _find_run(run: str) -> Path | None:
    """Return a folder with the config.yaml of a run that has checkpoints; None if it has not begun."""
    from training.checkpoint import list_checkpoints
    from training.remote_run import fetch_config, staging

    path = staging(run) if is_remote(run) else Path(run)
    if list_checkpoints(path / "checkpoints"):
        return path
    return fetch_config(run) if is_remote(run) else None
