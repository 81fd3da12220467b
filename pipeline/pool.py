"""Threads that read and decode, or have a process decode (pipeline/decoding/process.py)."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run a call in a daemon thread of its own: one that hangs does not keep the process from ending."""
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(future, call), name=name, daemon=True).start()
    return future


class ThreadPool:
    """Daemon threads that run calls in the order of submission.

    concurrent.futures has no daemon threads: one that hangs inside a decoder would keep the interpreter from exiting.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._name, self._numbers = name, count()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._abandoned: set[Future[Any]] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        for _ in range(num_threads):
            self._start_thread()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def abandon(self, future: Future[Any]) -> None:
        """Replace the thread that runs a call which hangs."""
        self._abandoned.add(future)
        self._start_thread()

    def close(self, timeout: float = 5.0) -> None:
        """Drop waiting calls and wait for running ones, `timeout` seconds at most."""
        self._closed = True
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{next(self._numbers)}", daemon=True)
        self._threads = [running for running in self._threads if running.is_alive()] + [thread]
        thread.start()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None and not self._closed:
            future, call = item
            _run(future, call)
            if future in self._abandoned:
                self._abandoned.remove(future)
                return  # another thread has taken its place


def _run(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # raised again where the result is asked for
        future.set_exception(error)
