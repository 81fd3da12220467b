"""Save and load checkpoints, each of which is complete or absent.

checkpoints/step-00001000/ holds model.safetensors, optimizer.pt and train_state.json. Nothing else
is needed to resume bit by bit: data order, masks, drop path and learning rate are functions of the
step. train_state.json, which is written last, has the step and the hashes of the other files.

torch.distributed.checkpoint, the alternative, writes in place and without hashes: a kill leaves
half a checkpoint.
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
from adamae.model.weights.integrity import STATE_FILE
from adamae.model.weights.tensor_files import save_pickle, save_tensors

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
    """The contents of train_state.json: how far a run is, and what its steps are made of."""

    # Optimizer steps taken; 0 only in memory, before the first checkpoint.
    step: Positive
    # Clips per step.
    global_batch: Positive
    # ShardDataset.digest, numerics.determinism_fingerprint and Task.target_digest.
    dataset: str
    fingerprint: str = ""
    target: str = ""
    # The hash of each other file of the checkpoint.
    sha256: dict[FileName, Sha256] = field(default_factory=dict)


def copy_to_host(value: Tensor) -> Tensor:
    """Copy a tensor to host memory, from a GPU without waiting for it.

    The copy is queued before the next update. It has arrived when an event that is recorded after
    it has.
    """
    # Only a copy to page-locked memory is asynchronous. Locking takes long, so PyTorch's allocator
    # keeps the memory for the next checkpoint.
    copied = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return copied.copy_(value.detach(), non_blocking=True)


def read_state(checkpoint: Path) -> TrainState:
    """Read train_state.json. Raise ValueError if it is damaged, OSError if it cannot be read."""
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
    """Write a checkpoint into `folder`, and return its path.

    modules: the tensors of each `<name>.safetensors`, which all get the metadata.
    """
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
    """List the paths that have a checkpoint's name, oldest first."""
    checkpoints = (path for path in folder.glob("step-*") if parse_step(path.name))
    return sorted(checkpoints, key=lambda path: parse_step(path.name))


def parse_step(name: str) -> int:
    """Return the step of a checkpoint's name: 1000 of step-00001000, 0 of any other name."""
    match = re.fullmatch(r"step-([0-9]{8,19})", name)
    return int(match[1]) if match else 0


def check_checkpoint(checkpoint: Path, expected: TrainState) -> None:
    """Raise InputError if a run whose steps are as `expected` cannot resume from a checkpoint.

    That is the case where a file is missing or has changed since it was written, or where the
    steps would be made of something else.
    """
    try:
        state = read_state(checkpoint)
        if state.step != parse_step(checkpoint.name):
            raise ValueError(f"{STATE_FILE} is of step {state.step}")
        for name, digest in _hash_files([checkpoint / name for name in state.sha256]).items():
            if digest != state.sha256[name]:
                raise ValueError(f"{name} has changed since it was written")
    except UNUSABLE as error:
        instead = "start from the beginning: there is no older one"
        for older in list_checkpoints(checkpoint.parent):
            if older.name < checkpoint.name:
                instead = f"resume from {older.name}"
        raise InputError(
            f"checkpoint {checkpoint} cannot be loaded ({_describe_fault(error)}): remove it to"
            f" {instead}"
        ) from error
    complaints = {
        "global_batch": f"was trained with {state.global_batch} clips per step, and this command"
        f" gives {expected.global_batch}: set global_batch={state.global_batch}, which works with"
        " any number of ranks",
        "dataset": "was trained on other shards than data.shards: set it to the same dataset,"
        " which may have moved",
        "target": "was trained on another teacher than model.teacher, or another encoder than"
        " init_from: set it to the same weights, which may have moved",
        "fingerprint": f"is deterministic and was computed on {state.fingerprint}; now it would be"
        f" on {expected.fingerprint}: restore what differs",
    }
    run = checkpoint.parents[1]
    for name, complaint in complaints.items():
        if getattr(state, name) != getattr(expected, name):
            raise InputError(
                f"{run} {complaint}, or start a new run with its weights alone: init_from={run}"
            )


def load_checkpoint(
    checkpoint: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer
) -> TrainState:
    """Load modules and optimizer; return where the run was. Raise InputError if they do not fit."""
    try:
        for name, module in modules.items():
            module.load_state_dict(load_file(checkpoint / f"{name}.safetensors"))
        groups = [group.copy() for group in optimizer.param_groups]
        optimizer.load_state_dict(
            torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        )
        # Weight decay and learning rates are the configuration's, which may have changed in a fork.
        for loaded, configured in zip(optimizer.param_groups, groups, strict=True):
            loaded.update(configured)
        return read_state(checkpoint)
    # check_checkpoint has compared the hashes, so the files are as they were written.
    except UNUSABLE as error:
        raise InputError(
            f"checkpoint {checkpoint} does not fit ({_describe_fault(error)}): set model and task"
            f" as in {checkpoint.parents[1] / 'config.yaml'}"
        ) from error


def _describe_fault(error: Exception) -> str:
    """Return in a few words what is wrong with a checkpoint, on one line."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _hash_files(files: list[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by its name."""
    # Hashing releases the GIL, so the files of a checkpoint are hashed side by side.
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip((file.name for file in files), pool.map(hash_file, files), strict=True))
