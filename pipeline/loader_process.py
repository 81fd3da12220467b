"""HostLoader in a process of its own: whenever its threads or the plan hold Python's lock, a training step would wait.

Clips come in memory that both processes know: nothing of them is sent or copied.
"""

import io
import mmap
import os
import pickle
import subprocess
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.policy import DecoderPolicy
from pipeline.decoding.process import describe_end, start_process
from pipeline.decoding.upload import HostClips
from pipeline.host_loader import HostBatch, HostLoader
from pipeline.planning.plan import ClipPlan
from pipeline.shards.dataset import ShardDataset

AHEAD = 2  # batches that are asked for: one is uploaded during a training step, the next is waiting
ADDRESSES = 2**36  # bytes, of which only those exist that have been written to


class Block(NamedTuple):
    start: int
    num_bytes: int


class SharedBlocks:
    """Memory without a name, known to two processes: one allocates blocks and uses freed ones again; to the other they
    are sent, among anything else. Thread-safe where blocks are allocated."""

    def __init__(self, file: int, is_pinned: bool = False) -> None:
        """file: from memfd_create; is_pinned: whether blocks that are received are page-locked for a GPU."""
        os.ftruncate(file, ADDRESSES)
        self._bytes = torch.from_numpy(np.frombuffer(mmap.mmap(file, ADDRESSES), np.uint8))
        self._lock = threading.Lock()
        self._end = 0
        self._free: dict[int, list[Block]] = defaultdict(list)  # by size
        self._is_pinned, self._pinned = is_pinned, set[Block]()

    def allocate(self, num_bytes: int) -> UInt8[Tensor, " num_bytes"]:
        with self._lock:
            if free := self._free[num_bytes]:
                return self._view(free.pop())
            block = Block(self._end, num_bytes)
            self._end = -(-(block.start + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            return self._view(block)

    def free(self, blocks: Iterable[Block]) -> None:
        with self._lock:
            for block in blocks:
                self._free[block.num_bytes].append(block)

    def dumps(self, value: object) -> bytes:
        """Pickle something whose tensors are blocks."""
        buffer = io.BytesIO()
        _Pickler(buffer, self._bytes.data_ptr()).dump(value)
        return buffer.getvalue()

    def loads(self, data: bytes) -> tuple[Any, list[Block]]:
        """Return what was pickled, and the blocks in it."""
        unpickler = _Unpickler(data, self)
        return unpickler.load(), unpickler.blocks

    def receive(self, block: Block) -> UInt8[Tensor, " bytes"]:
        tensor = self._view(block)
        if self._is_pinned and block not in self._pinned:
            check = torch.cuda.check_error
            check(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), block.num_bytes, 0))
            self._pinned.add(block)
        return tensor

    def close(self) -> None:
        """Unlock the pages. To be called when nothing is copied from them any more."""
        for block in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._view(block).data_ptr())
        self._pinned.clear()

    def _view(self, block: Block) -> UInt8[Tensor, " bytes"]:
        return self._bytes[block.start : block.start + block.num_bytes]


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, begin: int) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._begin = begin

    def persistent_id(self, value: object) -> Block | None:
        return Block(value.data_ptr() - self._begin, len(value)) if isinstance(value, Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, memory: SharedBlocks) -> None:
        super().__init__(io.BytesIO(data))
        self._memory, self.blocks = memory, list[Block]()

    def persistent_load(self, block: Block) -> Tensor:
        self.blocks.append(block)
        return self._memory.receive(block)


class LoaderProcess:
    """HostLoader's counterpart: starts the process with the first batch. `pending` are the batches that are ready."""

    takes_frames = False  # see HostClips

    def __init__(
        self,
        dataset: ShardDataset,
        plan: ClipPlan,
        config: DataConfig,
        quarantine: Path | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._made_of, self._stream = (dataset, plan, config, quarantine), stream
        self._file = os.memfd_create("clips")
        self._blocks = SharedBlocks(self._file, is_pinned=stream is not None)
        self._process: subprocess.Popen[bytes] | None = None
        self._run = self._next = 0  # which `start` it is, and the batch to ask for next
        self._has_ended = False  # the plan
        self._held: list[tuple[HostClips, list[Block]]] = []
        self.pending: deque[HostBatch] = deque()
        self.counts: Counter[str] = Counter()  # sums since the start

    def start(self, first: int) -> None:
        """Begin with the plan's batch number `first`."""
        if self._process is None:
            self._process, self._connection = start_process(serve, self._file)
            self._connection.send((*self._made_of, self.takes_frames))
        for batch in self.pending:
            batch.host.is_dropped = True
        self.pending.clear()
        self._run, self._next, self._has_ended = self._run + 1, first, False
        for _ in range(AHEAD):
            self._ask()

    def take(self) -> HostBatch | None:
        """Wait for the next batch; None: the plan has ended. Raise what HostLoader raises, and InputError if the
        process has ended."""
        while not self.pending and not self._has_ended:
            self._receive()
        return self.pending.popleft() if self.pending else None

    def top_up(self) -> None:
        """Ask for one more batch, and look which ones have come."""
        self._ask()
        while self._connection.poll():
            self._receive()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._process = None
        if self._stream is not None:
            self._stream.synchronize()
        self._blocks.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _ask(self) -> None:
        """Ask for a batch, and tell which memory is free."""
        free = [block for host, blocks in self._held if host.is_read for block in blocks]
        self._held = [(host, blocks) for host, blocks in self._held if not host.is_read]
        with self._explain_end():
            self._connection.send((self._run, self._next, free))
        self._next += 1

    def _receive(self) -> None:
        with self._explain_end():
            reply, blocks = self._blocks.loads(self._connection.recv_bytes())
        if isinstance(reply, Exception):
            raise reply
        run, batch, self.counts = reply
        if batch is not None:
            batch.host.stream, batch.host.is_dropped = self._stream, run != self._run
            self._held.append((batch.host, blocks))
        if run == self._run and batch is not None:
            self.pending.append(batch)
        elif run == self._run:
            self._has_ended = True

    @contextmanager
    def _explain_end(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            assert self._process is not None
            raise InputError(
                f"the process that loads clips {describe_end(self._process)}; if memory was short, lower data.prefetch"
                " or data.num_threads"
            ) from error


def serve(socket: int, file: int) -> None:
    """Load what is asked for, in such a process, until nobody is left who could ask."""
    connection, blocks = Connection(socket), SharedBlocks(file)
    with suppress(OSError, EOFError):
        dataset, plan, config, quarantine, takes_frames = connection.recv()
        without_dali = replace(config, decoder="pyav", dali_share=None)
        policy = DecoderPolicy(dataset, torch.device("cpu"), without_dali)
        with closing(HostLoader(dataset, plan, policy, config, quarantine, allocate=blocks.allocate)) as loader:
            loader.takes_frames = takes_frames
            now = run, number = -1, -1
            while True:
                *wanted, free = connection.recv()
                blocks.free(free)
                if tuple(wanted) != now:
                    run, number = wanted
                    loader.start(number)
                connection.send_bytes(blocks.dumps(load(loader, run)))
                now = run, number = run, number + 1


def load(loader: HostLoader, run: int) -> tuple[int, HostBatch | None, Counter[str]] | Exception:
    """Return the next batch, or why there is none."""
    try:
        batch = loader.take()
        loader.top_up()
    except Exception as error:  # whoever asks for it raises it
        return error
    return run, batch and replace(batch, jobs=[]), loader.counts
