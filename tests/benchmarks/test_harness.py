import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import ROOT, Report, measure_cases, require
from adamae.common.errors import InputError
from adamae.training.timing import time_calls

CPU = torch.device("cpu")


def test_a_wrong_argument_is_one_sentence() -> None:
    parser = ArgumentParser("Measures.")
    parser.add_videos([])
    for argument, says in (
        ("--batch-size=0", "--batch-size: it must be at least 1, not 0"),
        ("--codes", "there is no option --codes: did you mean --encodes"),
    ):
        with pytest.raises(InputError, match=says):
            parser.parse_args([".", argument])


def test_calls_are_timed_one_by_one_after_the_warm_up() -> None:
    pauses = iter([0.2, 0.01, 0.02, 0.01])
    first, second, third = time_calls(
        lambda: time.sleep(next(pauses)), CPU, warmup=1, repetitions=3
    )
    assert min(first, third) >= 10
    assert second >= 20


def test_no_benchmark_asks_for_a_gpu_when_it_is_imported() -> None:
    """The server that in_fresh_process forks from imports it, and CUDA would be out of reach for all its children."""
    program = """
import importlib, torch
def asked(*_): raise SystemExit("a GPU was asked for")
torch._C._cuda_getDeviceCount = torch._C._cuda_init = asked
for name in ("end_to_end", "kernel_speed", "memory_vs_ratio", "pipeline_throughput", "train_throughput"):
    importlib.import_module(f"benchmarks.{name}")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rounds_alternate_and_a_case_that_fails_loses_only_its_own_rows(
    tmp_path: Path, capsys
) -> None:
    report, written, calls = Report("speed", tmp_path / "new", CPU, ["A note."], videos=3), [], []

    def measure(case: str) -> int:
        calls.append(case)
        require("it is right", case != "wrong", f"it is {case}")
        return len(calls)

    def make_rows(found: dict[str, list[int]]) -> list[dict[str, object]]:
        written.append({case: list(numbers) for case, numbers in found.items()})
        return [{"case": case, "calls": numbers} for case, numbers in found.items()]

    assert measure_cases(report, ["a", "b"], measure, make_rows, rounds=2)[1] == {
        "case": "b",
        "calls": [2, 4],
    }
    assert written == [
        {"a": [1]},
        {"a": [1], "b": [2]},
        {"a": [1, 3], "b": [2]},
        {"a": [1, 3], "b": [2, 4]},
    ]
    with pytest.raises(InputError, match="1 of 2 cases could not be measured"):
        measure_cases(report, ["wrong", "b"], measure, make_rows, rounds=2)
    said = capsys.readouterr().err
    assert (
        "wrong: InputError: no results written, because a check failed: it is right (it is wrong)"
        in said
    )
    stored = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert stored["rows"] == [{"case": "b", "calls": [6, 7]}]
    assert (stored["about"]["videos"], stored["notes"]) == (3, ["A note."])
    assert len(stored["about"]["commit"].rstrip("+")) == 10
    assert stored["about"]["packages"]["torch"] == torch.__version__.split("+")[0]
