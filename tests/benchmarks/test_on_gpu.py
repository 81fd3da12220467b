"""The first hour on a GPU, rehearsed without one.

A stage that fails or takes too long ends in a sentence, and the next one is run.
"""

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from processes import is_alive, wait_for

from adamae.benchmarks.harness import ROOT


def run_stages(folder: Path, *stages: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the script at the sizes that a CPU takes; `changes` are variables of its environment."""
    environment = {**os.environ, "PYTHON": sys.executable, "SMALL": "1", **changes}
    command = ["bash", "benchmarks/on_gpu.sh", str(folder), *stages]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def write_python(path: Path, script: str) -> None:
    """Write a shell script that stands for Python."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_stage_leaves_its_results_and_the_next_one_follows_a_failure(tmp_path: Path) -> None:
    result = run_stages(tmp_path / "out", "nowhere", "kernels")
    first, second = result.stdout.splitlines()
    assert first.startswith(
        "nowhere: failed with exit code 1 (124: out of time): error: there is no stage nowhere: "
    )
    assert second.startswith("kernels: done, ")
    assert result.returncode == 1
    rows = json.loads((tmp_path / "out/kernel_speed.json").read_text())["rows"]
    assert {row["op"] for row in rows} == {"gather_tokens"}


def test_a_stage_that_takes_too_long_is_given_up_with_all_it_has_started(tmp_path: Path) -> None:
    python = tmp_path / "python"
    child = tmp_path / "child"
    # A child, and a parent that does not wait for it.
    write_python(python, f"sleep 600 &\necho $! > {child}\nsleep 600")
    start = time.monotonic()
    result = run_stages(tmp_path / "out", "kernels", STAGE_SECONDS="2", PYTHON=str(python))
    assert result.stdout.startswith("kernels: failed with exit code 124 (124: out of time): ")
    assert time.monotonic() - start < 200
    assert wait_for(lambda: not is_alive(int(child.read_text())), 60)


@pytest.mark.parametrize("small", ["", "1"])
def test_every_stage_names_programs_and_options_that_are_there(small: str, tmp_path: Path) -> None:
    """Call every program with --help behind its arguments, which are parsed up to there."""
    python = tmp_path / "python"
    calls = tmp_path / "calls"
    # A line for each call, with its arguments in JSON.
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    write_python(python, f"exec {sys.executable} -S -c '{program}' \"$@\" >> {calls}")
    result = run_stages(tmp_path / "out", SMALL=small, PYTHON=str(python), VIDEOS=str(tmp_path))
    assert result.returncode == 0, result.stdout
    assert len(result.stdout.splitlines()) == 8
    for call in calls.read_text().splitlines():
        program, *arguments = json.loads(call)
        if program == "-m":
            name, *arguments = arguments
            assert name == "pytest"
            assert pytest.main([*arguments, "--help"]) == 0
        else:
            module = import_module("adamae." + program.removesuffix(".py").replace("/", "."))
            with pytest.raises(SystemExit) as ended:
                module.main([*arguments, "--help"])
            assert not ended.value.code, call


def test_make_takes_a_preinstalled_pytorch_and_installs_nothing() -> None:
    command = ["make", "--dry-run", "bench-gpu", "GPU_PYTHON=python3", "STAGES=step"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    stage = 'PYTHON=python3 VIDEOS="" bash benchmarks/on_gpu.sh "benchmarks/results/$name" step'
    assert stage in result.stdout
    assert ".venv" not in result.stdout
