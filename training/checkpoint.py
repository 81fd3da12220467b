"""Checkpoints that are whole or absent: `RUN/checkpoints/step-00001000/{model.safetensors, optimizer.pt, place.json}`.

Nothing else is needed to go on bit by bit: data order, masks, dropout and learning rate are functions of the step.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from durable import sync
from errors import InputError


@dataclass(frozen=True)
class Place:
    """Where a run is."""

    step: int  # optimizer steps done
    global_batch: int  # clips of the global stream per step


def save(
    folder: Path, place: Place, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, keep: int
) -> Path:
    """Write a checkpoint, each module as `<name>.safetensors`; then delete all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{place.step:08d}"
    if final.exists():
        return final
    aside = folder / f".{final.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        for name, module in modules.items():
            save_file({k: v.contiguous() for k, v in module.state_dict().items()}, aside / f"{name}.safetensors")
        torch.save(optimizer.state_dict(), aside / "optimizer.pt")
        (aside / "place.json").write_text(json.dumps(asdict(place)) + "\n", encoding="utf-8")
        for file in (*aside.iterdir(), aside):
            sync(file)
        os.replace(aside, final)
        sync(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors hide a full disk behind their own
        reason = str(error).splitlines()[0]
        raise InputError(
            f"checkpoint {final} cannot be written ({reason}; {shutil.disk_usage(folder).free // 2**20} MiB are free):"
            " make room, and the same command goes on from the checkpoint before"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for old in existing(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def existing(folder: Path) -> list[Path]:
    """All whole checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*"))


def load_newest(
    folder: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, global_batch: int
) -> int:
    """Put the newest checkpoint into place, if there is one; returns the number of steps done.

    Raises InputError if it does not fit, or if a step now takes another number of clips.
    """
    found = existing(folder)
    if not found:
        return 0
    newest = found[-1]
    try:
        place = Place(**json.loads((newest / "place.json").read_text(encoding="utf-8")))
        for name, module in modules.items():
            module.load_state_dict(load_file(newest / f"{name}.safetensors"))
        optimizer.load_state_dict(torch.load(newest / "optimizer.pt", map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, ValueError, TypeError, UnpicklingError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"checkpoint {newest} cannot be resumed ({reason}): remove it to go on from an older one"
        ) from error
    if place.global_batch != global_batch:
        raise InputError(
            f"{folder.parent} took {place.global_batch} clips a step and would now take {global_batch}:"
            " choose batch_size × accumulate × processes as before"
        )
    return place.step
