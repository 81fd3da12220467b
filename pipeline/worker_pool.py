"""Starts decode workers, sends them chunks, and collects what they have made; replaces those that die or hang."""

import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from adamae import ROOT
from adamae.common.errors import InputError
from adamae.pipeline.decoding.decode_worker import Chunk, ChunkResult, WorkerSetup

WORKER = "adamae.pipeline.decoding.start_worker"  # the module that is run
# Sent to a worker at most: half a second of work, for when nobody collects, and no more than a socket holds.
MAX_SENT = 32
MAX_STARTS = 3  # of one worker in a row that end before it is ready
START_TIMEOUT_S = 60.0  # until it is: half a second, but for busy disks


@dataclass
class Worker:
    setup: WorkerSetup
    process: subprocess.Popen[bytes]
    connection: Connection
    chunks: deque[Chunk] = field(default_factory=deque)  # that were sent, and have not come back
    is_ready: bool = False
    num_starts: int = 1  # since one was ready
    silent_s: float = (
        0.0  # time that was spent waiting since its last sign of life, or its first chunk
    )

    def send(self, message: WorkerSetup | Chunk) -> None:
        with suppress(OSError):  # it has ended, which `collect` finds
            self.connection.send(message)


class WorkerPool:
    def __init__(self, setup: WorkerSetup, memory_file: int, counts: Counter[str]) -> None:
        """memory_file: where clips go; counts: get `timeouts`, workers that were silent for data.decode_timeout_s."""
        self._setup, self._memory_file, self._counts = setup, memory_file, counts
        self._timeout = setup.config.decode_timeout_s
        self._waiting: deque[Chunk] = deque()  # to be sent
        self._workers: list[Worker] = []

    def start(self) -> None:
        """Start the workers, unless they are at work."""
        if self._workers:
            return
        self._selector = selectors.DefaultSelector()
        is_main = threading.current_thread() is threading.main_thread()
        for number in range(self._setup.config.workers):
            self._start(self._setup._replace(number=number, ends_with_thread=is_main))

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self._workers:
            end_worker(worker, self._selector)
        if self._workers:
            self._selector.close()
        self._workers.clear()
        self._waiting.clear()

    def send(self, chunks: Iterable[Chunk], first: bool = False) -> None:
        """Have chunks made, after those that were sent before, or first of all."""
        self._waiting = deque([*chunks, *self._waiting] if first else [*self._waiting, *chunks])
        self._dispatch()

    def collect(self, wait: bool) -> list[ChunkResult]:
        """Return what has come since the last call; `wait`: until there is something.

        Raise what a worker has raised, InputError if workers cannot be started.
        """
        found: list[ChunkResult] = []
        while True:
            self._dispatch()
            started = time.monotonic()
            timeout = max(0.0, min(map(self._remaining_s, self._workers)))
            events = self._selector.select(timeout if wait and not found else 0)
            waited = time.monotonic() - started
            for worker in self._workers:
                worker.silent_s += (
                    waited  # answers may have waited for us: only this is its own time
                )
            for key, _ in events:
                found += self._receive(key.data)
            for worker in [worker for worker in self._workers if self._remaining_s(worker) <= 0]:
                self._counts["timeouts"] += 1
                self._replace(worker, f"reading and decoding took more than {self._timeout:g} s")
            if not events and (found or not wait):
                return found

    def _remaining_s(self, worker: Worker) -> float:
        """Return for how many more seconds a worker may be silent."""
        if not worker.chunks:
            return math.inf
        return (
            self._timeout if worker.is_ready else max(self._timeout, START_TIMEOUT_S)
        ) - worker.silent_s

    def _dispatch(self) -> None:
        """Send each waiting chunk to the worker with the fewest."""
        while self._waiting:
            worker = min(self._workers, key=lambda worker: len(worker.chunks))
            if len(worker.chunks) >= MAX_SENT:
                return
            if not worker.chunks:
                worker.silent_s = 0.0
            worker.chunks.append(self._waiting.popleft())
            worker.send(worker.chunks[-1])

    def _receive(self, worker: Worker) -> Iterator[ChunkResult]:
        try:
            reply = worker.connection.recv()
        except (OSError, EOFError):
            self._replace(worker, f"the process that decoded it {describe_end(worker.process)}")
            return
        worker.silent_s = 0.0
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, ChunkResult):
            worker.chunks.popleft()
            yield reply
        else:  # a sign of life
            worker.is_ready, worker.num_starts = True, 0

    def _replace(self, worker: Worker, reason: str) -> None:
        """Start another worker for one that died or hung, and send its chunks again, the first one video by video.

        A video is at fault only if workers have died over it twice, the second time over nothing else. The new worker
        takes over all chunks: the others may be about to die of what this one died of, such as a lack of memory.
        """
        end_worker(
            worker, self._selector
        )  # before a chunk is sent again: it must not write any more
        self._workers.remove(worker)
        if worker.is_ready and worker.chunks:
            chunk, crops = worker.chunks.popleft(), worker.setup.plan.crops_per_decode
            if chunk.is_suspect:
                again = [chunk._replace(deaths=(*chunk.deaths, reason), is_suspect=False)]
            else:
                firsts = range(chunk.first, chunk.first + chunk.num_clips, crops)
                again = [
                    chunk._replace(first=first, num_clips=crops, is_suspect=True)
                    for first in firsts
                ]
            worker.chunks.extendleft(reversed(again))
        elif worker.num_starts >= MAX_STARTS:
            raise InputError(
                f"a decode worker {describe_end(worker.process)} before it was ready, {MAX_STARTS} times: if memory is"
                " short, lower data.num_workers or data.prefetch"
            )
        self._start(worker.setup, worker.num_starts + 1, worker.chunks)

    def _start(self, setup: WorkerSetup, num_starts: int = 1, chunks: Iterable[Chunk] = ()) -> None:
        parent_end, worker_end = Pipe()
        files = worker_end.fileno(), self._memory_file
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, *map(str, files)],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for the process that this one works for.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))},
        )
        worker_end.close()
        worker = Worker(setup, process, parent_end, deque(chunks), num_starts=num_starts)
        self._workers.append(worker)
        self._selector.register(parent_end, selectors.EVENT_READ, worker)
        worker.send(setup)
        for chunk in worker.chunks:
            worker.send(chunk)


def end_worker(worker: Worker, selector: selectors.BaseSelector) -> None:
    """Kill a worker, whatever it is doing, and wait for its end."""
    selector.unregister(worker.connection)
    worker.process.kill()
    worker.process.wait()
    worker.connection.close()


def describe_end(process: "subprocess.Popen[bytes]") -> str:
    """Wait for the end of a process, and say how it came."""
    code = process.wait()
    return (
        f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    )
