"""Checkpoints that are complete or absent: `checkpoints/step-00001000/{model.safetensors, optimizer.pt,
train_state.json}`.

Nothing else is needed to resume bit by bit: data order, masks, dropout and learning rate are functions of the step.
train_state.json, which is written last, says where the run was and holds the hashes of the other files.
"""

import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from common.atomic_io import hash_file, sync
from common.errors import InputError
from common.logging import log
from model.weights.weight_files import save_tensors

STATE_FILE = "train_state.json"
MAX_BYTES = 2**20  # of train_state.json, which has some hundred
# What damaged files make json, safetensors, pickle and torch raise.
UNUSABLE = (
    *(OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, EOFError),
    *(UnpicklingError, SafetensorError),
)


@dataclass(frozen=True)
class TrainState:
    """How far a run is, and what its steps are made of."""

    step: int  # optimizer steps taken
    global_batch: int  # clips per step
    dataset: str  # ShardDataset.digest
    fingerprint: str = ""  # numerics.determinism_fingerprint


@dataclass(frozen=True)
class Snapshot:
    """The tensors of a checkpoint."""

    modules: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any]
    metadata: dict[str, str]  # of the weights' files


@dataclass(frozen=True)
class Manifest:
    """What train_state.json says."""

    state: TrainState
    sha256: dict[str, str]  # of the checkpoint's other files, by name

    @classmethod
    def read(cls, checkpoint: Path) -> "Manifest":
        """Read that of a checkpoint's folder. Raise ValueError or OSError, with a reason, where it is none of ours."""
        file = checkpoint / STATE_FILE
        if not checkpoint.is_dir():
            raise ValueError("it is not a folder")
        if not file.is_file():
            raise ValueError(f"{STATE_FILE} is missing")
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"{STATE_FILE} is too large")
        return cls.parse(file.read_bytes())

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        """Raise ValueError where `data` is not what train_state.json holds."""
        try:
            parsed = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{STATE_FILE} is not JSON: {error}") from error
        state, digests = _field(parsed, "state", dict), _field(parsed, "sha256", dict)
        for name, digest in digests.items():
            if Path(name).name != name or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"{STATE_FILE} has sha256 {digest!r} for {name!r}"[:200])
        values = {field.name: _field(state, field.name, field.type) for field in fields(TrainState)}
        for name in ("step", "global_batch"):
            if values[name] < 1:
                raise ValueError(f"{STATE_FILE} has {name} {values[name]}")
        return cls(TrainState(**values), digests)


def _field(values: Any, name: str, kind: Any) -> Any:
    if not isinstance(values, dict) or name not in values:
        raise ValueError(f"{STATE_FILE} does not have {name}")
    if type(values[name]) is not kind:  # bool is an int to isinstance
        raise ValueError(f"{STATE_FILE} has {name} {values[name]!r}"[:200])
    return values[name]


def save_checkpoint(folder: Path, state: TrainState, snapshot: Snapshot) -> Path:
    """Write a checkpoint, each module as `<name>.safetensors`; raise InputError where it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:08d}"
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        for name, tensors in snapshot.modules.items():
            save_tensors(partial / f"{name}.safetensors", tensors, snapshot.metadata)
        torch.save(snapshot.optimizer, partial / "optimizer.pt")
        manifest = {"state": asdict(state), "sha256": _hash_files(list(partial.iterdir()))}
        (partial / STATE_FILE).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        for file in (*partial.iterdir(), partial):
            sync(file)
        os.replace(partial, final)
        sync(folder)
    except (OSError, RuntimeError) as error:  # torch hides a full disk behind an error of its own
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(
            f"checkpoint {final} cannot be written ({reason}; {shutil.disk_usage(folder).free // 2**20} MiB free):"
            " free disk space; re-run the same command to resume from the checkpoint before"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """List what is named as checkpoints are, oldest first."""
    steps = {found: parse_step(found.name) for found in folder.glob("step-*")}
    return sorted((found for found, step in steps.items() if step is not None), key=lambda found: steps[found] or 0)


def complete_checkpoints(folder: Path) -> list[Path]:
    """List those whose train_state.json, which is written last, can be read; oldest first."""
    return [found for found in list_checkpoints(folder) if _is_complete(found)]


def _is_complete(checkpoint: Path) -> bool:
    try:
        Manifest.read(checkpoint)
    except (OSError, ValueError):
        return False
    return True


def parse_step(name: str) -> int | None:
    """Return the step of a checkpoint of this name; None where no checkpoint has such a name."""
    match = re.fullmatch(r"step-([0-9]{8,19})", name)
    return int(match[1]) if match and name == f"step-{int(match[1]):08d}" else None


def remove_old(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints; what is not a complete one neither counts nor goes."""
    for old in complete_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def warn_of_unknown(folder: Path) -> None:
    for unknown in sorted(set(folder.glob("step-*")) - set(list_checkpoints(folder))):
        log(f"ignoring unknown folder {str(unknown)!r}", file=sys.stderr)


