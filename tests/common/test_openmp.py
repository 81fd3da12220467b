"""Idle OpenMP threads sleep: the variable is set when OpenMP is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # a fresh import of torch
def test_openmp_sees_it() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "TRUE", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "import common, torch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
