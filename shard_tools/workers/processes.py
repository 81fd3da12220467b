"""Processes that do the work: one that crashes, hangs or is killed costs the video it was at, and nothing else."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

ATTEMPTS = 2  # a worker may have been killed for another's memory: each job gets a second chance


def num_processors() -> int:
    """Those this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Failed:
    """What came of a job whose worker did not answer."""

    reason: str


@dataclass(slots=True)
class Worker:
    process: BaseProcess
    pipe: Connection
    job: Any = None
    deadline: float = 0.0
    attempt: int = 0


def end_with_parent() -> None:
    """From now on this process ends when its parent has gone, however that ended, also in the middle of a job."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    end_with_parent()
    try:
        while True:
            pipe.send(function(pipe.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone


class Pool:
    """`num_workers` processes that apply `function`, each to one job at a time and for at most `timeout` seconds."""

    def __init__(self, function: Callable[[Any], Any], num_workers: int, timeout: float):
        self.function = function
        self.num_workers = num_workers
        self.timeout = timeout
        # Spawned, not forked: a child gets no copy of open pipes, so it notices when its parent is killed.
        self.context = multiprocessing.get_context("spawn")

    def run(self, jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (job, result) as they come; the result is Failed where the worker died or took too long."""
        waiting = iter(jobs)
        idle: list[Worker] = []
        busy: list[Worker] = []
        try:
            while True:
                while len(busy) < self.num_workers and (job := next(waiting, None)) is not None:
                    worker = idle.pop() if idle else self._start()
                    self._give(worker, job, attempt=1)
                    busy.append(worker)
                if not busy:
                    return
                for worker in self._answered(busy):
                    busy.remove(worker)
                    result = self._result(worker)
                    if isinstance(result, Failed) and worker.attempt < ATTEMPTS and worker.deadline > time.monotonic():
                        again = self._start()
                        self._give(again, worker.job, worker.attempt + 1)
                        busy.append(again)
                        continue
                    if not isinstance(result, Failed):
                        idle.append(worker)
                    yield worker.job, result
        finally:
            for worker in idle + busy:
                _end(worker)

    def _start(self) -> Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(self.function, theirs), daemon=True)
        # Ctrl-C is the parent's to handle: the child inherits the block, so it is deaf to it from the start.
        resource_tracker.ensure_running()  # whose start would lift the block
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        return Worker(process, ours)

    def _give(self, worker: Worker, job: Any, attempt: int) -> None:
        worker.job, worker.attempt = job, attempt
        worker.deadline = time.monotonic() + self.timeout
        with suppress(BrokenPipeError):  # it died since its last job: reading its answer will say so
            worker.pipe.send(job)

    def _answered(self, busy: list[Worker]) -> list[Worker]:
        """Wait until at least one worker has answered, died or run out of time."""
        patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        ready = set(map(id, wait([worker.pipe for worker in busy], patience)))
        now = time.monotonic()
        return [worker for worker in busy if id(worker.pipe) in ready or worker.deadline <= now]

    def _result(self, worker: Worker) -> Any:
        try:
            if worker.pipe.poll():
                return worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            return Failed(f"the process that worked on it died ({_cause(worker.process.exitcode)})")
        _end(worker)
        return Failed(f"it took longer than {self.timeout:g} seconds")


def _end(worker: Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"
