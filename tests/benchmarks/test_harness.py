import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.arguments import ArgumentParser
from benchmarks.harness import ROOT, Report, Timing, measure_cases, require, time_calls
from common.errors import InputError

CPU = torch.device("cpu")


def test_timing_is_the_median_and_the_quartiles() -> None:
    assert Timing([5.0, 1.0, 2.0, 4.0, 3.0]).quartiles == [2.0, 3.0, 4.0]
    columns = {"step_median_ms": 7.0, "step_lower_ms": 7.0, "step_upper_ms": 7.0, "repetitions": 1}
    assert Timing([7.0]).columns(14) == {**columns, "clips_per_second": 2000.0}


def test_a_wrong_argument_is_one_sentence(tmp_path: Path) -> None:
    parser = ArgumentParser("Measures.")
    parser.add_videos()
    for arguments, says in (
        ([str(tmp_path), "--batch-size", "0"], "--batch-size: it is 0, give a whole number of at least 1"),
        ([str(tmp_path), "--codes"], "there is no option --codes: did you mean --encodes"),
    ):
        with pytest.raises(InputError, match=says):
            parser.parse_args(arguments)


def test_calls_are_timed_one_by_one_after_the_warm_up() -> None:
    pauses = iter([0.2, 0.01, 0.01, 0.01])
    timing = time_calls(lambda: time.sleep(next(pauses)), CPU, warmup=1, repetitions=3)
    assert 10 <= timing.median_ms < 100
    assert len(timing.milliseconds) == 3


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


def test_a_red_check_stops_the_report() -> None:
    require("two and two are four", 2 + 2 == 4, "")
    with pytest.raises(InputError, match=r"no results written.*the losses are equal \(1 and 2\)"):
        require("the losses are equal", False, "1 and 2")


def test_results_state_rows_and_provenance(tmp_path: Path) -> None:
    rows = [{"name": "eager", "ms": 1.5}, {"name": "compiled", "ms": 3.0, "remark": "a, b"}]
    Report("speed", tmp_path / "new", CPU, ["A note."], videos=3).write(rows)
    stored = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert stored["rows"] == rows
    assert stored["about"]["commit"]
    assert (stored["about"]["videos"], stored["notes"]) == (3, ["A note."])
    assert stored["about"]["packages"]["torch"] == torch.__version__.split("+")[0]


def test_a_case_that_fails_is_said_and_the_others_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    reports: list[list[int]] = []

    def measure(case: int) -> list[dict[str, int]]:
        return [{"share": 12 // case}]

    with pytest.raises(InputError, match="1 of 3 cases could not be measured"):
        measure_cases([1, 0, 4], measure, lambda rows: reports.append([row["share"] for row in rows]), unit="case")
    assert reports == [[12], [12], [12, 3]]
    assert "0: ZeroDivisionError: " in capsys.readouterr().err
    with pytest.raises(InputError, match="1 of 2 cases could not be measured"):
        measure_cases([1, 2], lambda case: require("it is two", case == 2, "") or [{}], reports.append, unit="case")
    assert reports[3:] == [[{}]], "a red check loses its own row"
