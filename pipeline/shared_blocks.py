"""Memory that processes share: one allocates blocks, others write to them or copy them to a GPU, and messages between
two say where in it their arrays lie.

This module does without PyTorch, as do processes that only decode.
"""

import io
import mmap
import os
import pickle
import threading
import weakref
from collections import defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from common.errors import InputError

ADDRESSES = 2**40  # bytes, of which only those exist that have been written to


class Block(NamedTuple):
    start: int
    num_bytes: int

    @property
    def num_reserved(self) -> int:
        """Bytes that belong to it: a power of two, so that blocks of similar size can take its place."""
        return max(mmap.PAGESIZE, 1 << (self.num_bytes - 1).bit_length())


class SharedBlocks:
    """The memory has no name: nothing is left of it when all processes that know its file have ended. Thread-safe."""

    def __init__(self, file: int | None = None, is_pinned: bool = False) -> None:
        """file: another process's, open here; is_pinned: whether arrays in messages are page-locked for a GPU."""
        self._file = os.fdopen(os.memfd_create("clips") if file is None else file, "r+b", buffering=0)
        self._file.truncate(ADDRESSES)
        self._map = mmap.mmap(self.fileno(), ADDRESSES)
        self._begin = self.view(Block(0, 1)).ctypes.data
        self._lock = threading.Lock()
        self._end = 0
        self._free: dict[int, deque[int]] = defaultdict(deque)  # where blocks start, by bytes reserved
        self._is_pinned, self._pinned = is_pinned, set[int]()  # addresses

    def fileno(self) -> int:
        return self._file.fileno()

    def allocate(self, num_bytes: int) -> UInt8[np.ndarray, " num_bytes"]:
        """Return memory that nobody else is given as long as this process has the array, or a part of it."""
        size = Block(0, num_bytes).num_reserved
        with self._lock:
            if free := self._free[size]:
                start = free.pop()
            else:
                start, self._end = self._end, self._end + size
        array = self.view(Block(start, num_bytes))
        weakref.finalize(array, self._free[size].append, start)  # in any thread, also in one that has the lock
        return array

    def view(self, block: Block) -> UInt8[np.ndarray, " bytes"]:
        return np.frombuffer(self._map, np.uint8, block.num_bytes, block.start)

    def find(self, array: np.ndarray) -> Block | None:
        """Return the block that an array is; None: it is no part of this memory."""
        start = array.ctypes.data - self._begin
        return Block(start, array.nbytes) if 0 <= start < ADDRESSES else None

    def pin(self, array: UInt8[np.ndarray, " bytes"]) -> UInt8[np.ndarray, " bytes"]:
        """Page-lock a block, if it is not yet, so that copying it to a GPU does not block the host."""
        address = array.ctypes.data
        if address not in self._pinned:
            import torch

            code = int(torch.cuda.cudart().cudaHostRegister(address, Block(0, array.nbytes).num_reserved, 0))
            if code:
                raise InputError(
                    f"CUDA cannot lock shared memory, in which clips come (cudaHostRegister: error {code}): free host"
                    " memory, or use another driver or virtual machine"
                )
            self._pinned.add(address)
        return array

    def dumps(self, value: object) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._find_part  # type: ignore[method-assign]
        pickler.dump(value)
        return buffer.getvalue()

    def loads(self, data: bytes) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._receive  # type: ignore[method-assign]
        return unpickler.load()

    def close(self) -> None:
        """To be called when nothing is copied from it any more. Arrays stay what they are, and keep the memory."""
        if self._pinned:
            import torch

            for address in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()
        if not self._file.closed:
            self._file.close()
            del self._map  # which has the file open as well

    def _find_part(self, part: object) -> Block | None:
        return self.find(part) if isinstance(part, np.ndarray) else None

    def _receive(self, block: Block) -> UInt8[np.ndarray, " bytes"]:
        array = self.view(block)
        return self.pin(array) if self._is_pinned else array
