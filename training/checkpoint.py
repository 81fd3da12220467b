"""Checkpoints that are whole or absent: `RUN/checkpoints/step-00001000/` with `model.safetensors, optimizer.pt,
train_state.json`.

Nothing else is needed to go on bit by bit: data order, masks, dropout and learning rate are functions of the step.
An empty file `reviewed` joins them when what is due at that step (validation, figures) has been done.
"""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
from training import distributed
from training.manifest import FILE as MANIFEST
from training.manifest import Manifest, TrainState

REVIEWED = "reviewed"


@dataclass(frozen=True)
class State:
    """What a checkpoint holds, as tensors."""

    modules: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any]
    about: dict[str, str]  # what the files of weights say of themselves


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is made of, and put back into."""

    modules: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    about: dict[str, str]

    def state(self) -> State:
        """As it is now; the tensors are the modules' and the optimizer's own."""
        modules = {name: module.state_dict() for name, module in self.modules.items()}
        return State(modules, self.optimizer.state_dict(), self.about)


def save(folder: Path, place: TrainState, state: State) -> Path:
    """Write a checkpoint, each module as `<name>.safetensors`; raises InputError where it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    final = of_step(folder, place.step)
    if final.exists():
        return final
    aside = folder / f".{final.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        for name, tensors in state.modules.items():
            save_tensors(aside / f"{name}.safetensors", tensors, state.about)
        torch.save(state.optimizer, aside / "optimizer.pt")
        described = {"place": asdict(place), "sha256": _sha256s(list(aside.iterdir()))}
        (aside / MANIFEST).write_text(json.dumps(described) + "\n", encoding="utf-8")
        for file in (*aside.iterdir(), aside):
            sync(file)
        os.replace(aside, final)
        sync(folder)
    except (OSError, RuntimeError) as error:  # torch hides a full disk behind an error of its own
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(
            f"checkpoint {final} cannot be written ({reason}; {shutil.disk_usage(folder).free // 2**20} MiB are free):"
            " make room, and the same command goes on from the checkpoint before"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def remove_old(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints; what is not a whole one neither counts nor goes."""
    for old in whole(folder)[:-keep]:
        shutil.rmtree(old)


def existing(folder: Path) -> list[Path]:
    """What is named as this run's checkpoints are, oldest first."""
    steps = {found: step_of(found.name) for found in folder.glob("step-*")}
    return sorted((found for found, step in steps.items() if step is not None), key=lambda found: steps[found] or 0)


def whole(folder: Path) -> list[Path]:
    """Those of them whose manifest can be read, which is written last; oldest first."""
    return [found for found in existing(folder) if _is_whole(found)]


def of_step(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a checkpoint of this name is of; None where it is no name of ours."""
    digits = name.removeprefix("step-")
    is_ours = name.startswith("step-") and digits.isascii() and digits.isdigit() and len(digits) < 20
    return int(digits) if is_ours and name == f"step-{int(digits):08d}" else None


def load_newest(folder: Path, contents: Contents, start: TrainState, total_steps: int) -> TrainState:
    """Put the newest checkpoint into place, if there is one; returns where that is, `start` if there is none. All
    processes call it, and one of each machine checks the files: hashing takes longer than reading.

    Raises InputError if it does not fit, if a step from `start` would take other clips than its steps took, or if the
    processes find different ones.
    """
    found = existing(folder)
    reason = None
    if distributed.is_node_main():
        _say_what_is_left_alone(folder, found)
        if found:
            reason = _why_not(found[-1], contents, start, total_steps)
    steps, reasons = zip(*distributed.gathered((step_of(found[-1].name) if found else 0, reason)), strict=True)
    if (reason := next(filter(None, reasons), None)) is not None:
        raise InputError(reason)
    if len(set(steps)) > 1:
        raise InputError(
            f"the processes of this run find different checkpoints in {folder.parent}: put it where all machines see"
            " the same files, or, if they do, start again in a minute"
        )
    if not found:
        return start
    try:
        _put_into_place(found[-1], contents)
        return Manifest.read(found[-1]).place
    except UNUSABLE as error:
        raise InputError(_unusable(found[-1], error)) from error


# What damaged files make json, safetensors, pickle and torch raise.
UNUSABLE = (
    *(OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, EOFError),
    *(UnpicklingError, SafetensorError),
)


def _why_not(newest: Path, contents: Contents, start: TrainState, total_steps: int) -> str | None:
    """Why a run cannot go on from this checkpoint: a sentence, or None if nothing is wrong with its files."""
    try:
        manifest = Manifest.read(newest)
        if manifest.place.step != step_of(newest.name):
            raise ValueError(f"its train_state.json is of step {manifest.place.step}")
        _refuse_other_clips(newest.parents[1], manifest.place, start)
        _refuse_other_execution(newest.parents[1], manifest.place, start)
        if manifest.place.step > total_steps:
            raise ValueError(f"this run has {total_steps} steps")
        verify(newest, manifest, [*(f"{name}.safetensors" for name in contents.modules), "optimizer.pt"])
    except InputError as error:
        return str(error)
    except UNUSABLE as error:
        return _unusable(newest, error)
    return None


def verify(checkpoint: Path, manifest: Manifest, needed: list[str] | None = None) -> None:
    """Raises ValueError or OSError where a file of the checkpoint is not what it was; `needed`: files it must have."""
    for name in needed or []:
        if name not in manifest.sha256:
            raise ValueError(f"its train_state.json does not know {name}")
    for name in manifest.sha256:
        if not (checkpoint / name).is_file():
            raise ValueError(f"{name} is missing")
    for name, digest in _sha256s([checkpoint / name for name in manifest.sha256]).items():
        if digest != manifest.sha256[name]:
            raise ValueError(f"{name} has changed since it was written")


def _put_into_place(checkpoint: Path, contents: Contents) -> None:
    for name, module in contents.modules.items():
        tensors = load_file(checkpoint / f"{name}.safetensors")
        if (found := first_not_finite(tensors)) is not None:
            raise ValueError(f"{found} of {name}.safetensors is not finite")
        module.load_state_dict(tensors)
    optimizer = contents.optimizer
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True))
    for p, state in optimizer.state.items():  # which load_state_dict compares in number only
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != p.shape:
                found = f"{list(value.shape)} for {list(p.shape)}"
                raise ValueError(f"optimizer.pt is of another model: its {name} has {found}")


def first_not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of the first tensor that holds an infinity or a NaN."""
    return next((name for name, value in tensors.items() if not bool(value.isfinite().all())), None)


def _unusable(checkpoint: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    found = existing(checkpoint.parent)
    before = [older for older in found[: found.index(checkpoint)] if _is_whole(older)]
    instead = f"go on from {before[-1].name}" if before else "start from the beginning: there is no older one"
    return f"checkpoint {checkpoint} cannot be resumed ({reason}): remove it to {instead}"


def _is_whole(checkpoint: Path) -> bool:
    try:
        Manifest.read(checkpoint)
    except (OSError, ValueError):
        return False
    return True


def _say_what_is_left_alone(folder: Path, found: list[Path]) -> None:
    for stray in sorted(set(folder.glob("step-*")) - set(found)):
        log(f"{str(stray)!r} is none of this run's checkpoints, and is left alone", file=sys.stderr)


def _refuse_other_clips(run: Path, place: TrainState, start: TrainState) -> None:
    if place.global_batch != start.global_batch:
        raise InputError(
            f"{run} took {place.global_batch} clips a step and would now take {start.global_batch}:"
            f" set global_batch={place.global_batch}, which any number of processes can share, and leave accumulate"
            f" out, or begin a new run with branch={run}"
        )
    if place.videos != start.videos:
        raise InputError(
            f"{run} has learnt from other shards than data.shards names now: give these again (they may have moved),"
            f" or begin a new run with branch={run}"
        )


def _refuse_other_execution(run: Path, place: TrainState, start: TrainState) -> None:
    if place.execution != start.execution:
        raise InputError(
            f"{run} is deterministic and was computed on {place.execution}; now it would be on {start.execution}: put"
            " back what differs, or choose another run="
        )


def _sha256s(files: list[Path]) -> dict[str, str]:
    """Of each file by name; hashed side by side, as hashing lets other threads run."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip((file.name for file in files), pool.map(hash_file, files), strict=True))
