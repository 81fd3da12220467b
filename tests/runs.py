"""Read what a run directory holds."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def read_rows(run: Path) -> list[dict]:
    """Read metrics.jsonl; [] while there is none."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_losses(run: Path) -> dict[int, float]:
    """Read the reconstruction loss by step."""
    return {row["step"]: row["reconstruction_loss"] for row in read_rows(run)}


def saved_steps(run: Path) -> list[int]:
    return sorted(
        int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")
    )


def load_weights(run: Path, step: int = 6, name: str = "model") -> dict[str, Tensor]:
    return load_file(run / f"checkpoints/step-{step:08d}/{name}.safetensors")


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether these are the same weights, bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
