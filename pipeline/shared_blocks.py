"""Memory that two processes share, and messages between them whose tensors lie in it."""

import io
import mmap
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from common.errors import InputError

ADDRESSES = 2**36  # bytes, of which only those exist that have been written to


class Block(NamedTuple):
    start: int
    num_bytes: int

    @property
    def num_reserved(self) -> int:
        """Bytes that belong to it: a power of two, so that blocks of similar size can take its place."""
        return max(mmap.PAGESIZE, 1 << (self.num_bytes - 1).bit_length())


class SharedBlocks:
    """One process allocates blocks, and uses freed ones again; to the other they are sent, among anything else.

    The memory has no name: nothing is left of it when both have ended. Allocation is thread-safe.
    """

    def __init__(self, file: int, is_pinned: bool = False) -> None:
        """file: from memfd_create; is_pinned: whether blocks that are received are page-locked for a GPU."""
        os.ftruncate(file, ADDRESSES)
        self.file = file
        self._bytes = torch.from_numpy(np.frombuffer(mmap.mmap(file, ADDRESSES), np.uint8))
        self._lock = threading.Lock()
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)  # where blocks start, by bytes reserved
        self._is_pinned, self._pinned = is_pinned, set[int]()  # where blocks start

    def allocate(self, num_bytes: int) -> UInt8[Tensor, " num_bytes"]:
        with self._lock:
            block = Block(self._end, num_bytes)
            if free := self._free[block.num_reserved]:
                return self._view(block._replace(start=free.pop()))
            self._end += block.num_reserved
            return self._view(block)

    def free(self, blocks: Iterable[Block]) -> None:
        with self._lock:
            for block in blocks:
                self._free[block.num_reserved].append(block.start)

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
        if self._is_pinned and block.start not in self._pinned:
            code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), block.num_reserved, 0))
            if code:
                raise InputError(
                    f"CUDA cannot lock shared memory, in which clips come (cudaHostRegister: error {code}): free host"
                    " memory, or use another driver or virtual machine"
                )
            self._pinned.add(block.start)
        return tensor

    def close(self) -> None:
        """Give the memory back. To be called when nothing is copied from it any more."""
        for start in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr() + start)
        del self._bytes
        os.close(self.file)

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
