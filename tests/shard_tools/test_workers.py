"""Jobs in processes and on a Ray cluster: faults cost their own job, and nothing is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shard_making import hashes, list_segments, make

from common.errors import InputError
from shard_tools.workers import Failed, run_in_processes, run_on_ray


def act(job: str) -> str:
    """Do what the job's name says."""
    name, _, where = job.partition(" ")
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "crash-once" and not os.path.exists(where):
        open(where, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "exit":
        os._exit(7)
    if name == "hang":
        time.sleep(1000)
    return job.upper()


def test_a_crash_costs_its_own_job_only(tmp_path: Path) -> None:
    jobs = ["a", "crash", "b", "exit", "c", f"crash-once {tmp_path}/seen", "d"]
    results = dict(run_in_processes(act, jobs, 2, 60))
    assert results.keys() == set(jobs)
    assert results["crash"] == Failed("the process that worked on it died (SIGSEGV)")
    assert results["exit"] == Failed("the process that worked on it died (exit code 7)")
    assert all(results[job] == job.upper() for job in jobs if job not in ("crash", "exit"))


def test_a_job_that_hangs_is_ended_and_leaving_early_ends_all_workers() -> None:
    assert dict(run_in_processes(act, ["hang", "a", "b"], 2, 2)) == {
        "hang": Failed("it made no progress for 2 seconds", timed_out=True),
        "a": "A",
        "b": "B",
    }
    results = run_in_processes(act, ["a", "hang", "hang"], 2, 60)
    assert next(results)[1] == "A"
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


RUN = """
from shard_tools.workers import run_in_processes
print("ready", flush=True)
for job, result in run_in_processes(len, ["a"] * 100_000, 2, 60):
    print(result, flush=True)
"""


@pytest.mark.parametrize("after_s", [0.01, 0.3])
def test_ctrl_c_is_for_the_parent_alone(after_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=30)
    assert said.count("KeyboardInterrupt") == 1, said


def test_without_ray_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="pip install ray"):
        next(run_on_ray(len, [], 1, 60))


@pytest.mark.slow  # 30 s: two clusters start
def test_processes_a_ray_cluster_and_parts_give_the_same_bytes(workers: None, videos: Path, tmp_path: Path) -> None:
    segments = list_segments(videos, tmp_path / "list.json")
    ways = {"one": [], "processes": ["--workers", "2"], "ray": ["--workers", "2", "--engine", "ray"]}
    parts = {f"parts {number}": ["--part", f"{number}/2"] for number in (2, 1)}
    for inputs, name in ((videos, "whole"), (segments, "segments")):
        for way, options in (ways | parts).items():
            make(inputs, tmp_path / name / way.split()[0], "--samples-per-shard", "4", *options)
        expected = hashes(tmp_path / name / "one")
        assert len(expected) > 10
        assert all(hashes(folder) == expected for folder in (tmp_path / name).iterdir())


@pytest.mark.slow  # 30 s: Ray takes many seconds to see that a process has died
def test_crashes_and_hangs_on_a_cluster_cost_their_own_job_only() -> None:
    def act_there(job: str) -> str:  # in here, since the cluster's processes cannot import this file
        if job == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if job == "hang":
            time.sleep(1000)
        return job.upper()

    results = dict(run_on_ray(act_there, ["a", "crash", "b"], 2, 60))
    results |= dict(run_on_ray(act_there, ["hang"], 2, 5))
    assert results["crash"] == Failed("the process that worked on it died (exit code 1)")
    assert results["hang"] == Failed("it made no progress for 5 seconds", timed_out=True)
    assert (results["a"], results["b"]) == ("A", "B")
