"""Load the configuration of a command line, on top of that of the run it resumes or starts from."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.common.logging import log
from adamae.model.config import ModelConfig
from adamae.pipeline.config import DEFAULT_STRIDE, DataConfig
from adamae.training.config import TrainConfig, parse

# Fields of ModelConfig that a run takes over from the model that it starts from. Pre-training takes
# the encoder's, and those of the clip that no config file sets; a classifier takes all. It ignores
# masks, but the shape must be one that they allow, or ModelConfig would refuse it.
BLOCKS = ("encoder_width", "encoder_depth", "encoder_heads")
ENCODER = ("size", *BLOCKS, "tubelet_size", "patch_size")
CLIP = ("num_frames", "image_size", "positions", "differences")
CLASSIFIER = (*ENCODER, *CLIP, "in_channels", "masking", "mask_ratio")


def load_config(arguments: list[str]) -> TrainConfig:
    """Parse a command line; model and frame rate are those of init_from where nothing sets them.

    Without a configuration, `run=RUN` resumes that run with its own, and `init_keep=optimizer`
    forks a run with that of its source. Raise InputError if the configuration is not valid, or a
    run or weights that it names cannot be read.
    """
    # jsonargparse, which takes a part of the second in which --help answers.
    from adamae.common.config_parser import split_overrides

    # "--steps=5" becomes "--steps": "5".
    options = dict(option.partition("=")[::2] for option in split_overrides(arguments))
    if "--config" not in options and "--data.shards" not in options:
        own_config = _find_own_config(options)
        if own_config is not None:
            arguments = ["--config", str(own_config), *arguments]
    config = parse(arguments)
    if not config.init_from:
        return config
    source_model, source_rate = _read_source(config, options)
    model = {name: getattr(source_model, name) for name in _list_inherited(config, options)}
    rate = {} if _has_own_rate(config.data, options) else source_rate
    changes = []
    for section, values in ((config.model, model), (config.data, rate)):
        for name, value in values.items():
            if value != getattr(section, name):
                changes.append(f"{name} {value}")
    if not changes:
        return config
    log(f"from checkpoint {config.init_from}: {', '.join(changes)}", sys.stderr)
    if "fps" in rate:
        # A default that would contradict it.
        rate["frame_stride"] = None
    return replace(config, model=replace(config.model, **model), data=replace(config.data, **rate))


def _read_source(
    config: TrainConfig, options: dict[str, str]
) -> tuple[ModelConfig, dict[str, Any]]:
    """Read the configuration of the model that a run starts from, and the rate of its frames.

    The rate is data.frame_stride or data.fps, by name.
    """
    # safetensors and the stores of runs, which a run from scratch does not need.
    from adamae.model.weights.read_config import (
        config_of_run,
        rate_of_run,
        read_config,
        trained_rate,
    )
    from adamae.training.remote_run import local_run

    # When the run resumes, the weights that it started from may be gone.
    own_run = _find_run(config.run)
    if own_run is not None:
        return config_of_run(own_run), rate_of_run(own_run)
    if config.task.endswith("_probe"):
        # transformers and timm, which other tasks do not need.
        from adamae.model.encoders.probe import is_other_encoder

        if is_other_encoder(config.init_from):
            return _read_other_encoder(config, options)
    source = local_run(config.init_from)
    return read_config(source, like=config.model), trained_rate(source)


def _read_other_encoder(
    config: TrainConfig, options: dict[str, str]
) -> tuple[ModelConfig, dict[str, Any]]:
    """Read clips and rate of an encoder of another architecture, which a probe is trained on.

    Raise InputError if the command line sets more of the model than the shape of clips.
    """
    from adamae.model.encoders.open_encoder import open_encoder
    from adamae.model.encoders.probe import describe_clips

    shape: dict[str, Any] = {}
    for option in options:
        name = option.removeprefix("--model.")
        if name in ("num_frames", "image_size"):
            shape[name] = getattr(config.model, name)
        elif name != option:
            raise InputError(
                f"model.{name} changes nothing with the encoder {config.init_from}: a probe of it"
                " takes model.num_frames and model.image_size"
            )
    encoder = open_encoder(config.init_from, **shape)
    return describe_clips(config.model, encoder), encoder.frame_rate or {}


def _has_own_rate(data: DataConfig, options: dict[str, str]) -> bool:
    """Return whether the command line or a config file says how far frames are apart."""
    if data.fps is not None or data.sampling == "segments":
        return True
    is_default = data.frame_stride == DEFAULT_STRIDE and "--data.frame_stride" not in options
    return not is_default


def _list_inherited(config: TrainConfig, options: dict[str, str]) -> list[str]:
    """List the fields of ModelConfig that init_from decides: those the command line does not set.

    The size sets the encoder's width, depth and heads too.
    """
    names = list(CLASSIFIER)
    if config.task == "pretrain":
        names = list(ENCODER)
        default = ModelConfig()
        for name in CLIP:
            if getattr(config.model, name) == getattr(default, name):
                names.append(name)
    set_names = [option.removeprefix("--model.") for option in options]
    if "size" in set_names:
        set_names += BLOCKS
    return [name for name in names if name not in set_names]


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
    """Return a folder with the config.yaml of a run; None if the run has no checkpoint yet."""
    from adamae.training.checkpoint import list_checkpoints
    from adamae.training.remote_run import fetch_config, staging

    path = staging(run) if is_remote(run) else Path(run)
    if list_checkpoints(path / "checkpoints"):
        return path
    if is_remote(run):
        return fetch_config(run)
    return None
