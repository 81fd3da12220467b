"""Run jobs in local processes or on a Ray cluster. A job that crashes or hangs costs itself and no other one."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_connection
from typing import Any

from pebble import ProcessExpired, ProcessPool

from common.errors import InputError

START_METHOD = "spawn"  # a forked child would get copies of open pipes, and not notice when its parent is killed
NUM_CPUS = len(os.sched_getaffinity(0))  # that this process may use
ATTEMPTS = 2  # the kernel may have killed a worker for another process's memory: each job gets a second chance

Watch = Callable[[list[Any]], list[float | None]]
RunJobs = Callable[..., Iterator[tuple[Any, Any]]]


@dataclass(frozen=True, slots=True)
class Failed:
    """The result of a job whose worker died or took too long."""

    reason: str
    is_late: bool = False


@dataclass(slots=True)
class Task:
    """A job that runs."""

    job: Any
    attempt: int = 1
    share: float | None = None  # that is done
    since: float = 0.0


class Processes:
    """Processes of this machine."""

    crashes: Any = (ProcessExpired, BrokenProcessPool)

    def __init__(self, function: Callable[[Any], Any], num_workers: int) -> None:
        self.capacity, self._function = num_workers, function
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context(START_METHOD)
        self._pool = ProcessPool(self.capacity, initializer=end_with_parent, context=context)
        # Ctrl-C is the parent's to handle: threads and processes started under the block inherit it.
        resource_tracker.ensure_running()  # whose start would lift the block
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._pool.schedule(os.getpid)  # the first job starts it
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def submit(self, job: Any) -> Future[Any]:
        if not self._pool.active:  # pebble gives up where a worker is killed that has no job
            self.stop()
            self._start()
        return self._pool.schedule(self._function, [job])

    def cancel(self, future: Future[Any]) -> None:
        future.cancel()

    def stop(self) -> None:
        self._pool.stop()
        self._pool.join()


def end_with_parent() -> None:
    """End this process as soon as its parent is gone, even in the middle of a job."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait_for_connection([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class RayCluster:
    """The cluster at $RAY_ADDRESS, whose nodes see all files, or one of `num_workers` processes."""

    def __init__(self, function: Callable[[Any], Any], num_workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise InputError("--engine ray needs Ray: pip install ray") from error
        address = os.environ.get("RAY_ADDRESS")
        # By default a cluster of our own: one that happens to run here ends when its owner says so.
        own: dict[str, Any] = {} if address else {"num_cpus": num_workers, "include_dashboard": False}
        try:
            ray.init(address or "local", log_to_driver=False, **own)
        except (ConnectionError, ValueError) as error:
            raise InputError(f"no Ray cluster answers at RAY_ADDRESS={address} ({error})") from error
        self._ray, self._task = ray, ray.remote(max_retries=0)(function)
        self.crashes, self.stop = ray.exceptions.WorkerCrashedError, ray.shutdown
        self.capacity = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, job: Any) -> Any:
        reference = self._task.remote(job)
        future: Any = reference.future()
        future.set_running_or_notify_cancel()
        future.reference = reference
        return future

    def cancel(self, future: Any) -> None:
        self._ray.cancel(future.reference, force=True)


def run_jobs(
    make_engine: Callable[..., Processes | RayCluster],
    function: Callable[[Any], Any],
    jobs: Iterable[Any],
    num_workers: int,
    timeout: float,
    watch: Watch = lambda jobs: [None] * len(jobs),
) -> Iterator[tuple[Any, Any]]:
    """Apply `function` to jobs, of which each may take `timeout` seconds without progress; yield (job, result) as they
    come. `watch` is told every second which jobs run, and returns how far each of them is."""
    waiting = map(Task, jobs)
    retries: list[Task] = []
    running: dict[Future[Any], Task] = {}
    engine = make_engine(function, num_workers)
    try:
        while True:
            # No more than there are workers: each starts at once.
            while len(running) < engine.capacity and (task := retries.pop() if retries else next(waiting, None)):
                running[engine.submit(task.job)] = task
            if not running:
                return
            done = wait(running, timeout=1, return_when=FIRST_COMPLETED).done
            now = time.monotonic()
            shares = watch([task.job for task in running.values()])
            for (future, task), share in zip(running.items(), shares, strict=True):
                if share != task.share or not future.running() or not task.since:  # a new process takes seconds
                    task.share, task.since = share, now
            for future in [future for future, task in running.items() if future in done or now > task.since + timeout]:
                task = running.pop(future)
                if future not in done:
                    engine.cancel(future)
                    yield task.job, Failed(f"it made no progress for {timeout:g} seconds", is_late=True)
                elif (error := future.exception()) is None:
                    yield task.job, future.result()
                elif not isinstance(error, engine.crashes):
                    raise error
                elif task.attempt < ATTEMPTS:
                    retries.append(Task(task.job, task.attempt + 1))
                else:
                    code = error.exitcode if isinstance(error, ProcessExpired) else 1
                    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    yield task.job, Failed(f"the process that worked on it died ({cause})")
    finally:
        engine.stop()


run_in_processes: RunJobs = partial(run_jobs, Processes)
run_on_ray: RunJobs = partial(run_jobs, RayCluster)
ENGINES = {"processes": run_in_processes, "ray": run_on_ray}
