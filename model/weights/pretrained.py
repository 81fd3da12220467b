"""Loads weights and configuration from a run, a checkpoint, an export, or another project's checkpoint."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adamae.common.atomic_io import atomic_write
from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.classifier import make_classifier
from adamae.model.config import ModelConfig
from adamae.model.encoder import VideoEncoder
from adamae.model.state_dict import ENCODER_PARTS, StateDict, check_keys, select, shapes
from adamae.model.weights.external_layouts import is_pretraining, to_own_layout
from adamae.model.weights.find_weights import find_file
from adamae.model.weights.read_config import ASSUMED, Description, infer_config, read_description
from adamae.model.weights.tensor_files import (
    read_json,
    read_metadata,
    read_state_dict,
    save_pickle,
    save_tensors,
)


class Weights(NamedTuple):
    state: StateDict
    config: ModelConfig
    classes: list[str]  # a classifier's, by id; [] where the file does not say them
    multi_label: bool = False  # whether it decides about each class by itself
    assumed: tuple[str, ...] = ()  # the fields of config that nothing says


def load(path: str | Path, num_frames: int = 16, like: ModelConfig | None = None) -> Weights:
    """Load the weights at `path`, in the layout of this project, and the configuration of their model, on the CPU.

    path: a run folder (its newest checkpoint), a checkpoint folder, or a safetensors or PyTorch file written here or
    by the authors, of VideoMAE or of Hugging Face; as a string, also a model `user/name` of the Hub
    (model.weights.hub). Where neither the file nor a config.yaml says what clips it is for, they are those of `like`,
    if that has as many tokens, or of `num_frames` square frames. Raises InputError where there is no such model.
    """
    file = find_file(path)
    state, metadata = read_state_dict(file)
    state = to_own_layout(state, file)
    classes = read_json(metadata.get("classes", "[]"), file, list[str])
    if classes and len(classes) != len(state.get("head.weight", classes)):
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
    """Raise InputError, with all that is wrong, unless these are all weights of a model of `config`."""
    with torch.device("meta"):
        if "head.weight" in state:
            wanted = shapes(make_classifier(state, config).state_dict())
        elif is_pretraining(state):
            masking = "adaptive" if select(state, "token_sampler.") else "random"
            plain = replace(config, masking=masking, target="pixels", teacher="", loss="mse")
            wanted = shapes(AdaMAE(plain).state_dict())
        else:
            wanted = shapes(
                VideoEncoder(config, has_norm="encoder.norm.weight" in state).state_dict()
            )
            state = select(state, ENCODER_PARTS)
    if config.target != "pixels":  # a teacher may be gone, and is not needed for the encoder
        wanted |= shapes(select(state, "decoder.head."))
    check_keys(wanted, shapes(state), f"{file} is damaged or of another model")


def save(path: Path, state: StateDict, metadata: dict[str, str] | None = None) -> None:
    """Write weights atomically: as safetensors, with metadata, or where the name ends in .pth or .pt, in PyTorch's
    format under the key `model`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        if path.suffix == ".safetensors":
            save_tensors(partial, state, metadata or {"format": "pt"})
        elif path.suffix in (".pth", ".pt"):
            save_pickle(partial, {"model": state})
        else:
            raise InputError(
                f"{path} is not a file of weights: choose a name that ends in .safetensors, .pth or .pt"
            )


def make_metadata(config: ModelConfig, **known: Any) -> dict[str, str]:
    """Make the metadata that is read from a file of weights, as JSON each.

    known: of a classifier `classes`, their names by id, `multi_label`, whether it decides about each by itself, and of
    the best one of a run `scores`, with its step; of what leaves its run, `rate`, its `trained_rate`.
    """
    described = {"model_config": asdict(config)} | {
        name: value for name, value in known.items() if value
    }
    return {"format": "pt"} | {name: json.dumps(value) for name, value in described.items()}


def read_score(file: Path, name: str) -> float:
    """Read the score at which a run's best classifier was saved; raises InputError where it is not there."""
    scores = read_json(read_metadata(file).get("scores", "{}"), file, dict[str, float])
    if name not in scores:
        raise InputError(f"{file} has no scores: remove it and re-run the command")
    return scores[name]
