"""Jobs in processes and on a cluster: faults cost their own job, and a run that is killed is resumed exactly."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from shard_making import hashes, list_segments, make, make_folder, run_here

from adamae.common.errors import InputError
from adamae.shard_tools import make_shards
from adamae.shard_tools.workers import ENGINES, Processes, RayCluster, run_jobs


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
    if name == "stubborn":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        open(where, "w").close()
        time.sleep(1000)
    return job.upper()


def test_crashes_and_hangs_cost_their_own_job_only(tmp_path: Path) -> None:
    died = "the process that worked on it died"
    expected = {job: job.upper() for job in ("a", "b", f"crash-once {tmp_path}/seen", "c")}
    expected |= {"crash": f"{died} (SIGSEGV)", "exit": f"{died} (exit code 7)"}
    expected["hang"] = "it made no progress for 2 seconds: raise --timeout"
    assert dict(run_jobs(Processes, act, sorted(expected), 2, 2)) == expected


def test_leaving_early_ends_all_workers() -> None:
    results = run_jobs(Processes, act, ["a", "hang", "hang"], 2, 60)
    assert next(results)[1] == "A"
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_a_worker_that_starts_when_all_is_over_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Pebble first removes the semaphores that it opens, and then ends the workers, one after another."""
    script, before = tmp_path / "python", multiprocessing.spawn.get_executable()
    late = (
        'mkdir "$0.first" 2>/dev/null || { until [ -e "$0.over" ]; do sleep .05; done; sleep 1; }'
    )
    script.write_text(f'#!/bin/sh\n{late}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.set_executable(str(script))
    try:
        results = run_jobs(Processes, act, ["a", f"stubborn {tmp_path}/at_work"], 2, 60)
        next(results)
        while not (tmp_path / "at_work").exists():
            time.sleep(0.01)
        (tmp_path / "python.over").touch()
        results.close()  # type: ignore[attr-defined]
    finally:
        multiprocessing.set_executable(before)
    assert multiprocessing.active_children() == []
    assert capfd.readouterr().err == ""


RUN = """
import threading, time
from adamae.shard_tools.workers import Processes, run_jobs
threading.Thread(target=time.sleep, args=[60], daemon=True).start()  # takes signals that the main thread blocks
print("ready", flush=True)
for job, result in run_jobs(Processes, len, ["a"] * 100_000, 2, 60):
    print(result, flush=True)
"""


@pytest.mark.parametrize("after_s", [0.01, 0.02, 0.3])
def test_ctrl_c_is_for_the_parent_alone(after_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # which a shell's background jobs ignore
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=30)
    assert said.count("KeyboardInterrupt") == 1, said


def test_without_ray_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="pip install ray"):
        next(run_jobs(RayCluster, len, [], 1, 60))


@pytest.mark.slow  # 30 s: two clusters start
def test_processes_a_ray_cluster_and_parts_give_the_same_bytes(
    workers: None, videos: Path, tmp_path: Path
) -> None:
    segments = list_segments(videos, tmp_path / "list.json")
    ways = {
        "one": [],
        "processes": ["--workers", "2"],
        "ray": ["--workers", "2", "--engine", "ray"],
    }
    parts = {f"parts {number}": ["--part", f"{number}/2"] for number in (2, 1)}
    for inputs, name in ((videos, "whole"), (segments, "segments")):
        for way, options in (ways | parts).items():
            make(inputs, tmp_path / name / way.split()[0], "--samples-per-shard", "4", *options)
        expected = hashes(tmp_path / name / "one")
        assert len(expected) > 10
        assert all(hashes(folder) == expected for folder in (tmp_path / name).iterdir())


@pytest.mark.slow  # 30 s: Ray takes many seconds to see that a process has died
def test_crashes_and_hangs_on_a_cluster_cost_their_own_job_only() -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(
        sys.modules[__name__]
    )  # which the cluster's processes cannot import
    results = dict(run_jobs(RayCluster, act, ["a", "crash", "b"], 2, 60))
    results |= dict(run_jobs(RayCluster, act, ["hang"], 2, 5))
    died = "the process that worked on it died, or made no progress for {} seconds"
    assert results == {"a": "A", "b": "B", "crash": died.format(60), "hang": died.format(5)}


CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
OPTIONS = {
    "copied": ["--encode", "copy", "--samples-per-shard", "2"],
    "segments": ["--samples-per-shard", "4", "--frame-stride", "3", "--preset", "ultrafast"],
    "in pieces": [
        "--samples-per-shard",
        "3",
        "--frame-stride",
        "3",
        "--clip-seconds",
        "0.3",
        "--preset",
        "ultrafast",
    ],
}


def test_killed_with_its_workers_left_alone(
    workers: None, videos: Path, dataset: Path, tmp_path: Path
) -> None:
    command = [sys.executable, make_shards.__file__, str(videos), str(tmp_path / "out")]
    command += ["--samples-per-shard", "3", "--workers", "2", "--max-rejects", "1"]
    # In the middle of the first shard, and after it.
    for moment in (".work/items/*/*.json", "shard-000000.tar"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any((tmp_path / "out").glob(moment)):
            time.sleep(0.01)
        assert process.poll() is None, f"the run ended before {moment} was seen"
        process.kill()  # the parent alone: its workers must notice by themselves
        process.wait()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert hashes(tmp_path / "out") == hashes(dataset)


def run(killed_before: int, videos: Path, folder: Path, options: list[str]) -> bool:
    """Make shards in a fork; False if it died, which it does before change `killed_before` of the disk (0: never)."""
    child = os.fork()
    if child == 0:
        left = killed_before

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            opens_to_write = (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
            )
            if event in CHANGES or opens_to_write:
                left -= 1
                if left == 0:
                    os._exit(9)

        sys.addaudithook(count)
        try:
            ENGINES["processes"] = run_here
            make(videos, folder, *options)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 0


def kill_before_changes(videos: Path, folder: Path, options: list[str], each: bool) -> int:
    """Kill runs before one change of the disk after the other and resume them, `each` in its own folder; return how
    many there are."""
    assert run(0, videos, folder / "whole", options)
    expected = hashes(folder / "whole")
    number = 1
    while not run(number, videos, out := folder / str(number * each), options) and (
        each or number < 60
    ):
        if each:
            assert run(0, videos, out, options)
            assert hashes(out) == expected, f"killed before change {number}"
        number += 1 if each else 2
    assert run(0, videos, out, options)
    assert hashes(out) == expected
    return number - 1


def in_clean_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call it in a process that has not decoded yet: FFmpeg's threads are missing in forks of one that has."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def few(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos, a file that is none, and a list of segments of them all with several labels."""
    folder = tmp_path_factory.mktemp("few")
    three = {path.name: path.read_bytes() for path in sorted(videos.rglob("*.mp4"))[:3]}
    make_folder(folder, three | {"text.mp4": "no video"})
    list_segments(folder, folder / "list.json")
    return folder


SLOW = [
    pytest.param(options, True, marks=pytest.mark.slow) for options in ("copied", "segments")
]  # three minutes


@pytest.mark.parametrize(("options", "each"), [*((options, False) for options in OPTIONS), *SLOW])
def test_killed_before_changes_of_the_disk(
    few: Path, tmp_path: Path, options: str, each: bool
) -> None:
    videos = few / "list.json" if options == "segments" else few
    assert (
        in_clean_process(kill_before_changes, videos, tmp_path, OPTIONS[options], each) >= 30 * each
    )
