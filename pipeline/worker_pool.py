"""Starts decode workers, sends them chunks, and collects what they have made; replaces those that die or hang."""

import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

from common.errors import InputError
from pipeline.decoding.decode_worker import Chunk, ChunkResult, WorkerSetup, worker_main

# Which schedulers send to every process of a run, for it to save what it has done. To be run before all imports.
IGNORE_SIGNALS = "import signal as s; [s.signal(n, s.SIG_IGN) for n in (s.SIGHUP, s.SIGTERM, s.SIGUSR1, s.SIGUSR2)]"
# Sent to a worker at most: half a second of work, for when nobody collects, and no more than a socket holds.
MAX_SENT = 32
MAX_STARTS = 3  # of one worker in a row that end before it is ready
START_TIMEOUT_S = 60.0  # until it is: half a second, but for busy disks


class WorkerDeath(NamedTuple):
    """A video at which two workers have died, the second of which made nothing else."""

    chunk: Chunk
    reason: str
    timed_out: bool


@dataclass
class Worker:
    setup: WorkerSetup
    process: subprocess.Popen[bytes]
    connection: Connection
    chunks: deque[Chunk] = field(default_factory=deque)  # that were sent, and have not come back
    is_ready: bool = False
    num_starts: int = 1  # since one was ready
    silent_s: float = 0.0  # time that was spent waiting since its last sign of life, or its first chunk


class WorkerPool:
    def __init__(self, setup: WorkerSetup, num_workers: int, memory_file: int, timeout: float) -> None:
        """memory_file: where clips go; timeout: seconds of silence after which a worker counts as hung."""
        self._memory_file, self._timeout, self._crops = memory_file, timeout, setup.plan.crops_per_decode
        self._waiting: deque[Chunk] = deque()  # to be sent
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        for number in range(num_workers):
            self._start(setup._replace(number=number, num_workers=num_workers))

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in self._workers:
            end_worker(worker, self._selector)
        self._workers.clear()
        self._selector.close()

    def send(self, chunks: Iterable[Chunk], first: bool = False) -> None:
        """Have chunks made, after those that were sent before, or first of all."""
        if first:
            self._waiting.extendleft(reversed(list(chunks)))
        else:
            self._waiting.extend(chunks)
        self._dispatch()

    def collect(self, wait: bool) -> list[ChunkResult | WorkerDeath]:
        """Return what has come since the last call; `wait`: until there is something.

        Raise what a worker has raised, InputError if workers cannot be started.
        """
        found: list[ChunkResult | WorkerDeath] = []
        while True:
            self._dispatch()
            started = time.monotonic()
            events = self._selector.select(self._find_timeout() if wait and not found else 0)
            waited = time.monotonic() - started
            for worker in self._workers:
                worker.silent_s += waited  # answers may have waited for us: only this is its own time
            for key, _ in events:
                self._receive(key.data, found)
            for worker in [worker for worker in self._workers if self._remaining_s(worker) <= 0]:
                reason = f"reading and decoding took more than {self._timeout:g} s"
                self._replace(worker, reason, timed_out=True, found=found)
            if not events and (found or not wait):
                return found

    def _find_timeout(self) -> float:
        return max(0.0, min(map(self._remaining_s, self._workers)))

    def _remaining_s(self, worker: Worker) -> float:
        """Return for how many more seconds a worker may be silent."""
        if not worker.chunks:
            return math.inf
        return (self._timeout if worker.is_ready else max(self._timeout, START_TIMEOUT_S)) - worker.silent_s

    def _dispatch(self) -> None:
        """Send each waiting chunk to the worker with the fewest."""
        while self._waiting:
            worker = min(self._workers, key=lambda worker: len(worker.chunks))
            if len(worker.chunks) >= MAX_SENT:
                return
            self._send(worker, self._waiting.popleft())

    def _send(self, worker: Worker, chunk: Chunk) -> None:
        if not worker.chunks:
            worker.silent_s = 0.0
        worker.chunks.append(chunk)
        with suppress(OSError):  # it has ended, which `collect` finds
            worker.connection.send(chunk)

    def _receive(self, worker: Worker, found: list[ChunkResult | WorkerDeath]) -> None:
        try:
            reply = worker.connection.recv()
        except (OSError, EOFError):
            self._replace(worker, f"the process that decoded it {describe_end(worker.process)}", False, found)
            return
        worker.silent_s = 0.0
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, ChunkResult):
            worker.chunks.popleft()
            found.append(reply)
        else:  # a sign of life
            worker.is_ready, worker.num_starts = True, 0

    def _replace(self, worker: Worker, reason: str, timed_out: bool, found: list[ChunkResult | WorkerDeath]) -> None:
        """Start another worker for one that died or hung, and send its chunks again, the first one video by video.

        A video is at fault only if workers have died over it twice, the second time over nothing else. The new worker
        takes over all chunks: the others may be about to die of what this one died of, such as a lack of memory.
        """
        end_worker(worker, self._selector)  # before a chunk is sent again: it must not write any more
        self._workers.remove(worker)
        if worker.is_ready and worker.chunks:
            suspect = worker.chunks.popleft()
            if suspect.is_suspect:
                found.append(WorkerDeath(suspect, reason, timed_out))
            else:
                firsts = range(suspect.first, suspect.first + suspect.num_clips, self._crops)
                alone = [suspect._replace(first=first, num_clips=self._crops, is_suspect=True) for first in firsts]
                worker.chunks.extendleft(reversed(alone))
        elif worker.num_starts >= MAX_STARTS:
            raise InputError(
                f"a decode worker {describe_end(worker.process)} before it was ready, {MAX_STARTS} times: if memory is"
                " short, lower data.num_workers or data.prefetch"
            )
        self._start(worker.setup, worker.num_starts + 1, worker.chunks)

    def _start(self, setup: WorkerSetup, num_starts: int = 1, chunks: Iterable[Chunk] = ()) -> None:
        parent_end, worker_end = Pipe()
        files = worker_end.fileno(), self._memory_file
        call = f"from {worker_main.__module__} import worker_main; worker_main{files}"
        process = subprocess.Popen(
            [sys.executable, "-c", f"{IGNORE_SIGNALS}; {call}"],
            pass_fds=files, stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the process that this one works for
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        worker_end.close()
        worker = Worker(setup, process, parent_end, num_starts=num_starts)
        self._workers.append(worker)
        with suppress(OSError):  # it has ended, which `collect` finds
            parent_end.send(setup)
        for chunk in chunks:
            self._send(worker, chunk)
        self._selector.register(parent_end, selectors.EVENT_READ, worker)


def end_worker(worker: Worker, selector: selectors.BaseSelector) -> None:
    """Kill a worker, whatever it is doing, and wait for its end."""
    selector.unregister(worker.connection)
    worker.process.kill()
    worker.process.wait()
    worker.connection.close()


def describe_end(process: "subprocess.Popen[bytes]") -> str:
    """Wait for the end of a process, and say how it came."""
    code = process.wait()
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
