"""Clips on their way from the CPU to the device, which crops and scales those that have been decoded to planes."""

import math
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from kernels.decoded_clips import DecodedClips, color_matrix, count_table_bytes, view_tables
from pipeline.decoding.planes import PlanarFrames
from pipeline.planning.plan import PlanRow

CHUNK_BYTES = 2**25  # of page-locked memory, which PyTorch rounds up to powers of two: frames of some 20 clips
ALIGNMENT = 16  # of what is allocated in a chunk
# Of the first chroma sample: pixels right of and below the first one of luma.
SITING = {"left": (0.0, 0.5), "center": (0.5, 0.5)}


@lru_cache
def make_color_matrix(matrix: str, full_range: bool, bits: int) -> np.ndarray:
    return color_matrix(matrix, full_range, bits).numpy()


class HostClips:
    """The clips of a batch in host memory: frames as they were decoded, or images that need nothing more.

    Memory is allocated on first use, since DALI may decode the whole batch. Thread-safe up to the upload. As a message
    of SharedBlocks, clips can be sent to another process, to be uploaded there.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        stream: torch.cuda.Stream | None,
        takes_frames: bool,
        allocate: Callable[[int], UInt8[np.ndarray, " bytes"]] | None = None,
    ) -> None:
        """shape: [B, T, H, W, C].

        stream: on which clips are copied to its GPU, beside the training step; None: they stay on the CPU.
        takes_frames: whether clips may come as decoded frames; otherwise all are images.
        allocate: gives so many bytes of host memory; for a GPU, page-locked, and nobody else's until is_uploaded.
        """
        self.takes_frames, self._shape, self.stream = takes_frames, shape, stream
        self._allocate = allocate or partial(np.empty, dtype=np.uint8)
        self._images: np.ndarray | None = None  # bytes
        self._chunks: list[np.ndarray] = []  # of frames and tables
        self._last_begins = self._used = 0  # address of the last chunk, and bytes used of it
        self._tables_begin: int | None = None  # their address
        self._tables: list[np.ndarray] = []  # see DecodedClips
        self._has_images, self._has_frames = (np.zeros(shape[0], bool) for _ in range(2))  # clip by clip
        self._lock = threading.RLock()
        self._is_lent = False  # whether the memory is another process's
        self.copy: Tensor | None = None  # on the device, perhaps still in flight
        self._arrived: torch.cuda.Event | None = None

    def __getstate__(self) -> dict[str, object]:
        left_out = ("_lock", "_tables", "_allocate")
        return {name: value for name, value in vars(self).items() if name not in left_out} | {"_is_lent": True}

    @property
    def is_allocated(self) -> bool:
        return self._images is not None or self._tables_begin is not None

    @property
    def is_uploaded(self) -> bool:
        """Whether the host memory is no longer needed."""
        return self.copy is not None and (self._arrived is None or self._arrived.query())

    def images(self, first: int, count: int) -> UInt8[np.ndarray, "count T H W C"]:
        """Return where images of `count` clips from number `first` on are to be written."""
        clips = slice(first, first + count)
        with self._lock:
            if self._images is None:
                self._images = self._allocate(math.prod(self._shape))
            self._has_images[clips] = True
            return self._images.reshape(self._shape)[clips]

    def allocate(self, num_bytes: int) -> tuple[int, UInt8[np.ndarray, " num_bytes"]]:
        """Return memory for frames, behind the address that it will have among all frames of the batch."""
        with self._lock:
            start = -(-self._used // ALIGNMENT) * ALIGNMENT
            if not self._chunks or start + num_bytes > len(self._chunks[-1]):
                self._last_begins = sum(map(len, self._chunks))
                self._chunks.append(self._allocate(max(CHUNK_BYTES, -(-num_bytes // ALIGNMENT) * ALIGNMENT)))
                start = 0
            self._used = start + num_bytes
            return self._last_begins + start, self._chunks[-1][start : self._used]

    def add_frames(self, first: int, rows: Sequence[PlanRow], frames: PlanarFrames) -> None:
        """Have the clips of `rows`, from number `first` on, made of frames in memory that was allocated here."""
        window, layout = frames.window, frames.layout
        with self._lock:
            if self._tables_begin is None:
                self._make_tables()
            offsets, sizes, boxes, flips, matrices, siting = self._tables
            clips = slice(first, first + len(rows))
            offsets[clips] = frames.offsets
            sizes[clips] = window.height, window.width, layout.sample_bytes
            boxes[clips] = [(row.crop.x - window.x, row.crop.y - window.y, *row.crop[2:]) for row in rows]
            flips[clips] = [row.flip for row in rows]
            matrices[clips] = make_color_matrix(layout.matrix, layout.full_range, layout.bits)
            siting[clips] = SITING[layout.siting]
            self._has_frames[clips] = True

    def upload(self) -> None:
        """Queue a copy; later writes may or may not be in it."""
        images = None if self._images is None else torch.from_numpy(self._images).view(self._shape)
        if self.stream is None and self._tables_begin is None:
            self.copy = images.clone() if images is not None and self._is_lent else images
            return
        with torch.cuda.stream(self.stream):
            if self._tables_begin is None:
                self.copy = torch.empty(self._shape, dtype=torch.uint8, device=self._device)
            else:
                self.copy = self._make_clips(self._tables_begin)
            if images is not None:
                self._copy_images(images, self.copy)
            if self.stream is not None:
                self._arrived = self.stream.record_event()

    def on_device(self) -> UInt8[Tensor, "B T H W C"]:
        """Return the clips for use on the current stream, which waits for them; the host does not."""
        if self.copy is None:
            self.upload()
        assert self.copy is not None
        if self._arrived is not None:
            stream = torch.cuda.current_stream(self.copy.device)
            stream.wait_event(self._arrived)
            self.copy.record_stream(stream)  # memory of the other stream: not to be reused while this one reads
        return self.copy

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.stream is None else self.stream.device

    def _make_tables(self) -> None:
        """Make tables by which every clip shows the first pixel of the memory, until it is told another."""
        self._tables_begin, block = self.allocate(count_table_bytes(*self._shape[:2]))
        block[:] = 0
        self._tables = [table.numpy() for table in view_tables(torch.from_numpy(block), *self._shape[:2])]
        _, sizes, boxes, *_ = self._tables
        sizes[:], boxes[:, 2:] = 1, 1

    def _make_clips(self, tables: int) -> UInt8[Tensor, "B T H W C"]:
        """Upload the frames and the tables, which lie at this address, and make clips of them."""
        memory = torch.empty(self._last_begins + self._used, dtype=torch.uint8, device=self._device)
        copies = memory.split([*map(len, self._chunks[:-1]), self._used])
        for chunk, copy in zip(self._chunks, copies, strict=True):
            copy.copy_(torch.from_numpy(chunk[: len(copy)]), non_blocking=True)
        from kernels.crop_resize import crop_resize  # takes 2 s, for parts of PyTorch's compiler; not all need it

        batch, frames, height, width, _ = self._shape
        return crop_resize(DecodedClips(memory, *view_tables(memory[tables:], batch, frames)), height, width)

    def _copy_images(self, images: UInt8[Tensor, "B T H W C"], clips: UInt8[Tensor, "B T H W C"]) -> None:
        """Upload those clips that are images; neighbors together, since every copy costs the host some microseconds."""
        (places,) = np.nonzero(self._has_images & ~self._has_frames)
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            if len(run):
                found = slice(run[0], run[-1] + 1)
                clips[found].copy_(images[found], non_blocking=True)
