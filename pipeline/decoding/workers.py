"""Threads that read and decode. Threads, not processes: FFmpeg and hashing release the interpreter's lock, and nothing
is left behind, no process and no shared memory, however the program ends."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from itertools import count
from typing import Any

SLICE_S = 0.2  # how long a wait goes on before it looks up


class Task:
    """A call under way or waiting; `future` gets its result."""

    def __init__(self, call: Callable[["Task"], Any]) -> None:
        self.call = call
        self.future: Future[Any] = Future()
        self.started: float | None = None
        self.lock = threading.Lock()  # held while the task writes what others will read
        self.abandoned = False  # whoever asked has given up: write nothing any more

    def start_clock(self) -> None:
        """From now on the task has its whole time again."""
        self.started = time.monotonic()

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """In the block the task waits for something that has a time limit of its own."""
        self.started = None
        try:
            yield
        finally:
            self.start_clock()


class Workers:
    """A fixed number of daemon threads; one whose task hangs is replaced."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._name, self._numbers = name, count()
        self._tasks: queue.PriorityQueue[tuple[bool, int, Task | None]] = queue.PriorityQueue()
        self._turns = count()
        self._closed = False
        self._threads: list[threading.Thread] = []
        for _ in range(num_threads):
            self._start_thread()

    def submit(self, call: Callable[[Task], Any], is_urgent: bool = False) -> Task:
        """Queue `call`, which is given its Task, behind those before it; what is urgent goes before what is not."""
        task = Task(call)
        self._tasks.put((not is_urgent, next(self._turns), task))
        return task

    def result(self, task: Task, timeout: float, given_up: Callable[[], bool] = lambda: False) -> Any:
        """Wait for a task; raises TimeoutError, and replaces its thread, if it has been running for `timeout` s.

        Raises CancelledError, and replaces the thread, once `given_up` says that nobody waits for it any more.
        """
        while True:
            try:
                return task.future.result(timeout=min(SLICE_S, timeout / 4))
            except TimeoutError:
                if task.future.done():
                    raise  # the call itself has raised it
                started = task.started
                hangs = started is not None and time.monotonic() - started > timeout
                if hangs or given_up():
                    with task.lock:
                        task.abandoned = True
                    self._start_thread()
                    if hangs:
                        raise
                    raise CancelledError from None

    def close(self, timeout: float = 5.0) -> None:
        """Drop waiting tasks and wait for the running ones, `timeout` seconds at most."""
        self._closed = True
        for _ in self._threads:
            self._tasks.put((False, next(self._turns), None))
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{next(self._numbers)}", daemon=True)
        self._threads = [running for running in self._threads if running.is_alive()] + [thread]
        thread.start()

    def _run(self) -> None:
        while not self._closed and (task := self._tasks.get()[-1]) is not None:
            if self._closed:
                return
            task.start_clock()
            try:
                task.future.set_result(task.call(task))
            except BaseException as error:  # handed on: whoever waits for the result raises it
                task.future.set_exception(error)
            if task.abandoned:
                return  # another thread has taken this one's place
