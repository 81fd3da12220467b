"""Memory that the loader shares with its decode workers: blocks of one size, each for a batch.

A block has a slot for every clip, and behind the slots the tables of kernels.DecodedClips. Its
life:

1. The loader gets a block from `acquire`, and sends its number to the workers with the chunks of a
   batch.
2. Each worker maps the block (`map_block`) and writes to the slots and the rows of its own chunks,
   and nowhere else. Nobody reads meanwhile.
3. Once all chunks are back, the loader owns the block. It uploads the clips or, on a CPU, gives
   them to the training step where they are: `Batch.clip` is the block.
4. The block is free as soon as no array in the loader's process refers to it or to a part of it,
   and `acquire` hands it out again. There is no `release` that could be called too early.

What not to do:

- Do not drop the array while a copy of it to a GPU is under way: the next batch would be written
  over what is being copied.
- Do not collect batches on a CPU: each of them keeps its block, and `acquire` makes another one.
  Copy the clips that are to be kept.
- Do not send a chunk to another worker before the one that had it is dead: both would write to the
  same slots, and the first one perhaps to a block that the next batch has got.

docs/architecture.md has a table of these phases.

This module does without PyTorch, as decode workers do: importing it takes each of them seconds and
hundreds of MiB. Only page-locking for a GPU, in the loader's process, calls for it.
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
from adamae.common.logging import format_bytes, log_note
from adamae.kernels.clip_tables import count_table_bytes, view_tables
from adamae.pipeline.planning.plan import ClipPlan
from adamae.pipeline.shards.dataset import ShardDataset

# Planes that take more than this many times the bytes of their clips are scaled by the workers. At
# the limit, six blocks of 64 clips of 16 frames of 224x224 take 3.7 GB of page-locked memory.
MAX_GROWTH = 4
# The tables hold numbers of up to 8 bytes, which have to lie at multiples of their size.
TABLE_ALIGNMENT = 16


class BlockLayout(NamedTuple):
    """Where the clips of a batch lie in its block, in bytes.

    Clip i has the slot from i * slot_bytes on. RGB lies at the beginning of the slot; decoded
    planes are packed from the first slot of a chunk on, and may take more than their own clips'
    slots.
    """

    # At most.
    num_clips: int
    # T, H, W, C.
    clip_shape: tuple[int, int, int, int]
    slot_bytes: int

    @classmethod
    def choose(cls, dataset: ShardDataset, plan: ClipPlan, upload_planes: bool) -> "BlockLayout":
        """Return the layout for clips, or for the planes of which a device makes clips.

        With planes, a slot has room for a square window of the stored videos' shorter side: 16
        frames of 256x256 in 4:2:0 take 16 * 256 * 256 * 1.5 bytes = 1.5 MiB. A clip of 224x224 as
        RGB takes 2.3 MiB, so its slot is that large; one of 112x112 takes 0.6 MiB, and its slot 1.5
        MiB.
        """
        shape = plan.num_frames, *plan.frame_size, dataset.channels
        clip_bytes = math.prod(shape)
        if not upload_planes:
            return cls(plan.batch_size, shape, clip_bytes)
        # Smaller slots would make the workers scale large videos: on a CPU core, that is 110
        # clips/s instead of 173.
        sizes = dataset.info.codecs.values()
        side = max(min(size.max_width, size.max_height) for size in sizes)
        window_bytes = plan.num_frames * side**2 * 3 // 2
        slot_bytes = min(max(clip_bytes, window_bytes), MAX_GROWTH * clip_bytes)
        return cls(plan.batch_size, shape, slot_bytes)

    @property
    def clip_bytes(self) -> int:
        """Return the size of a clip as RGB."""
        return math.prod(self.clip_shape)

    @property
    def tables_start(self) -> int:
        """Return the byte of the block at which the tables begin."""
        return round_up(self.num_clips * self.slot_bytes, TABLE_ALIGNMENT)

    @property
    def block_bytes(self) -> int:
        """Return the size of a block in whole pages, as blocks are mapped one by one."""
        size = self.tables_start + count_table_bytes(self.num_clips, self.clip_shape[0])
        return round_up(size, mmap.PAGESIZE)

    def slice_tables(self, num_clips: int) -> slice:
        """Return where the tables of a batch of `num_clips` lie."""
        num_bytes = count_table_bytes(num_clips, self.clip_shape[0])
        return slice(self.tables_start, self.tables_start + num_bytes)

    def view_tables(self, block: UInt8[np.ndarray, " bytes"], num_clips: int) -> list[np.ndarray]:
        """Return the tables of a batch of `num_clips`, in the order of DecodedClips."""
        return view_tables(block[self.slice_tables(num_clips)], num_clips, self.clip_shape[0])


class ClipMemory:
    """A file in memory that is cut into blocks; see the module's docstring for who owns a block.

    The file has no name, so the kernel frees it when the last process that has it open has ended,
    also after kill -9.
    """

    def __init__(self, layout: BlockLayout, file: int | None = None) -> None:
        """Create the file, or use the loader's, which a worker has inherited as number `file`."""
        self.layout = layout
        self._file = os.memfd_create("clips") if file is None else file
        self._blocks: dict[int, mmap.mmap] = {}
        self._free: deque[int] = deque()
        # The addresses of page-locked blocks.
        self._pinned: dict[int, int] = {}
        self._can_pin = True

    def fileno(self) -> int:
        return self._file

    @property
    def block_bytes(self) -> int:
        """Return the size of a block, which is the distance between two of them in the file."""
        return self.layout.block_bytes

    def acquire(self, pin: bool = False) -> tuple[int, UInt8[np.ndarray, " bytes"]]:
        """Return the number of a free block, and its bytes.

        The block is the caller's until nothing refers to the array or to a part of it any more.
        With `pin` it is page-locked, so that copying it to a GPU does not block the host. If CUDA
        refuses that once, a note says so, and blocks stay pageable.

        Raise InputError if there is no more memory.
        """
        number = self._free.popleft() if self._free else len(self._blocks)
        block = self.map_block(number)
        if pin and self._can_pin and number not in self._pinned:
            # Once for each block: it stays locked when it is used again.
            self._pin(number, block)
        weakref.finalize(block, self._free.append, number)
        return number, block

    def _pin(self, number: int, block: UInt8[np.ndarray, " bytes"]) -> None:
        import torch

        from adamae.common.devices import load_cuda_runtime

        status = int(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, len(block), 0))
        if status == 0:
            self._pinned[number] = block.ctypes.data
            return
        self._can_pin = False
        # Otherwise the next kernel's launch would report this error as its own.
        load_cuda_runtime().cudaGetLastError()
        log_note(
            f"CUDA cannot lock the loader's shared memory (cudaHostRegister: error {status}):"
            " uploads block the training process; free host memory, or use another driver or"
            " virtual machine"
        )

    def map_block(self, number: int) -> UInt8[np.ndarray, " bytes"]:
        """Return the bytes of a block, and make the file longer if it does not reach so far.

        Raise InputError if there is no more memory.
        """
        size = self.layout.block_bytes
        if number not in self._blocks:
            try:
                if os.fstat(self._file).st_size < (number + 1) * size:
                    os.ftruncate(self._file, (number + 1) * size)
                self._blocks[number] = mmap.mmap(self._file, size, offset=number * size)
            except OSError as error:
                raise InputError(
                    f"no shared memory for another batch of {format_bytes(size)}"
                    f" ({error.strerror}): lower the batch size or data.prefetch, or raise the"
                    " limits of this shell or job (ulimit -v, ulimit -f)"
                ) from error
        return np.frombuffer(self._blocks[number], np.uint8)

    def close(self) -> None:
        """Release what nobody uses; arrays that are still referred to stay as they are.

        No copy to a GPU may be under way.
        """
        if self._pinned:
            import torch

            for address in self._pinned.values():
                torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()
        self._blocks.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
