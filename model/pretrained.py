"""A model out of whatever holds one: a run folder, one of its checkpoints, an export, somebody else's checkpoint."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

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


def load(path: str | Path, num_frames: int = 16) -> tuple[StateDict, ModelConfig]:
    """The weights at `path`, in our layout, and the model they belong to; on the CPU.

    path: a run folder (its newest checkpoint), a checkpoint folder, or a safetensors or PyTorch file of ours, of the
    authors, of VideoMAE or of Hugging Face. `num_frames` is asked for where neither the file nor a config.yaml says it.
    Raises InputError where there is no such model.
    """
    file = find_file(Path(path))
    state, metadata = read_state_dict(file)
    if not _is_ours(state):
        state = from_anyone(state)
    if CONFIG_KEY in metadata:
        return state, _config(json.loads(metadata[CONFIG_KEY]), file)
    for folder in (file.parent, *file.parent.parents[1:2]):  # checkpoints/step-…/model.safetensors of a run
        if (folder / "config.yaml").is_file():
            values = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            return state, _config(values["model"], folder / "config.yaml")
    if (file.parent / "config.json").is_file():
        described = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
        if described.get("model_type") == "videomae":
            return state, _huggingface_config(described, file.parent / "config.json")
    return state, infer_config(state, num_frames)


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


def save(path: Path, state_dict: StateDict, config: ModelConfig, **metadata: str) -> None:
    """Write weights and what they belong to as one safetensors file."""
    with write_aside(path) as aside:
        tensors = {name: value.contiguous() for name, value in state_dict.items()}
        save_file(tensors, aside, metadata={CONFIG_KEY: json.dumps(asdict(config)), "format": "pt", **metadata})


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
