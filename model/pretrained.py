"""A model out of whatever holds one: a run folder, one of its checkpoints, an export, somebody else's checkpoint."""

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from durable import write_aside
from errors import InputError
from model.config import ModelConfig
from model.weights import from_adamae, from_huggingface, from_videomae, infer_config

StateDict = dict[str, Tensor]
CONFIG_KEY = "model_config"  # in the metadata of a safetensors file of ours: ModelConfig as JSON
CLASSES_KEY = "classes"  # there too, of a classifier: their names by id, as JSON


class Weights(NamedTuple):
    state: StateDict
    config: ModelConfig
    classes: list[str]  # a classifier's, by id; [] where the file does not say them


def load(path: str | Path, num_frames: int = 16) -> Weights:
    """The weights at `path`, in our layout, and the model they belong to; on the CPU.

    path: a run folder (its newest checkpoint), a checkpoint folder, or a safetensors or PyTorch file of ours, of the
    authors, of VideoMAE or of Hugging Face. `num_frames` is asked for where neither the file nor a config.yaml says it.
    Raises InputError where there is no such model.
    """
    file = find_file(Path(path))
    state, metadata = read_state_dict(file)
    if not _is_ours(state):
        state = from_anyone(state)
    return Weights(state, _config_of(file, metadata) or infer_config(state, num_frames), _classes(metadata))


def _config_of(file: Path, metadata: dict[str, str]) -> ModelConfig | None:
    """What is written of a model, in its file or beside it."""
    if CONFIG_KEY in metadata:
        return _config(json.loads(metadata[CONFIG_KEY]), file)
    if (run := run_of(file)) is not None:
        return _config(run_config(run)["model"], run / "config.yaml")
    if (file.parent / "config.json").is_file():
        described = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
        if described.get("model_type") == "videomae":
            return _huggingface_config(described, file.parent / "config.json")
    return None


def _classes(metadata: dict[str, str]) -> list[str]:
    classes: list[str] = json.loads(metadata.get(CLASSES_KEY, "[]"))
    return classes


def run_of(file: Path) -> Path | None:
    """The run folder that a file of weights lies in: RUN/checkpoints/step-…/ is where a run's do."""
    folder = file.absolute().parent
    return next((place for place in (folder, *folder.parents[1:2]) if (place / "config.yaml").is_file()), None)


def run_config(run: Path) -> dict[str, Any]:
    """What a run folder's config.yaml says; raises InputError where it cannot be read."""
    file = run / "config.yaml"
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{file} is damaged ({' '.join(str(error).split())}): put it back") from error
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise InputError(f"{file} is damaged (it is not the configuration of a run): put it back")
    return values


def find_file(path: Path) -> Path:
    """The file of weights that `path` means: where a run averaged its weights, the average, as it is what is judged."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"{path} does not exist: give a run folder or a checkpoint")
    for place in ("", "checkpoints/step-*/"):
        for name in ("average.safetensors", "model.safetensors", "pytorch_model.bin"):
            if found := sorted(path.glob(place + name)):
                return found[-1]
    raise InputError(f"{path} holds no checkpoint yet: give a run folder with checkpoints/, or a file of weights")


def trained_stride(path: Path) -> int:
    """The stride in source frames that a run or a checkpoint of one was trained with; 4 where `path` is neither."""
    run = run_of(find_file(path))
    return 4 if run is None else run_config(run)["data"]["frame_stride"]


def read_state_dict(file: Path) -> tuple[StateDict, dict[str, str]]:
    """The tensors of a safetensors or PyTorch file, without wrappers, and the former's metadata."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
        # The authors' files also hold the command line they were made with; nothing else than tensors and that.
        with torch.serialization.safe_globals([argparse.Namespace]):
            raw = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError(f"{file} cannot be read as weights: {str(error).splitlines()[0]}") from error
    for wrapper in ("model", "module", "state_dict"):
        if isinstance(raw, dict) and isinstance(raw.get(wrapper), dict):
            raw = raw[wrapper]
    if not isinstance(raw, dict) or not all(isinstance(value, Tensor) for value in raw.values()):
        raise InputError(f"{file} is no state dict: give a file of named tensors, alone or under `model` or `module`")
    # What torch.compile and DistributedDataParallel put in front of every name.
    return {name.removeprefix("_orig_mod.").removeprefix("module."): value for name, value in raw.items()}, {}


def from_anyone(state_dict: StateDict) -> StateDict:
    """To our layout from whichever other one `state_dict` is in."""
    if any(name.startswith("videomae.") for name in state_dict):
        return from_huggingface(state_dict)
    if "mask_token" in state_dict and "encoder.pos_embed_probs" not in state_dict:
        return from_videomae(state_dict)
    return from_adamae(state_dict)


def about(config: ModelConfig, classes: Sequence[str] = ()) -> dict[str, str]:
    """What a file of weights says of itself: the metadata that `load` reads."""
    known = {CLASSES_KEY: json.dumps(list(classes))} if classes else {}
    return {"format": "pt", CONFIG_KEY: json.dumps(asdict(config)), **known}


def save(path: Path, state_dict: StateDict, metadata: dict[str, str]) -> None:
    """Write weights and what is `about` them as one safetensors file, whole or not at all."""
    with write_aside(path) as aside:
        save_tensors(aside, state_dict, metadata)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file in place; raises OSError where the disk fails, which safetensors hides behind its own error."""
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=dict(metadata))
    except SafetensorError as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def _huggingface_config(described: dict[str, Any], where: Path) -> ModelConfig:
    theirs = {
        "encoder_width": "hidden_size",
        "encoder_depth": "num_hidden_layers",
        "encoder_heads": "num_attention_heads",
        "decoder_width": "decoder_hidden_size",
        "decoder_depth": "decoder_num_hidden_layers",
        "decoder_heads": "decoder_num_attention_heads",
        "normalize_target": "norm_pix_loss",
    }
    same = ("image_size", "patch_size", "num_frames", "tubelet_size")
    try:
        values = {ours: described[name] for ours, name in theirs.items()} | {name: described[name] for name in same}
    except KeyError as error:
        raise InputError(f"{where} does not say {error}") from error
    return ModelConfig(**values, masking="tube", mask_ratio=0.9)


def _is_ours(state_dict: StateDict) -> bool:
    return any(name.startswith("tokenizer.") for name in state_dict)


def _config(values: dict[str, Any], where: Path) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except TypeError as error:
        raise InputError(f"{where} does not describe a model of this version ({error})") from error