def check_checkpoint(checkpoint: Path, expected: TrainState, module_names: list[str]) -> None:
    """Raise InputError if a run whose steps are as `expected` cannot go on from a checkpoint, or its files changed."""
    run = checkpoint.parents[1]
    try:
        manifest = Manifest.read(checkpoint)
        if manifest.state.step != parse_step(checkpoint.name):
            raise ValueError(f"{STATE_FILE} is of step {manifest.state.step}")
        for name in [*(f"{name}.safetensors" for name in module_names), "optimizer.pt"]:
            if name not in manifest.sha256:
                raise ValueError(f"{STATE_FILE} does not list {name}")
        verify_files(checkpoint, manifest)
    except UNUSABLE as error:
        raise InputError(_describe_unusable(checkpoint, error)) from error
    found, other = manifest.state, f"or start a new run with init_from={run}"
    if found.global_batch != expected.global_batch:
        raise InputError(
            f"{run} was trained with {found.global_batch} clips per step, and this command gives"
            f" {expected.global_batch}: set global_batch={found.global_batch}, which works with any number of ranks,"
            f" and remove accumulate, {other}"
        )
    if found.dataset != expected.dataset:
        raise InputError(
            f"{run} was trained on other shards than data.shards: set it to the same dataset, which may have moved,"
            f" {other}"
        )
    if found.fingerprint != expected.fingerprint:
        raise InputError(
            f"{run} is deterministic and was computed on {found.fingerprint}; now it would be on"
            f" {expected.fingerprint}: restore what differs, {other}"
        )


def verify_files(checkpoint: Path, manifest: Manifest) -> None:
    """Raise ValueError or OSError where a file of the checkpoint is not what it was."""
    for name in manifest.sha256:
        if not (checkpoint / name).is_file():
            raise ValueError(f"{name} is missing")
    for name, digest in _hash_files([checkpoint / name for name in manifest.sha256]).items():
        if digest != manifest.sha256[name]:
            raise ValueError(f"{name} has changed since it was written")


def load_checkpoint(checkpoint: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> TrainState:
    """Load modules and optimizer, and return where the run was; raise InputError where they do not fit."""
    try:
        for name, module in modules.items():
            tensors = load_file(checkpoint / f"{name}.safetensors")
            if (bad := find_not_finite(tensors)) is not None:
                raise ValueError(f"{bad} of {name}.safetensors is not finite")
            module.load_state_dict(tensors)
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True))
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)  # the configuration's, which a run that forks another may have changed
        for p, moments in optimizer.state.items():  # which load_state_dict compares in number only
            for name, value in moments.items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape != p.shape:
                    found = f"{list(value.shape)} instead of {list(p.shape)}"
                    raise ValueError(f"optimizer.pt is of another model: its {name} is {found}")
        return Manifest.read(checkpoint).state
    except UNUSABLE as error:
        raise InputError(_describe_unusable(checkpoint, error)) from error


def find_not_finite(tensors: dict[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds an infinity or a NaN."""
    return next((name for name, value in tensors.items() if not bool(value.isfinite().all())), None)


def _describe_unusable(checkpoint: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    older = [other for other in complete_checkpoints(checkpoint.parent) if other.name < checkpoint.name]
    instead = f"resume from {older[-1].name}" if older else "start from the beginning: there is no older one"
    return f"checkpoint {checkpoint} cannot be loaded ({reason}): remove it to {instead}"


def _hash_files(files: list[Path]) -> dict[str, str]:
    """Hash each file, by name; side by side, as hashing lets other threads run."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip((file.name for file in files), pool.map(hash_file, files), strict=True))
