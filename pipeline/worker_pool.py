"""Starts decode workers, sends them chunks, and collects what they have made.

Workers that die or hang are replaced. A chunk is a pure function of its fields, so it is sent again
to another worker as it was.
"""

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
from adamae.pipeline.decoding.chunks import Chunk, ChunkResult, WorkerSetup

# The module that workers run.
WORKER = "adamae.pipeline.decoding.start_worker"
# Chunks that a worker has at most: half a second of work, for when nobody collects. With more, the
# socket might be full, and this process would wait for the worker while the worker waits for it.
MAX_SENT = 32
# A worker that ends before it is ready is started again, but not endlessly: memory may be short.
MAX_STARTS = 3
# Starting takes half a second, more where eight workers share two cores or the disk is busy.
START_TIMEOUT_S = 60.0


@dataclass
class Worker:
    """A decode worker's process, and what this process knows of it."""

    setup: WorkerSetup
    process: subprocess.Popen[bytes]
    connection: Connection
    # The chunks that were sent and have not come back; the worker makes them in this order.
    chunks: deque[Chunk] = field(default_factory=deque)
    is_ready: bool = False
    # In a row, none of which has led to a worker that was ready.
    num_starts: int = 1
    # Since its last sign of life, or its first chunk. Only time in which this process has waited
    # for it counts: its answers may be there and unread while a training step or an evaluation
    # runs.
    silent_s: float = 0.0

    def send(self, message: WorkerSetup | Chunk) -> None:
        """Send a message; if the worker has ended, `WorkerPool.collect` finds that."""
        with suppress(OSError):
            self.connection.send(message)


class WorkerPool:
    """The decode workers of a loader. All methods are called from the loader's thread."""

    def __init__(self, setup: WorkerSetup, memory_file: int, counts: Counter[str]) -> None:
        """Prepare to start workers that write clips to the file `memory_file`.

        `counts` gets `timeouts`: how many workers were silent for data.decode_timeout_s.
        """
        self._setup = setup
        self._memory_file = memory_file
        self._counts = counts
        self._timeout_s = setup.config.decode_timeout_s
        # Chunks that no worker has got yet.
        self._waiting: deque[Chunk] = deque()
        self._workers: list[Worker] = []

    def start(self) -> None:
        """Start the workers, unless they are at work."""
        if self._workers:
            return
        # One selector for all calls: multiprocessing.connection.wait would build one in each.
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
        """Have chunks made, after those that wait already or, if `first`, before them."""
        if first:
            self._waiting = deque([*chunks, *self._waiting])
        else:
            self._waiting.extend(chunks)
        self._dispatch()

    def collect(self, wait: bool) -> list[ChunkResult]:
        """Return what has come since the last call; `wait` until there is something.

        Raise what a worker has raised, and InputError if workers cannot be started.
        """
        results: list[ChunkResult] = []
        while True:
            self._dispatch()
            started = time.monotonic()
            timeout_s = 0.0
            if wait and not results:
                timeout_s = max(0.0, min(map(self._remaining_s, self._workers)))
            events = self._selector.select(timeout_s)
            waited_s = time.monotonic() - started
            for worker in self._workers:
                worker.silent_s += waited_s
            for key, _ in events:
                results += self._receive(key.data)
            self._replace_silent_workers()
            if not events and (results or not wait):
                return results

    def _remaining_s(self, worker: Worker) -> float:
        """Return for how many more seconds a worker may be silent."""
        if not worker.chunks:
            return math.inf
        limit_s = self._timeout_s
        if not worker.is_ready:
            limit_s = max(limit_s, START_TIMEOUT_S)
        return limit_s - worker.silent_s

    def _replace_silent_workers(self) -> None:
        silent = [worker for worker in self._workers if self._remaining_s(worker) <= 0]
        for worker in silent:
            self._counts["timeouts"] += 1
            self._replace(worker, f"reading and decoding took more than {self._timeout_s:g} s")

    def _dispatch(self) -> None:
        """Send each waiting chunk to the worker with the fewest."""
        while self._waiting:
            worker = min(self._workers, key=lambda worker: len(worker.chunks))
            if len(worker.chunks) >= MAX_SENT:
                return
            if not worker.chunks:
                # It was silent because it had nothing to do.
                worker.silent_s = 0.0
            chunk = self._waiting.popleft()
            worker.chunks.append(chunk)
            worker.send(chunk)

    def _receive(self, worker: Worker) -> Iterator[ChunkResult]:
        """Read a worker's message, and yield it if it is a result. Raise what it has raised."""
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
        else:
            # It is a sign of life: the first one says that the worker is ready.
            worker.is_ready = True
            worker.num_starts = 0

    def _replace(self, worker: Worker, reason: str) -> None:
        """Start another worker for one that died or hung, and send its chunks again.

        The first chunk, over which it died, is sent video by video. A video is at fault only if
        workers have died over it twice, the second time over nothing else. The new worker takes
        over all chunks: the others may be about to die of what this one died of, such as a lack of
        memory.
        """
        # Before its chunks are sent again: it must not write to their slots any more.
        end_worker(worker, self._selector)
        self._workers.remove(worker)
        if worker.is_ready and worker.chunks:
            suspect = worker.chunks.popleft()
            if suspect.is_suspect:
                # It is a single video, over which a worker has died before: it is to be replaced.
                deaths = (*suspect.deaths, reason)
                worker.chunks.appendleft(suspect._replace(deaths=deaths, is_suspect=False))
            else:
                worker.chunks.extendleft(reversed(self._split_into_videos(suspect)))
        elif worker.num_starts >= MAX_STARTS:
            raise InputError(
                f"a decode worker {describe_end(worker.process)} before it was ready, {MAX_STARTS}"
                " times: if memory is short, lower data.num_workers or data.prefetch"
            )
        self._start(worker.setup, worker.num_starts + 1, worker.chunks)

    def _split_into_videos(self, chunk: Chunk) -> list[Chunk]:
        """Return a chunk for each video of `chunk`, over one of which a worker has died."""
        crops = self._setup.plan.crops_per_decode
        firsts = range(chunk.first, chunk.first + chunk.num_clips, crops)
        return [chunk._replace(first=first, num_clips=crops, is_suspect=True) for first in firsts]

    def _start(self, setup: WorkerSetup, num_starts: int = 1, chunks: Iterable[Chunk] = ()) -> None:
        """Start a worker, and send it `chunks`.

        As a program of its own: a fork of this process would have its threads' locks and CUDA's
        state.
        """
        parent_end, worker_end = Pipe()
        files = worker_end.fileno(), self._memory_file
        # What can be imported here can be imported there; an empty entry would be the current
        # folder.
        search_path = [entry for entry in (str(ROOT), *sys.path) if entry]
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, *map(str, files)],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for the process that this one works for.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path)},
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
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
