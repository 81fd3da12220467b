"""Run jobs in local processes or on a Ray cluster. A job that crashes or hangs costs itself and no other one."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain
from multiprocessing import resource_tracker
from typing import Any

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from adamae.common.errors import InputError
from adamae.common.processes import end_with_parent

START_METHOD = "spawn"  # a forked child would get copies of open pipes, and not notice when its parent is killed
ATTEMPTS = 2  # the kernel may have killed a worker for another process's memory: each job gets a second chance

RunJobs = Callable[..., Iterator[tuple[Any, Any]]]


def call_with_timer(function: Callable[[Any], Any], timeout: float, job: Any) -> Any:
    """Return function(job). SIGALRM ends the process, also in the middle of FFmpeg, if it takes longer than `timeout`
    seconds without a call of `restart_timer`."""
    signal.setitimer(signal.ITIMER_REAL, timeout, timeout)
    try:
        return function(job)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def restart_timer() -> None:
    """Let a job say that it makes progress; without a timer, nothing happens."""
    _, timeout = signal.getitimer(signal.ITIMER_REAL)
    if timeout:
        signal.setitimer(signal.ITIMER_REAL, timeout, timeout)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from the processes that the block starts, and raise it behind the block.

    In this process, it is not enough to block the signal: any other thread, such as tqdm's, may take it.
    """
    taken: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: taken.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
        if taken:
            signal.raise_signal(signal.SIGINT)


class Processes:
    """Processes of this machine."""

    crashes: Any = (ProcessExpired, BrokenProcessPool)

    def __init__(self, function: Callable[[Any], Any], num_workers: int) -> None:
        self.capacity, self._function = num_workers, function
        resource_tracker.ensure_running()  # its start would lift the block of signals
        self._pool = self._make_pool()

    def _make_pool(self) -> ProcessPool:
        context = multiprocessing.get_context(START_METHOD)
        return ProcessPool(self.capacity, initializer=end_with_parent, context=context)

    def submit(self, job: Any) -> Future[Any]:
        with defer_interrupts():
            if not self._pool.active:  # pebble gives up where a worker is killed that has no job
                self.stop()
                self._pool = self._make_pool()
            return self._pool.schedule(self._function, [job])

    def stop(self) -> None:
        self._pool.stop()
        # pebble removes the semaphores before it ends the workers, and one that starts late does not find them.
        for process in multiprocessing.active_children():
            if process.name == WORKERS_NAME:
                process.kill()
                process.join()
        self._pool.join()


class RayCluster:
    """The cluster at $RAY_ADDRESS, whose nodes see all files, or one of `num_workers` processes."""

    def __init__(self, function: Callable[[Any], Any], num_workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise InputError("--engine ray needs Ray: pip install ray") from error
        address = os.environ.get("RAY_ADDRESS")
        # By default a private cluster: one that happens to run here ends when its owner says so.
        own: dict[str, Any] = (
            {} if address else {"num_cpus": num_workers, "include_dashboard": False}
        )
        try:
            ray.init(address or "local", log_to_driver=False, **own)
        except (ConnectionError, ValueError) as error:
            raise InputError(
                f"no Ray cluster answers at RAY_ADDRESS={address} ({error})"
            ) from error
        self._task: Any = ray.remote(max_retries=0)(
            lambda job: function(job)
        )  # Ray takes no partial
        self.crashes, self.stop = ray.exceptions.WorkerCrashedError, ray.shutdown
        self.capacity = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, job: Any) -> Future[Any]:
        future: Future[Any] = self._task.remote(job).future()
        return future


def run_jobs(
    make_engine: Callable[..., Processes | RayCluster],
    function: Callable[[Any], Any],
    jobs: Iterable[Any],
    num_workers: int,
    timeout: float,
) -> Iterator[tuple[Any, Any]]:
    """Apply `function` to jobs, each of which may take `timeout` seconds without progress; yield (job, result), as they
    come. The result is the reason where the worker died or took too long."""
    tasks: Iterator[tuple[Any, int]] = ((job, 1) for job in jobs)  # with the number of the attempt
    running: dict[Future[Any], tuple[Any, int]] = {}
    engine = make_engine(partial(call_with_timer, function, timeout), num_workers)
    try:
        while True:
            # No more than there are workers: each starts at once.
            while len(running) < engine.capacity and (task := next(tasks, None)):
                running[engine.submit(task[0])] = task
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, attempt = running.pop(future)
                if (error := future.exception()) is None:
                    yield job, future.result()
                elif not isinstance(error, engine.crashes):
                    raise error
                elif (code := getattr(error, "exitcode", None)) == -signal.SIGALRM:
                    yield job, f"it made no progress for {timeout:g} seconds: raise --timeout"
                elif attempt < ATTEMPTS:
                    tasks = chain([(job, attempt + 1)], tasks)
                else:  # of a cluster's processes nobody says more
                    cause = f", or made no progress for {timeout:g} seconds"
                    if code is not None:
                        cause = (
                            f" ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
                        )
                    yield job, f"the process that worked on it died{cause}"
    finally:
        engine.stop()


ENGINES: dict[str, RunJobs] = {
    "processes": partial(run_jobs, Processes),
    "ray": partial(run_jobs, RayCluster),
}
