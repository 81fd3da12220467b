"""`--help` answers at once: nothing heavy is imported before a command's arguments are parsed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "timm", "torchvision", "matplotlib", "av")
COMMANDS = ("evaluate.py",)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command: str) -> None:
    """`-X importtime` lists all that is imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", command, "--help"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & set(HEAVY)
