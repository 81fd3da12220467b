"""Jobs in processes and on a cluster: faults cost their own job.

A run that is killed is resumed exactly.
"""

import errno
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
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
    crash_once = f"crash-once {tmp_path}/seen"
    expected = {
        "a": "A",
        "b": "B",
        "c": "C",
        crash_once: crash_once.upper(),
        "crash": "the process that worked on it died (SIGSEGV)",
        "exit": "the process that worked on it died (exit code 7)",
        "hang": "it made no progress for 2 seconds: raise --timeout",
    }
    assert dict(run_jobs(Processes, act, sorted(expected), 2, 2)) == expected


def test_leaving_early_ends_all_workers() -> None:
    results = run_jobs(Processes, act, ["a", "hang", "hang"], 2, 60)
    assert next(results)[1] == "A"
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


# Stands for Python: the first process starts at once, the second a second after the run is over.
LATE_PYTHON = f"""#!/bin/sh
if ! mkdir "$0.first" 2>/dev/null; then
    until [ -e "$0.over" ]; do sleep .05; done
    sleep 1
fi
exec {sys.executable} "$@"
"""


def test_a_worker_that_starts_when_all_is_over_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """pebble first removes the semaphores that workers open, and then ends the workers."""
    script = tmp_path / "python"
    script.write_text(LATE_PYTHON)
    script.chmod(0o755)
    before = multiprocessing.spawn.get_executable()
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
# Takes signals that the main thread blocks.
threading.Thread(target=time.sleep, args=[60], daemon=True).start()
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
        # A shell's background jobs ignore it, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(after_s)
    # A terminal sends it to all processes of a group.
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert errors.count("KeyboardInterrupt") == 1, errors


def test_without_shared_memory_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse)
    with pytest.raises(InputError, match=r"need /dev/shm, .* \(Read-only file system\): mount"):
        Processes(act, 1).submit("work")


def test_without_ray_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="pip install ray"):
        next(run_jobs(RayCluster, len, [], 1, 60))


def test_a_ray_address_where_nobody_listens_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as unused:
        # Bound and not listened on: nobody else gets the port.
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(InputError, match=f"no Ray cluster answers at RAY_ADDRESS={address}"):
            next(run_jobs(RayCluster, len, [], 1, 60))


class LosingEngine:
    """A cluster whose nodes die over the first `num_losses` jobs."""

    crashes = ChildProcessError
    losses = ConnectionError
    capacity = 1

    def __init__(self, num_losses: int) -> None:
        self.num_losses = num_losses

    def submit(self, job: str) -> Future[str]:
        future: Future[str] = Future()
        if self.num_losses:
            self.num_losses -= 1
            future.set_exception(ConnectionError())
        else:
            future.set_result(job.upper())
        return future

    def stop(self) -> None:
        pass


def test_jobs_of_machines_that_die_are_run_until_they_end() -> None:
    """A worker may die over a job once; a machine that dies says nothing about the job."""

    def make_engine(function: object, num_workers: int) -> Any:
        return LosingEngine(num_losses=3)

    assert dict(run_jobs(make_engine, str.upper, ["a", "b"], 1, 60)) == {"a": "A", "b": "B"}


# 30 s: two clusters start.
@pytest.mark.slow
def test_processes_a_ray_cluster_and_parts_give_the_same_bytes(
    workers: None, videos: Path, tmp_path: Path
) -> None:
    segments = list_segments(videos, tmp_path / "list.json")
    # Output folders and options; the two parts of one dataset have the same folder.
    runs = [
        ("one", []),
        ("processes", ["--workers", "2"]),
        ("ray", ["--workers", "2", "--engine", "ray"]),
        ("parts", ["--part", "2/2"]),
        ("parts", ["--part", "1/2"]),
    ]
    for inputs, name in ((videos, "whole"), (segments, "segments")):
        for output, options in runs:
            make(inputs, tmp_path / name / output, "--samples-per-shard", "4", *options)
        expected = hashes(tmp_path / name / "one")
        assert len(expected) > 10
        assert all(hashes(folder) == expected for folder in (tmp_path / name).iterdir())


