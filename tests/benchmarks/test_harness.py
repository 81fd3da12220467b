"""Arguments, timing and result files of all benchmarks."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import ROOT, Report, Row, measure_cases, require
from adamae.common.errors import InputError
from adamae.training.timing import time_calls

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--batch-size=0", "--batch-size: it must be at least 1, not 0"),
        ("--codes", "there is no option --codes: did you mean --encodes"),
    ],
)
def test_a_wrong_argument_is_one_sentence(argument: str, message: str) -> None:
    parser = ArgumentParser("Measures.")
    parser.add_videos([])
    with pytest.raises(InputError, match=message):
        parser.parse_args([".", argument])


def test_calls_are_timed_one_by_one_after_the_warm_up() -> None:
    pauses = iter([0.2, 0.01, 0.02, 0.01])

    def pause() -> None:
        time.sleep(next(pauses))

    first, second, third = time_calls(pause, CPU, warmup=1, repetitions=3)
    assert first >= 10
    assert second >= 20
    assert third >= 10


def test_no_benchmark_asks_for_a_gpu_when_it_is_imported() -> None:
    """The server that in_fresh_process forks from imports the running benchmark.

    If CUDA were initialized there, none of its children could use a GPU.
    """
    program = """
import importlib, torch

def fail(*_):
    raise SystemExit("a GPU was asked for")

torch._C._cuda_getDeviceCount = fail
torch._C._cuda_init = fail
for name in (
    "end_to_end", "kernel_speed", "memory_vs_ratio", "pipeline_throughput", "train_throughput"
):
    importlib.import_module(f"benchmarks.{name}")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def measure_in_turn(report: Report, cases: list[str]) -> tuple[list[Row], list[dict]]:
    """Measure cases in two rounds by numbers that count the calls; "wrong" fails.

    Return the rows, and a copy of the results at every time at which they were written.
    """
    num_calls = 0
    written: list[dict[str, list[int]]] = []

    def measure(case: str) -> int:
        nonlocal num_calls
        num_calls += 1
        require("it is right", case != "wrong", f"it is {case}")
        return num_calls

    def make_rows(results: dict[str, list[int]]) -> list[Row]:
        written.append({case: list(numbers) for case, numbers in results.items()})
        return [{"case": case, "calls": numbers} for case, numbers in results.items()]

    return measure_cases(report, cases, measure, make_rows, rounds=2), written


def test_rounds_alternate_between_the_cases(tmp_path: Path) -> None:
    report = Report("speed", tmp_path / "new", CPU, ["A note."], videos=3)
    rows, written = measure_in_turn(report, ["a", "b"])
    assert rows[1] == {"case": "b", "calls": [2, 4]}
    # An interrupted run keeps what it has measured.
    assert written == [
        {"a": [1]},
        {"a": [1], "b": [2]},
        {"a": [1, 3], "b": [2]},
        {"a": [1, 3], "b": [2, 4]},
    ]
    stored = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert stored["rows"] == rows
    assert stored["notes"] == ["A note."]
    assert stored["about"]["videos"] == 3
    assert len(stored["about"]["commit"].rstrip("+")) == 10
    assert stored["about"]["packages"]["torch"] == torch.__version__.split("+")[0]


def test_a_case_that_fails_loses_only_its_own_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("speed", tmp_path, CPU)
    with pytest.raises(InputError, match="1 of 2 cases could not be measured"):
        measure_in_turn(report, ["wrong", "b"])
    message = (
        "wrong: InputError: no results written, because a check failed: it is right (it is wrong)"
    )
    assert message in capsys.readouterr().err
    stored = json.loads((tmp_path / "speed.json").read_text())
    # The failed case is not measured again in the second round.
    assert stored["rows"] == [{"case": "b", "calls": [2, 3]}]
