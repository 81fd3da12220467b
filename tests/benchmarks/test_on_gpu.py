"""The first hour on a GPU, rehearsed: a stage that fails or takes too long ends in a sentence, and the next goes on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adamae.benchmarks.harness import ROOT


def run(folder: Path, *stages: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "SMALL": "1", **environment}
    return subprocess.run(
        ["bash", "benchmarks/on_gpu.sh", folder, *stages],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_a_stage_leaves_its_results_and_the_next_goes_on_after_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path / "out", "nowhere", "kernels")
    first, second = done.stdout.splitlines()
    assert first.startswith(
        "nowhere: failed with exit code 1 (124: out of time): error: there is no stage nowhere: "
    )
    assert second.startswith("kernels: done, ")
    assert done.returncode == 1
    rows = json.loads((tmp_path / "out/kernel_speed.json").read_text())["rows"]
    assert {row["op"] for row in rows} == {"gather_tokens"}


def test_a_stage_that_takes_too_long_is_given_up_with_all_it_has_started(tmp_path: Path) -> None:
    python = tmp_path / "python"  # whose child works on
    python.write_text(
        f"#!/bin/sh\n(while :; do echo x >> {tmp_path}/alive; sleep 0.05; done) &\nsleep 60\n"
    )
    python.chmod(0o755)
    started = time.monotonic()
    done = run(tmp_path / "out", "kernels", STAGE_SECONDS="2", PYTHON=str(python))
    assert done.stdout.startswith("kernels: failed with exit code 124 (124: out of time): ")
    assert time.monotonic() - started < 20
    size = (tmp_path / "alive").stat().st_size
    time.sleep(0.3)
    assert (tmp_path / "alive").stat().st_size == size, "its child lives on"


@pytest.mark.slow  # parses the arguments of every program in a process of its own
@pytest.mark.parametrize("small", ["", "1"])
def test_every_stage_names_programs_and_options_that_are_there(small: str, tmp_path: Path) -> None:
    """Every command is run with --help behind its arguments: they are parsed up to there."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" --help > /dev/null\n')
    python.chmod(0o755)
    done = run(tmp_path / "out", SMALL=small, PYTHON=str(python), VIDEOS=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == 7


def test_make_takes_a_preinstalled_pytorch_and_installs_nothing() -> None:
    command = ["make", "--dry-run", "bench-gpu", "GPU_PYTHON=python3", "STAGES=step"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (
        'PYTHON=python3 VIDEOS="" bash benchmarks/on_gpu.sh "benchmarks/results/$name" step' in said
    )
    assert ".venv" not in said
