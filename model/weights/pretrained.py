"""Loads weights and configuration from a run, a checkpoint, an export, or another project."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from adamae.common.atomic_io import atomic_write
from adamae.common.errors import InputError
from adamae.common.logging import log_note
from adamae.model.adamae import AdaMAE
from adamae.model.classifier import make_classifier
from adamae.model.config import ModelConfig
from adamae.model.encoder import VideoEncoder
from adamae.model.state_dict import StateDict, check_keys, select, shapes
from adamae.model.weights.external_layouts import is_pretraining, to_own_layout
from adamae.model.weights.find_weights import find_file
from adamae.model.weights.integrity import HASH, hash_tensors
from adamae.model.weights.read_config import ASSUMED, Description, infer_config, read_description
from adamae.model.weights.tensor_files import (
    read_json,
    read_metadata,
    read_state_dict,
    save_pickle,
    save_tensors,
)

# In the metadata of a probe whose encoder has its own architecture, and is in files of its own.
ENCODER = "encoder"


class Weights(NamedTuple):
    """Weights in the layout of this project, and what is known of their model."""

    state: StateDict
    config: ModelConfig
    # A classifier's, by id; [] where the file does not name them.
    classes: list[str]
    # Whether a classifier decides about each class by itself.
    multi_label: bool = False
    # The fields of config that nothing describes.
    assumed: tuple[str, ...] = ()


def load(path: str | Path, num_frames: int = 16, like: ModelConfig | None = None) -> Weights:
    """Load weights, on the CPU, with the configuration of their model.

    path: a run folder (its newest checkpoint), a checkpoint folder, or a safetensors or PyTorch
    file written here or by the authors, of VideoMAE or of Hugging Face; as a string, also a model
    `user/name` of the Hub (model.weights.hub). Where neither the file nor a config.yaml describes
    the clips it is for, they are those of `like`, if that has as many tokens, or of `num_frames`
    square frames. Raise InputError if there is no such model, or its files are damaged.
    """
    file = find_file(path)
    state, metadata = read_state_dict(file)
    if ENCODER in metadata:
        source = read_json(metadata[ENCODER], file, dict[str, str])["source"]
        raise InputError(
            f"{file} is the head of a probe, whose encoder is {source}: evaluate.py takes the"
            f" probe, and other commands take {source}"
        )
    state = to_own_layout(state, file)
    classes = read_json(metadata.get("classes", "[]"), file, list[str])
    num_outputs = len(state.get("head.weight", classes))
    if classes and len(classes) != num_outputs:
        raise InputError(
            f"{file} is damaged (it names {len(classes)} classes and has weights for others)"
        )
    description = read_description(file, metadata)
    if description is None:
        description = Description(infer_config(state, num_frames, like), ASSUMED)
    config, assumed = description
    _check(state, config, file)
    return Weights(state, config, classes, metadata.get("multi_label") == "true", assumed)


def _check(state: StateDict, config: ModelConfig, file: Path) -> None:
    """Raise InputError, with all differences, unless these are the weights that `config` needs."""
    model: nn.Module
    # A model on the meta device takes no memory, and has the shapes that are asked for.
    with torch.device("meta"):
        if "head.weight" in state:
            model = make_classifier(state, config)
        elif is_pretraining(state) or select(state, "views."):
            masking = "adaptive" if select(state, "token_sampler.") else "random"
            # A teacher is not needed here, and may be gone.
            target = "none" if config.target == "none" else "pixels"
            model = AdaMAE(replace(config, masking=masking, target=target, teacher="", loss="mse"))
        else:
            model = VideoEncoder(config, has_norm="encoder.norm.weight" in state)
            state = _leave_out_extras(state, file)
    expected = shapes(model.state_dict())
    if config.target != "pixels":
        # The target alone knows how many values it predicts: here its head may have any shape.
        expected |= shapes(select(state, "decoder.head."))
    check_keys(expected, shapes(state), f"{file} is damaged or of another model")


def _leave_out_extras(state: StateDict, file: Path) -> StateDict:
    """Return the weights without those that encoders do not need, so that others are refused."""
    if "norm.weight" in state:
        log_note(
            f"{file} has no head: its `norm`, which follows the mean of all tokens, is left out"
        )
    extras = select(state, ("norm.", "token_sampler."))
    return {name: value for name, value in state.items() if name not in extras}


def save(path: Path, state: StateDict, metadata: dict[str, str] | None = None) -> None:
    """Write weights atomically, as safetensors with metadata, or in PyTorch's format (.pth, .pt).

    The metadata get a hash of the weights and of themselves, which `load` compares. PyTorch's
    format has weights under the key `model`, a checksum of each and no metadata. Raise InputError
    for any other name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        if path.suffix == ".safetensors":
            metadata = metadata or {"format": "pt"}
            save_tensors(partial, state, metadata | {HASH: hash_tensors(state, metadata)})
        elif path.suffix in (".pth", ".pt"):
            save_pickle(partial, {"model": state})
        else:
            raise InputError(
                f"{path} is not a file of weights: choose a name that ends in .safetensors, .pth or"
                " .pt"
            )


def make_metadata(config: ModelConfig, **facts: Any) -> dict[str, str]:
    """Make the metadata of a file of weights, from which `load` reads: a JSON text for each name.

    facts: of a classifier, `classes` (their names by id) and `multi_label` (whether it decides
    about each by itself); of a run's best classifier, `scores`, with its step; of weights that
    leave their run, `rate`, which is their `trained_rate`; of a probe without its encoder,
    `encoder`, where that is. What is empty or False is left out.
    """
    metadata = {"format": "pt", "model_config": json.dumps(asdict(config))}
    for name, value in facts.items():
        if value:
            metadata[name] = json.dumps(value)
    return metadata


def read_score(file: Path, name: str) -> float:
    """Read the score of a run's best classifier; raise InputError if there is none."""
    scores = read_json(read_metadata(file).get("scores", "{}"), file, dict[str, float])
    if name not in scores:
        raise InputError(f"{file} has no scores: remove it and re-run the command")
    return scores[name]
