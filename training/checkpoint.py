"""Checkpoints that are whole or absent: `RUN/checkpoints/step-00001000/{model.safetensors, optimizer.pt, place.json}`.

Nothing else is needed to go on bit by bit: data order, masks, dropout and learning rate are functions of the step.
An empty file `reviewed` joins them when what is due at that step (validation, figures) has been done.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from durable import sync
from errors import InputError
from model.weight_files import save_tensors


@dataclass(frozen=True)
class Place:
    """Where a run is, and in what."""

    step: int  # optimizer steps done
    global_batch: int  # clips of the global stream per step
    videos: str  # ShardDataset.digest


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds."""

    modules: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    about: dict[str, str]  # what the files of weights say of themselves


def save(folder: Path, place: Place, contents: Contents, keep: int) -> Path:
    """Write a checkpoint, each module as `<name>.safetensors`; then delete all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    final = _of_step(folder, place.step)
    if final.exists():
        return final
    aside = folder / f".{final.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        for name, module in contents.modules.items():
            save_tensors(aside / f"{name}.safetensors", module.state_dict(), contents.about)
        torch.save(contents.optimizer.state_dict(), aside / "optimizer.pt")
        described = {"place": asdict(place), "sha256": {file.name: _sha256(file) for file in aside.iterdir()}}
        (aside / "place.json").write_text(json.dumps(described) + "\n", encoding="utf-8")
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
    for old in existing(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def is_reviewed(folder: Path, step: int) -> bool:
    """Whether mark_reviewed was called for the checkpoint of this step."""
    return (_of_step(folder, step) / "reviewed").exists()


def mark_reviewed(folder: Path, step: int) -> None:
    """Note that what is due at the step of this checkpoint has been done."""
    (_of_step(folder, step) / "reviewed").touch()


def existing(folder: Path) -> list[Path]:
    """All whole checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*"))


def load_newest(folder: Path, contents: Contents, start: Place) -> int:
    """Put the newest checkpoint into place, if there is one; returns the number of steps done.

    Raises InputError if it does not fit, or if a step from `start` would take other clips than its steps took.
    """
    found = existing(folder)
    if not found:
        return 0
    newest = found[-1]
    try:
        described = json.loads((newest / "place.json").read_text(encoding="utf-8"))
        place = Place(**described["place"])
        for name, digest in described["sha256"].items():
            if _sha256(newest / name) != digest:
                raise ValueError(f"{name} has changed since it was written")
        _refuse_other_clips(folder.parent, place, start)
        for name, module in contents.modules.items():
            module.load_state_dict(load_file(newest / f"{name}.safetensors"))
        contents.optimizer.load_state_dict(torch.load(newest / "optimizer.pt", map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, UnpicklingError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"checkpoint {newest} cannot be resumed ({reason}): remove it to go on from an older one"
        ) from error
    return place.step


def _refuse_other_clips(run: Path, place: Place, start: Place) -> None:
    if place.global_batch != start.global_batch:
        raise InputError(
            f"{run} took {place.global_batch} clips a step and would now take {start.global_batch}:"
            f" set global_batch={place.global_batch}, which any number of processes can share, and leave accumulate out"
        )
    if place.videos != start.videos:
        raise InputError(
            f"{run} has learnt from other shards than data.shards names now: give these again (they may have moved),"
            " or choose another run="
        )


def _of_step(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
