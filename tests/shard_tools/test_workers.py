import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from shard_tools.workers.processes import Failed, Pool


def act(job: str) -> str:
    """What a job's name says."""
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


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_crash_costs_its_own_job_only(num_workers: int, tmp_path) -> None:
    jobs = ["a", "crash", "b", "exit", "c", f"crash-once {tmp_path}/seen", "d"]
    results = dict(Pool(act, num_workers, timeout=60).run(jobs))
    assert results.keys() == set(jobs)
    assert results["crash"] == Failed("the process that worked on it died (SIGSEGV)")
    assert results["exit"] == Failed("the process that worked on it died (exit code 7)")
    assert all(results[job] == job.upper() for job in jobs if job not in ("crash", "exit"))


def test_a_job_that_hangs_is_ended_and_the_others_go_on() -> None:
    start = time.monotonic()
    results = dict(Pool(act, 2, timeout=4).run(["hang", "a", "b"]))
    assert results == {"hang": Failed("it took longer than 4 seconds"), "a": "A", "b": "B"}
    assert time.monotonic() - start < 200


RUN = """
import sys
from shard_tools.workers.processes import Pool
print("ready", flush=True)
for job, result in Pool(len, 3, timeout=60).run(["a"] * 100_000):
    print(result, flush=True)
"""


@pytest.mark.parametrize("after_s", [0.01, 0.1, 0.2])
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
    assert said.count("Traceback") == said.count("KeyboardInterrupt") == 1, said


def test_leaving_early_ends_all_workers() -> None:
    results = Pool(act, 2, timeout=60).run(["a", "hang", "hang"])
    assert next(results)[1] == "A"
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []
