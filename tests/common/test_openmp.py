"""Threads that wait for each other sleep: the setting is there when OpenMP is loaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/**/*.py")]
COMPUTING = ["train.py", "evaluate.py", "visualize.py", "benchmarks/train_throughput.py"]


@pytest.mark.parametrize("command", [path.relative_to(ROOT).as_posix() for path in COMMANDS])
def test_it_is_imported_before_anything_that_loads_torch(command: str) -> None:
    text = (ROOT / command).read_text()
    assert "import common.openmp" in text or command not in COMPUTING
    before = text.split("import common.openmp")[0] if "import common.openmp" in text else ""
    imported = re.findall(r"^(?:import|from) ([a-z_0-9]+)", before, re.M)
    assert set(imported) <= sys.stdlib_module_names


@pytest.mark.slow  # a fresh import of torch
def test_openmp_sees_it() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", "import common.openmp, torch"],
        env=environment | {"OMP_DISPLAY_ENV": "TRUE", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
