"""Run jobs in local processes or on a Ray cluster.

A job that crashes or hangs costs itself and no other one.
"""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from adamae.common.errors import InputError
from adamae.common.processes import end_with_parent

# A forked child would get copies of open pipes, and not notice when its parent is killed.
START_METHOD = "spawn"
# The kernel may have killed a worker for another process's memory: each job gets a second chance.
MAX_ATTEMPTS = 2
# A cluster's head answers within milliseconds, also from another continent.
PROBE_TIMEOUT_S = 5.0

RunJobs = Callable[..., Iterator[tuple[Any, Any]]]


def call_with_timer(function: Callable[[Any], Any], timeout: float, job: Any) -> Any:
    """Return function(job), and end the process if it hangs.

    It hangs if `timeout` seconds pass without a call of `restart_timer`. SIGALRM then ends the
    process even in the middle of FFmpeg, which no exception of Python would.
    """
    signal.setitimer(signal.ITIMER_REAL, timeout, timeout)
    try:
        return function(job)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def restart_timer() -> None:
    """Report that the current job makes progress. Without a timer, nothing happens."""
    _, timeout = signal.getitimer(signal.ITIMER_REAL)
    if timeout:
        signal.setitimer(signal.ITIMER_REAL, timeout, timeout)


@contextmanager
def pause_timer() -> Iterator[None]:
    """Stop the timer within the block, for waits that have limits of their own."""
    _, timeout = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, timeout, timeout)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from the processes that the block starts, and raise it after the block.

    Children inherit a blocked signal. For this process itself blocking is not enough: any other
    thread, such as tqdm's, may take the signal.
    """
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


class Processes:
    """Worker processes on this machine."""

    # Errors of jobs over which a worker died, and of jobs that were lost with their whole machine.
    crashes: Any = (ProcessExpired, BrokenProcessPool)
    losses: Any = ()

    def __init__(self, function: Callable[[Any], Any], num_workers: int) -> None:
        self.capacity = num_workers
        self._function = function
        # If it started with the first worker, it would lift the block of signals.
        resource_tracker.ensure_running()
        self._pool = self._make_pool()

    def _make_pool(self) -> ProcessPool:
        context = multiprocessing.get_context(START_METHOD)
        return ProcessPool(self.capacity, initializer=end_with_parent, context=context)

    def submit(self, job: Any) -> Future[Any]:
        with defer_interrupts(), _explain_missing_semaphores():
            # pebble stops a pool when a worker is killed that has no job.
            if not self._pool.active:
                self.stop()
                self._pool = self._make_pool()
            return self._pool.schedule(self._function, [job])

    def stop(self) -> None:
        self._pool.stop()
        # pebble removes the semaphores before it ends the workers. One that has only just started
        # would not find them and print a traceback.
        for process in multiprocessing.active_children():
            if process.name == WORKERS_NAME:
                process.kill()
                process.join()
        self._pool.join()


@contextmanager
def _explain_missing_semaphores() -> Iterator[None]:
    """Raise InputError where workers cannot start, as their semaphores are files in /dev/shm."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"worker processes need /dev/shm, which cannot be written ({error.strerror}): mount it"
            " writable and with free space"
        ) from error


class RayCluster:
    """The cluster at $RAY_ADDRESS, whose nodes see all files, or a local one of `num_workers`."""

    def __init__(self, function: Callable[[Any], Any], num_workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise InputError("--engine ray needs Ray: pip install ray") from error
        address = os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = {}
        if not address:
            # "local" starts a private cluster. Ray's default would join one that happens to run
            # here, and that ends when its owner says so.
            options = {"num_cpus": num_workers, "include_dashboard": False}
        else:
            _require_listener(address)
        try:
            ray.init(address or "local", log_to_driver=False, **options)
        except (ConnectionError, ValueError) as error:
            raise InputError(
                f"no Ray cluster answers at RAY_ADDRESS={address} ({error})"
            ) from error

        def run_job(job: Any) -> Any:
            return function(job)

        # Ray takes functions, but no functools.partial. run_jobs repeats jobs itself.
        self._task: Any = ray.remote(max_retries=0)(run_job)
        self.crashes = (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError)
        self.losses = (ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError)
        self.stop = ray.shutdown
        self._cluster_resources = ray.cluster_resources

    @property
    def capacity(self) -> int:
        """How many jobs run at once now: nodes may have died or joined."""
        return max(1, int(self._cluster_resources().get("CPU", 1)))

    def submit(self, job: Any) -> Future[Any]:
        future: Future[Any] = self._task.remote(job).future()
        return future


def _require_listener(address: str) -> None:
    """Raise InputError if nobody listens at host:port: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    # Others, such as "auto", are names that Ray looks up.
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), PROBE_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"no Ray cluster answers at RAY_ADDRESS={address} ({reason})") from error


@dataclass(frozen=True, slots=True)
class _Task:
    """A job with the number of the attempt to run it, from 1."""

    job: Any
    attempt: int


def run_jobs(
    make_engine: Callable[..., Processes | RayCluster],
    function: Callable[[Any], Any],
    jobs: Iterable[Any],
    num_workers: int,
    timeout: float,
) -> Iterator[tuple[Any, Any]]:
    """Apply `function` to jobs; yield (job, result) in the order in which they end.

    A job may take `timeout` seconds without progress. Where the worker hung or died, the result is
    a sentence that says so.
    """
    new_jobs = iter(jobs)
    repeated: list[_Task] = []
    running: dict[Future[Any], _Task] = {}
    engine = make_engine(partial(call_with_timer, function, timeout), num_workers)
    try:
        while True:
            # No more than there are workers, so that each job starts at once: its timer runs.
            while len(running) < engine.capacity:
                task = _next_task(repeated, new_jobs)
                if task is None:
                    break
                running[engine.submit(task.job)] = task
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                error = future.exception()
                if error is None:
                    yield task.job, future.result()
                    continue
                if isinstance(error, engine.losses):
                    # A machine died, which is no fault of the job's.
                    repeated.append(task)
                    continue
                if not isinstance(error, engine.crashes):
                    raise error
                timed_out = getattr(error, "exitcode", None) == -signal.SIGALRM
                if task.attempt < MAX_ATTEMPTS and not timed_out:
                    repeated.append(_Task(task.job, task.attempt + 1))
                else:
                    yield task.job, _explain_crash(error, timeout)
    finally:
        engine.stop()


def _next_task(repeated: list[_Task], new_jobs: Iterator[Any]) -> _Task | None:
    """Return what to run next: the job that has failed last, or else a new one, if any is left."""
    if repeated:
        return repeated.pop()
    job = next(new_jobs, None)
    return None if job is None else _Task(job, attempt=1)


def _explain_crash(error: BaseException, timeout: float) -> str:
    exit_code = getattr(error, "exitcode", None)
    if exit_code == -signal.SIGALRM:
        return f"it made no progress for {timeout:g} seconds: raise --timeout"
    if exit_code is None:
        # Ray reports no exit code, so the timer may have ended the process as well.
        cause = f", or made no progress for {timeout:g} seconds"
    elif exit_code < 0:
        cause = f" ({signal.Signals(-exit_code).name})"
    else:
        cause = f" (exit code {exit_code})"
    return f"the process that worked on it died{cause}"


ENGINES: dict[str, RunJobs] = {
    "processes": partial(run_jobs, Processes),
    "ray": partial(run_jobs, RayCluster),
}
