"""Checkpoints that are complete or absent: `checkpoints/step-00001000/{model.safetensors, optimizer.pt,
train_state.json}`.

Nothing else is needed to resume bit by bit: data order, masks, dropout and learning rate are functions of the step.
train_state.json, which is written last, says where the run was and holds the hashes of the other files.

torch.distributed.checkpoint, the alternative, writes in place and without hashes: a kill leaves half a checkpoint.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from adamae.common.atomic_io import atomic_write, hash_file
from adamae.common.errors import InputError
from adamae.model.weights.tensor_files import save_pickle, save_tensors

STATE_FILE = "train_state.json"
# What damaged files make safetensors, pickle and torch raise.
UNUSABLE = (
    *(OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, EOFError),
    *(UnpicklingError, SafetensorError),
)
Positive = Annotated[int, msgspec.Meta(gt=0)]
FileName = Annotated[str, msgspec.Meta(pattern="^[^/]+$")]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class TrainState:
    """How far a run is, and what its steps are made of: what train_state.json says."""

    step: Positive  # optimizer steps taken; 0 only where none has been saved
    global_batch: Positive  # clips per step
    dataset: str  # ShardDataset.digest
    fingerprint: str = ""  # numerics.determinism_fingerprint
    target: str = ""  # Task.target_digest
    sha256: dict[FileName, Sha256] = field(default_factory=dict)  # of the checkpoint's other files


def copy_to_host(value: Tensor) -> Tensor:
    """Copy a tensor. From a GPU, the copy is queued before the next update, and has arrived when an event recorded now
    has; it is in page-locked memory, which PyTorch uses again for the next checkpoint's."""
    copied = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return copied.copy_(value.detach(), non_blocking=True)


def read_state(checkpoint: Path) -> TrainState:
    """Raise ValueError where train_state.json is damaged, OSError where it cannot be read."""
    try:
        return msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=TrainState)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{STATE_FILE} is damaged: {error}") from error


def save_checkpoint(
    folder: Path,
    state: TrainState,
    modules: dict[str, dict[str, Tensor]],
    optimizer: Any,
    metadata: dict[str, str],
) -> Path:
    """Write a checkpoint, each module's tensors as `<name>.safetensors` with `metadata`."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:08d}"
    with atomic_write(final) as partial:
        partial.mkdir()
        for name, tensors in modules.items():
            save_tensors(partial / f"{name}.safetensors", tensors, metadata)
        save_pickle(partial / "optimizer.pt", optimizer)
        state = replace(state, sha256=_hash_files(list(partial.iterdir())))
        (partial / STATE_FILE).write_bytes(msgspec.json.encode(state) + b"\n")
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """List what is named as checkpoints are, oldest first."""
    found = (path for path in folder.glob("step-*") if parse_step(path.name))
    return sorted(found, key=lambda path: parse_step(path.name))


def parse_step(name: str) -> int:
    """Return the step of a checkpoint of this name; 0 where no checkpoint has such a name."""
    match = re.fullmatch(r"step-([0-9]{8,19})", name)
    return int(match[1]) if match else 0


def check_checkpoint(checkpoint: Path, expected: TrainState) -> None:
    """Raise InputError where a run whose steps are as `expected` cannot resume from a checkpoint, or a file changed."""
    try:
        found = read_state(checkpoint)
        if found.step != parse_step(checkpoint.name):
            raise ValueError(f"{STATE_FILE} is of step {found.step}")
        for name, digest in _hash_files([checkpoint / name for name in found.sha256]).items():
            if digest != found.sha256[name]:
                raise ValueError(f"{name} has changed since it was written")
    except UNUSABLE as error:
        older = [
            other for other in list_checkpoints(checkpoint.parent) if other.name < checkpoint.name
        ]
        instead = (
            f"resume from {older[-1].name}"
            if older
            else "start from the beginning: there is no older one"
        )
        sentence = f"checkpoint {checkpoint} cannot be loaded ({_describe_fault(error)}): remove it to {instead}"
        raise InputError(sentence) from error
    complaints = {
        "global_batch": f"was trained with {found.global_batch} clips per step, and this command gives"
        f" {expected.global_batch}: set global_batch={found.global_batch}, which works with any number of ranks",
        "dataset": "was trained on other shards than data.shards: set it to the same dataset, which may have moved",
        "target": "was trained on another teacher than model.teacher: set it to the same weights, which may have moved",
        "fingerprint": f"is deterministic and was computed on {found.fingerprint}; now it would be on"
        f" {expected.fingerprint}: restore what differs",
    }
    run = checkpoint.parents[1]
    for name, complaint in complaints.items():
        if getattr(found, name) != getattr(expected, name):
            raise InputError(
                f"{run} {complaint}, or start a new run with its weights alone: init_from={run}"
            )


def load_checkpoint(
    checkpoint: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer
) -> TrainState:
    """Load modules and optimizer, and return where the run was; raise InputError where they do not fit."""
    try:
        for name, module in modules.items():
            module.load_state_dict(load_file(checkpoint / f"{name}.safetensors"))
        settings = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        optimizer.load_state_dict(
            torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        )
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)  # the configuration's, which may have changed in the copy of a run
        return read_state(checkpoint)
    except UNUSABLE as error:  # its files are as they were written
        raise InputError(
            f"checkpoint {checkpoint} does not fit ({_describe_fault(error)}): set model and task as in"
            f" {checkpoint.parents[1] / 'config.yaml'}"
        ) from error


def _describe_fault(error: Exception) -> str:
    """Return in a few words what is wrong with a checkpoint."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _hash_files(files: list[Path]) -> dict[str, str]:
    """Hash each file, by name; side by side, as hashing lets other threads run."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip((file.name for file in files), pool.map(hash_file, files), strict=True))