# 30 s: Ray takes many seconds to see that a process has died.
@pytest.mark.slow
def test_crashes_and_hangs_on_a_cluster_cost_their_own_job_only() -> None:
    from ray import cloudpickle

    # The cluster's processes cannot import this module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    results = dict(run_jobs(RayCluster, act, ["a", "crash", "b"], 2, 60))
    results |= dict(run_jobs(RayCluster, act, ["hang"], 2, 5))
    died = "the process that worked on it died, or made no progress for {} seconds"
    assert results == {"a": "A", "b": "B", "crash": died.format(60), "hang": died.format(5)}


def kill_at(moment: str, command: list[str], output: Path) -> None:
    """Kill a run as soon as its output has a file like `moment`.

    The parent alone: its workers must notice by themselves.
    """
    for _ in range(20):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(output.glob(moment)):
            time.sleep(0.01)
        process.kill()
        if process.wait() == -signal.SIGKILL:
            return
        # This process was kept waiting, and the run has ended before.
        shutil.rmtree(output)
    pytest.fail(f"every run ended before {moment} was seen")


def test_killed_with_its_workers_left_alone(
    workers: None, videos: Path, dataset: Path, tmp_path: Path
) -> None:
    command = [sys.executable, make_shards.__file__, str(videos), str(tmp_path / "out")]
    command += ["--samples-per-shard", "3", "--workers", "2", "--max-rejects", "1"]
    # In the middle of the first shard, and after it.
    for moment in (".work/items/*/*.json", "shard-000000.tar"):
        kill_at(moment, command, tmp_path / "out")
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert hashes(tmp_path / "out") == hashes(dataset)


# Audit events of changes of the disk, besides files that are opened to be written.
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def run(killed_before: int, videos: Path, folder: Path, options: list[str]) -> bool:
    """Make shards in a fork, which dies before change `killed_before` of the disk (0: never).

    Return whether it came to its end.
    """
    child = os.fork()
    if child == 0:
        num_changes = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal num_changes
            is_change = event in CHANGES
            if event == "open" and isinstance(arguments[2], int):
                is_change = arguments[2] & os.O_ACCMODE != os.O_RDONLY
            if is_change:
                num_changes += 1
                if num_changes == killed_before:
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


def kill_before_each_change(videos: Path, folder: Path, options: list[str]) -> int:
    """Kill runs before every single change of the disk, each in its own folder, and resume them.

    Return the number of runs that were killed.
    """
    assert run(0, videos, folder / "whole", options)
    expected = hashes(folder / "whole")
    number = 1
    while True:
        output = folder / str(number)
        is_complete = run(number, videos, output, options)
        # Resume it; one that came to its end has nothing left to do.
        assert run(0, videos, output, options)
        assert hashes(output) == expected, f"killed before change {number}"
        if is_complete:
            return number - 1
        number += 1


def kill_again_and_again(videos: Path, folder: Path, options: list[str]) -> None:
    """Kill a run before its first change of the disk, resume it and kill it before the third, …

    It must come to its end all the same.
    """
    assert run(0, videos, folder / "whole", options)
    for number in range(1, 62, 2):
        if run(number, videos, folder / "killed", options):
            break
    assert run(0, videos, folder / "killed", options)
    assert hashes(folder / "killed") == hashes(folder / "whole")


def in_clean_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a process that has not decoded yet.

    FFmpeg's threads would be missing in forks of one that has.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def few(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three videos, a file that is none, and a list of segments of them."""
    folder = tmp_path_factory.mktemp("few")
    three = {path.name: path.read_bytes() for path in sorted(videos.rglob("*.mp4"))[:3]}
    make_folder(folder, three | {"text.mp4": "no video"})
    list_segments(folder, folder / "list.json")
    return folder


COPIED = ["--encode", "copy", "--samples-per-shard", "2"]
FAST = ["--frame-stride", "3", "--preset", "ultrafast"]
SEGMENTS = ["--samples-per-shard", "4", *FAST]
PIECES = ["--samples-per-shard", "3", "--clip-seconds", "0.3", *FAST]


@pytest.mark.parametrize(("name", "options"), [("", COPIED), ("list.json", SEGMENTS), ("", PIECES)])
def test_killed_again_and_again(few: Path, tmp_path: Path, name: str, options: list[str]) -> None:
    in_clean_process(kill_again_and_again, few / name, tmp_path, options)


# Three minutes.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("", COPIED), ("list.json", SEGMENTS)])
def test_killed_before_each_change_of_the_disk(
    few: Path, tmp_path: Path, name: str, options: list[str]
) -> None:
    assert in_clean_process(kill_before_each_change, few / name, tmp_path, options) >= 30
