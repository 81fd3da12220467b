"""Memory that the loader shares with its decode workers: blocks of one size, of which each holds the clips of a batch.

A block has a slot for every clip, and behind these the tables of kernels.DecodedClips. This module does without
PyTorch, as decode workers do.
"""

import math
import mmap
import os
import weakref
from collections import deque
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from adamae.common.arithmetic import round_up
from adamae.common.errors import InputError
from adamae.common.logging import format_bytes
from adamae.kernels.clip_tables import count_table_bytes, view_tables
from adamae.pipeline.planning.plan import ClipPlan
from adamae.pipeline.shards.dataset import ShardDataset

MAX_GROWTH = (
    4  # planes of so many times the bytes of their clips are scaled before they are uploaded
)
ALIGNMENT = 16  # of the tables


class BlockLayout(NamedTuple):
    """Where the clips of a batch lie in its block, in bytes. Planes may take more than their own clips' slots."""

    num_clips: int  # at most
    clip_shape: tuple[int, int, int, int]  # T H W C
    slot_bytes: int

    @classmethod
    def choose(cls, dataset: ShardDataset, plan: ClipPlan, upload_planes: bool) -> "BlockLayout":
        """Return the layout for clips, or for the planes of which a device makes clips."""
        shape = plan.num_frames, *plan.frame_size, dataset.channels
        slot_bytes = clip_bytes = math.prod(shape)
        if upload_planes:  # room for square windows of the stored size: smaller slots make workers scale large videos
            side = max(
                min(sizes.max_width, sizes.max_height) for sizes in dataset.info.codecs.values()
            )
            slot_bytes = min(
                max(clip_bytes, plan.num_frames * side**2 * 3 // 2), MAX_GROWTH * clip_bytes
            )
        return cls(plan.batch_size, shape, slot_bytes)

    @property
    def clip_bytes(self) -> int:
        return math.prod(self.clip_shape)

    @property
    def tables_start(self) -> int:
        return round_up(self.num_clips * self.slot_bytes, ALIGNMENT)

    @property
    def block_bytes(self) -> int:
        """Whole pages, as blocks are mapped one by one."""
        size = self.tables_start + count_table_bytes(self.num_clips, self.clip_shape[0])
        return round_up(size, mmap.PAGESIZE)

    def slice_tables(self, num_clips: int) -> slice:
        """Return where the tables of a batch of so many clips lie."""
        return slice(
            self.tables_start, self.tables_start + count_table_bytes(num_clips, self.clip_shape[0])
        )

    def view_tables(self, block: UInt8[np.ndarray, " bytes"], num_clips: int) -> list[np.ndarray]:
        return view_tables(block[self.slice_tables(num_clips)], num_clips, self.clip_shape[0])


class ClipMemory:
    """A file in memory that has no name: nothing is left of it when all processes that have it open have ended."""

    def __init__(self, layout: BlockLayout, file: int | None = None) -> None:
        """file: another process's, open here."""
        self.layout, self._file = layout, os.memfd_create("clips") if file is None else file
        self._blocks: dict[int, mmap.mmap] = {}
        self._free: deque[int] = deque()
        self._pinned: dict[int, int] = {}  # address of a block

    def fileno(self) -> int:
        return self._file

    @property
    def block_bytes(self) -> int:
        """The size of a block, and the distance between two of them in the file."""
        return self.layout.block_bytes

    def acquire(self, pin: bool = False) -> tuple[int, UInt8[np.ndarray, " bytes"]]:
        """Return a block and its number; it is nobody else's until nothing refers to the array, or a part of it.

        pin: page-lock it, so that copying it to a GPU does not block the host. Raise InputError if CUDA refuses, or if
        there is no more memory.
        """
        number = self._free.popleft() if self._free else len(self._blocks)
        block = self.map_block(number)
        if pin and number not in self._pinned:
            import torch

            if code := int(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, len(block), 0)):
                raise InputError(
                    f"CUDA cannot lock shared memory, in which clips come (cudaHostRegister: error {code}): free host"
                    " memory, or use another driver or virtual machine"
                )
            self._pinned[number] = block.ctypes.data
        weakref.finalize(block, self._free.append, number)
        return number, block

    def map_block(self, number: int) -> UInt8[np.ndarray, " bytes"]:
        size = self.layout.block_bytes
        if number not in self._blocks:
            try:
                if os.fstat(self._file).st_size < (number + 1) * size:
                    os.ftruncate(self._file, (number + 1) * size)
                self._blocks[number] = mmap.mmap(self._file, size, offset=number * size)
            except OSError as error:
                raise InputError(
                    f"no shared memory for another batch of {format_bytes(size)} ({error.strerror}): lower the batch"
                    " size or data.prefetch, or raise the limits of this shell or job (ulimit -v, ulimit -f)"
                ) from error
        return np.frombuffer(self._blocks[number], np.uint8)

    def close(self) -> None:
        """Release what nobody uses. Nothing may be copied to a GPU any more; arrays stay as they are."""
        if self._pinned:
            import torch

            for address in self._pinned.values():
                torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()
        self._blocks.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
