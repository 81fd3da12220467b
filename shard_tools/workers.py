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
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_connection
from typing import Any

from pebble import ProcessExpired, ProcessPool

from common.errors import InputError

START_METHOD = "spawn"  # a forked child would get copies of open pipes, and not notice when its parent is killed
NUM_CPUS = len(os.sched_getaffinity(0))  # that this process may use
ATTEMPTS = 2  # the kernel may have killed a worker for another process's memory: each job gets a second chance


# (function, jobs, number of workers, seconds for a job, what is told every second which jobs run) -> (job, result) as
# they come
Limit = Callable[[Any], float]
Watch = Callable[[list[Any]], None]
RunJobs = Callable[[Callable[[Any], Any], Iterable[Any], int, Limit, Watch], Iterator[tuple[Any, Any]]]


@dataclass(frozen=True, slots=True)
class Failed:
    """The result of a job whose worker died or took too long."""

    reason: str
    is_late: bool = False


def ignore_running(jobs: list[Any]) -> None: ...


def run_in_processes(
    function: Callable[[Any], Any], jobs: Iterable[Any], num_workers: int, limit: Limit, watch: Watch = ignore_running
) -> Iterator[tuple[Any, Any]]:
    """Apply `function` in `num_workers` processes, for at most `limit(job)` seconds per job."""
    waiting = ((job, 1) for job in jobs)
    retries: list[tuple[Any, int]] = []
    running: dict[Future[Any], tuple[Any, int]] = {}
    pool = _start_pool(num_workers)
    try:
        while True:
            if not pool.active:  # a worker was killed while none had a job: pebble gives the pool up
                retries += running.values()
                running.clear()
                _stop(pool)
                pool = _start_pool(num_workers)
            # One more than there are workers, so that none waits for its next job.
            while len(running) <= num_workers and (task := retries.pop() if retries else next(waiting, None)):
                running[pool.schedule(function, [task[0]], timeout=limit(task[0]))] = task
            if not running:
                return
            done = wait(running, timeout=1, return_when=FIRST_COMPLETED).done
            watch([job for job, _ in running.values()])
            for future in done:
                job, attempt = running.pop(future)
                error = future.exception()
                if error is None:
                    yield job, future.result()
                elif isinstance(error, TimeoutError):
                    yield job, Failed(f"it took longer than {limit(job):g} seconds", is_late=True)
                elif not isinstance(error, (ProcessExpired, BrokenProcessPool)):
                    raise error
                elif attempt < ATTEMPTS:
                    retries.append((job, attempt + 1))
                else:
                    code = error.exitcode if isinstance(error, ProcessExpired) else 1
                    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    yield job, Failed(f"the process that worked on it died ({cause})")
    finally:
        _stop(pool)


def _start_pool(num_workers: int) -> ProcessPool:
    pool = ProcessPool(num_workers, initializer=end_with_parent, context=multiprocessing.get_context(START_METHOD))
    # Ctrl-C is the parent's to handle: threads and processes started under the block inherit it.
    resource_tracker.ensure_running()  # whose start would lift the block
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pool.schedule(os.getpid)  # the first job starts it
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return pool


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def end_with_parent() -> None:
    """End this process as soon as its parent is gone, even in the middle of a job."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait_for_connection([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_on_ray(
    function: Callable[[Any], Any], jobs: Iterable[Any], num_workers: int, limit: Limit, watch: Watch = ignore_running
) -> Iterator[tuple[Any, Any]]:
    """Apply `function` on the cluster at $RAY_ADDRESS, whose nodes see all files, or in `num_workers` processes."""
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
    try:
        task = ray.remote(max_retries=ATTEMPTS - 1)(function)
        # No more tasks than CPUs: each starts at once, so its time limit counts from here.
        capacity = max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting = iter(jobs)
        running: dict[Any, tuple[Any, float]] = {}
        while True:
            for job in islice(waiting, capacity - len(running)):
                running[task.remote(job)] = job, time.monotonic() + limit(job)
            if not running:
                return
            next_deadline = min(deadline for _, deadline in running.values())
            patience = min(max(0.0, next_deadline - time.monotonic()), 1.0)
            done, _ = ray.wait(list(running), num_returns=1, timeout=patience)
            watch([job for job, _ in running.values()])
            late = [ref for ref, (_, deadline) in running.items() if ref not in done and deadline < time.monotonic()]
            for reference in done:
                job, _ = running.pop(reference)
                try:
                    yield job, ray.get(reference)
                except ray.exceptions.WorkerCrashedError:
                    yield job, Failed("the process that worked on it died")
            for reference in late:
                job, _ = running.pop(reference)
                ray.cancel(reference, force=True)
                yield job, Failed(f"it took longer than {limit(job):g} seconds", is_late=True)
    finally:
        ray.shutdown()


ENGINES: dict[str, RunJobs] = {"processes": run_in_processes, "ray": run_on_ray}
