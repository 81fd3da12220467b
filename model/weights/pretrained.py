"""Loads weights and configuration from a run, a checkpoint, an export, or another project's checkpoint."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from common.atomic_io import atomic_write
from common.errors import InputError
from common.logging import log_note
from common.yaml_io import read_yaml
from model.adamae import AdaMAE
from model.classifier import make_classifier
from model.config import ModelConfig
from model.encoder import VideoEncoder
from model.state_dict import StateDict, check_keys, select, shapes
from model.weights.hub import find_model
from model.weights.infer_config import infer_config
from model.weights.layouts import from_external, is_pretraining
from model.weights.weight_files import read_json, read_metadata, read_state_dict, save_pickle, save_tensors

ENCODER_PARTS = ("tokenizer.", "encoder.")  # what the names of an encoder's weights start with
HUGGINGFACE_KEYS = {  # ModelConfig's names -> those in the config.json of a VideoMAE
    "encoder_width": "hidden_size",
    "encoder_depth": "num_hidden_layers",
    "encoder_heads": "num_attention_heads",
    "decoder_width": "decoder_hidden_size",
    "decoder_depth": "decoder_num_hidden_layers",
    "decoder_heads": "decoder_num_attention_heads",
    "normalize_target": "norm_pix_loss",
    "in_channels": "num_channels",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "num_frames": "num_frames",
    "tubelet_size": "tubelet_size",
}


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
    if not any(name.startswith("tokenizer.") for name in state):
        state = from_external(state)
    if is_pretraining(state) and "encoder.norm.weight" not in state:
        log_note(f"{file} has an encoder without a last norm (use_mean_pooling): its decoder is left out")
        state = select(state, ENCODER_PARTS)
    classes = read_json(metadata.get("classes", "[]"), file, list[str])
    if classes and len(classes) != len(state.get("head.weight", classes)):
        raise InputError(f"{file} is damaged (it names {len(classes)} classes and has weights for others)")
    assumed: tuple[str, ...] = ()
    if "model_config" in metadata:
        config = _parse_config(read_json(metadata["model_config"], file, dict[str, Any]), file)
    elif (run := run_of(file)) is not None:
        config = config_of_run(run)
    elif (described := _read_huggingface(file.parent / "config.json")) is not None:
        config, assumed = described, ("masking", "mask_ratio")
    else:
        config = infer_config(state, num_frames, like)
        assumed = "masking", "mask_ratio", "num_frames", "image_size", "positions"
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
            wanted = shapes(VideoEncoder(config, has_norm="encoder.norm.weight" in state).state_dict())
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
            raise InputError(f"{path} is not a file of weights: choose a name that ends in .safetensors, .pth or .pt")


def make_metadata(config: ModelConfig, **known: Any) -> dict[str, str]:
    """Make the metadata that is read from a file of weights, as JSON each.

    known: of a classifier `classes`, their names by id, `multi_label`, whether it decides about each by itself, and of
    the best one of a run `scores`, with its step; of what leaves its run, `rate`, its `trained_rate`.
    """
    described = {"model_config": asdict(config)} | {name: value for name, value in known.items() if value}
    return {"format": "pt"} | {name: json.dumps(value) for name, value in described.items()}


def find_file(path: str | Path) -> Path:
    """Find the file of weights at `path`: of a run, the newest; averaged weights (EMA) where there are some."""
    path = find_model(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"{path} does not exist: give a run folder or a checkpoint")
    for place in ("", "checkpoints/step-*/"):
        for name in ("average.safetensors", "model.safetensors", "encoder.safetensors", "pytorch_model.bin"):
            if found := sorted(path.glob(place + name)):
                return found[-1]
    raise InputError(f"{path} holds no checkpoint yet: give a run folder with checkpoints/, or a file of weights")


def run_of(file: Path) -> Path | None:
    """Find the run directory that a file of weights is in: RUN/checkpoints/step-…/ holds a run's."""
    folder = file.absolute().parent
    return next((place for place in (folder, *folder.parents[1:2]) if (place / "config.yaml").is_file()), None)


def run_config(run: Path) -> dict[str, Any]:
    """Read a run directory's config.yaml; raises InputError where it cannot be read."""
    file = run / "config.yaml"
    if not file.is_file():
        raise InputError(f"{run} is not a run directory: it has no config.yaml")
    values = read_yaml(file)
    parts = [values.get("model"), values.get("data", {})] if isinstance(values, dict) else [values]
    if not all(isinstance(part, dict) for part in parts):
        raise InputError(f"{file} is damaged (it is not the configuration of a run): put it back")
    return values


def config_of_run(run: Path) -> ModelConfig:
    return _parse_config(run_config(run)["model"], run / "config.yaml")


def trained_rate(path: Path) -> dict[str, Any]:
    """Read data.frame_stride or data.fps of a run or an export of one, by name; a stride of 4 of anything else."""
    file = find_file(path)
    if (run := run_of(file)) is not None:
        data = run_config(run).get("data", {})
    else:
        known = read_metadata(file) if file.suffix == ".safetensors" else {}
        data = read_json(known.get("rate", '{"frame_stride": 4}'), file, dict[str, int | float])
    for name in ("frame_stride", "fps"):
        if isinstance(data.get(name), int | float) and data[name] > 0:
            return {name: data[name]}
    raise InputError(f"{run / 'config.yaml' if run else file} is damaged (no data.frame_stride above 0): put it back")


def read_score(file: Path, name: str) -> float:
    """Read the score at which a run's best classifier was saved; raises InputError where it is not there."""
    scores = read_json(read_metadata(file).get("scores", "{}"), file, dict[str, float])
    if name not in scores:
        raise InputError(f"{file} has no scores: remove it and re-run the command")
    return scores[name]


def _read_huggingface(file: Path) -> ModelConfig | None:
    """Read the configuration of a VideoMAE file its weights, if there is one."""
    if not file.is_file():
        return None
    described = {"num_channels": 3} | read_json(file, file, dict[str, Any])
    if described.get("model_type") != "videomae":
        return None
    if missing := [name for name in HUGGINGFACE_KEYS.values() if name not in described]:
        raise InputError(f"{file} does not say {', '.join(missing)}")
    values = {name: described[key] for name, key in HUGGINGFACE_KEYS.items()}
    return _parse_config({**values, "masking": "tube", "mask_ratio": 0.9}, file)


def _parse_config(values: dict[str, Any], where: Path) -> ModelConfig:
    """Check key by key, as a configuration from the command line."""
    try:
        if unknown := values.keys() - {field.name for field in fields(ModelConfig)}:
            raise TypeError(f"there is no {', '.join(sorted(map(str, unknown)))}")
        return msgspec.convert(values, ModelConfig)
    except (msgspec.ValidationError, TypeError) as error:
        raise InputError(f"{where} does not describe a model of this version ({error})") from error
