"""Read the files of a run directory."""

import json
from pathlib import Path
from typing import Any

import torch
from processes import read_lines
from safetensors.torch import load_file
from torch import Tensor


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Read the whole lines of metrics.jsonl; return [] while there is none."""
    return [json.loads(line) for line in read_lines(run / "metrics.jsonl")]


def read_losses(run: Path) -> dict[int, float]:
    """Return the reconstruction losses by their steps."""
    return {row["step"]: row["reconstruction_loss"] for row in read_rows(run)}


def saved_steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints, ascending."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted(int(folder.name.removeprefix("step-")) for folder in folders)


def load_weights(run: Path, step: int = 6, name: str = "model") -> dict[str, Tensor]:
    """Return the tensors of a module in a checkpoint."""
    return load_file(run / f"checkpoints/step-{step:08d}/{name}.safetensors")


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two sets of weights are the same, bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
