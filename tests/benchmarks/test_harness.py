import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.harness import ROOT, Timing, machine, require, rows_of, time_calls, write_results
from common.errors import InputError

CPU = torch.device("cpu")


def test_timing_is_the_median_and_the_quartiles() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Timing(3.0, 2.0, 4.0, 5)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def test_calls_are_timed_one_by_one_after_the_warm_up() -> None:
    pauses = iter([0.2, 0.01, 0.01, 0.01])
    timing = time_calls(lambda: time.sleep(next(pauses)), CPU, warmup=1, repetitions=3)
    assert 10 <= timing.median_ms < 100
    assert timing.repetitions == 3


ORPHAN = """
import os, sys, time
from benchmarks.harness import in_fresh_process

def stay() -> None:
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    in_fresh_process(stay)
"""


def test_no_process_outlives_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, tmp_path / "orphan.py"], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_no_benchmark_asks_for_a_gpu_when_it_is_imported() -> None:
    """The server that in_fresh_process forks from imports it, and CUDA would be out of reach for all its children."""
    program = """
import importlib, torch
def asked(*_): raise SystemExit("a GPU was asked for")
torch._C._cuda_getDeviceCount = torch._C._cuda_init = asked
names = "ablations", "data.loader_settings", "end_to_end", "kernel_speed", "memory_vs_ratio", "pipeline_throughput"
for name in (*names, "train_throughput"):
    importlib.import_module(f"benchmarks.{name}")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_red_check_stops_the_report() -> None:
    require("two and two are four", 2 + 2 == 4, "")
    with pytest.raises(InputError, match=r"nothing is reported.*the losses are equal \(1 and 2\)"):
        require("the losses are equal", False, "1 and 2")


def test_the_three_files_say_the_same(tmp_path: Path) -> None:
    rows = [{"name": "ours", "ms": 1.5}, {"name": "theirs", "ms": 3.0, "remark": "a, b"}]
    write_results(tmp_path / "new", "speed", rows, machine(CPU), ["A note."])
    stored = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert stored["rows"] == rows
    assert stored["about"]["commit"]
    assert stored["about"]["packages"]["torch"] == torch.__version__.split("+")[0]
    with (tmp_path / "new" / "speed.csv").open() as file:
        assert list(csv.DictReader(file)) == [
            {"name": "ours", "ms": "1.5", "remark": ""},
            {"name": "theirs", "ms": "3.0", "remark": "a, b"},
        ]
    table = (tmp_path / "new" / "speed.md").read_text()
    assert "| theirs | 3 | a, b |" in table
    assert "A note." in table
    assert stored["about"]["commit"] in table


def test_a_case_that_fails_is_said_and_the_others_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    reports: list[list[int]] = []

    def measure(case: int) -> dict[str, int]:
        return {"share": 12 // case}

    with pytest.raises(InputError, match="1 of 3 could not be measured"):
        rows_of([1, 0, 4], measure, lambda rows: reports.append([row["share"] for row in rows]), unit="case")
    assert reports == [[12], [12], [12, 3]]
    assert "0: ZeroDivisionError: " in capsys.readouterr().err
    with pytest.raises(InputError, match="a check is red"):
        rows_of([1], lambda case: require("it is two", case == 2, str(case)) or {}, reports.append, unit="case")
