"""What a decode worker does: it plans, reads and decodes chunks of batches, and replaces bad videos by the plan's rule.

Workers are processes: PyAV takes and releases the GIL about a hundred times a clip, for which the threads of one
process would wait, as would the training step; and a crash or hang costs one video. A worker imports PyAV and NumPy,
but not PyTorch, and opens the dataset and the plan by itself. Of the batches it is told nothing but numbers: a chunk is
a pure function of its fields, so it can be sent to any worker, again and again.
"""

import ctypes
import os
import signal
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from common.errors import InputError
from kernels.clip_tables import color_matrix
from pipeline.clip_memory import BlockLayout, ClipMemory
from pipeline.config import DataConfig
from pipeline.decoding.dali_policy import DaliPolicy
from pipeline.decoding.joining import EncodedVideo, find_groups
from pipeline.decoding.planes import PlanarFrames
from pipeline.decoding.sources import find_source
from pipeline.planning.augmentations import AugmentOp, EraseBox
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.reading.reader import LookAhead, Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError

MAX_ATTEMPTS = 100  # replacements in a row for one clip
CHUNKS_AHEAD = 4  # whose videos are read meanwhile, from object storage
READ_THREADS = 8
SIGNS_OF_LIFE = 4  # in the time after which a worker counts as hung, while a download is waited for
# Of the first chroma sample: pixels right of and below the first one of luma.
SITING = {"left": (0.0, 0.5), "center": (0.5, 0.5)}

make_color_matrix = cache(color_matrix)


class Chunk(NamedTuple):
    """Neighboring clips of a batch, of one or several videos, that one worker makes."""

    batch: int
    first: int  # clip
    num_clips: int
    block: int  # of memory, where the batch goes
    attempt: int = 0  # replacement to begin with: so many videos before it are known to be bad
    use_dali: bool = True  # whether videos that suit DALI are left to it
    is_suspect: bool = False  # whether a worker has died over it


class LoadedClip(NamedTuple):
    """What the loader's process needs to know of a clip, which saves it from looking into the tables."""

    position: int
    key: str
    labels: tuple[int, ...]
    fields: list[Any]  # values of data.fields
    augment_ops: tuple[AugmentOp, ...]
    erase_box: EraseBox | None
    image: int | None  # byte of the block at which its RGB begins; None: it is in the tables, or DALI's


class Fault(NamedTuple):
    """A video that could not be decoded, and has been replaced."""

    sample: int
    reason: str
    num_clips: int


class ChunkResult(NamedTuple):
    chunk: Chunk
    clips: list[LoadedClip]
    encoded: dict[int, EncodedVideo]  # by the first of its clips
    used_bytes: int  # of the chunk's slots, from the first on
    faults: list[Fault]
    counts: Counter[str]  # see loader.COUNTERS


class WorkerSetup(NamedTuple):
    dataset: ShardDataset
    plan: ClipPlan
    config: DataConfig
    policy: DaliPolicy
    layout: BlockLayout
    upload_planes: bool  # whether planes will do, of which the device makes clips
    ends_with_thread: bool  # whether a worker is of no use once the thread that has started it has ended
    number: int = 0  # of this worker
    num_workers: int = 1


def worker_main(socket: int, file: int) -> None:
    """Make chunks until nobody is left who could send some; `file`: the memory where clips go."""
    connection = Connection(socket)
    with suppress(OSError, EOFError):
        try:
            setup: WorkerSetup = connection.recv()
            if setup.ends_with_thread:  # the end of the pipe tells as well, but not a worker that was stopped
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            worker = DecodeWorker(setup, ClipMemory(setup.layout, file), connection)
        except Exception as error:  # the loader raises it
            connection.send(error)
            return
        connection.send(None)
        chunks: deque[Chunk] = deque()
        while True:
            while not chunks or (len(chunks) < CHUNKS_AHEAD and connection.poll()):
                chunks.append(connection.recv())
                worker.read_ahead(chunks[-1])
            connection.send(worker.make_chunk(chunks.popleft()))
    os._exit(0)  # threads may be in a request


class DecodeWorker:
    def __init__(self, setup: WorkerSetup, memory: ClipMemory, connection: Connection) -> None:
        self._setup, self._memory, self._connection = setup, memory, connection
        self._dataset, self._plan = setup.dataset, setup.plan
        self._reader = Reader(self._dataset)
        self._earlier: Counter[str] = Counter()  # counts of the cache that have been sent
        self._look_ahead, self._threads = None, None
        if self._dataset.is_remote:
            self._look_ahead = LookAhead(self._reader, self._dataset, self._plan, setup.number, setup.num_workers)
            self._threads = ThreadPoolExecutor(READ_THREADS)
        self._reads: dict[tuple[int, tuple[int, ...]], Future[VideoSlice]] = {}

    def read_ahead(self, chunk: Chunk) -> None:
        """Begin to read the videos of a chunk, and the shards of later batches, if they are in object storage."""
        if self._look_ahead is None or self._threads is None:
            return
        self._look_ahead.advance(chunk.batch)
        positions = self._plan.positions(chunk.batch)[chunk.first : chunk.first + chunk.num_clips]
        for position in positions[:: self._plan.crops_per_decode]:
            row = self._plan.row(position)
            if (row.sample, row.frames) not in self._reads:
                read = self._threads.submit(self._reader.clip, row.sample, row.frames)
                self._reads[row.sample, row.frames] = read

    def make_chunk(self, chunk: Chunk) -> ChunkResult | Exception:
        """Write the clips of a chunk to its slots; return the error where a shard cannot be read, or no video can take
        a bad one's place. Any other error ends this process, as a crash of FFmpeg does."""
        try:
            return self._make_chunk(chunk)
        except (InputError, OSError) as error:
            return error

    def _make_chunk(self, chunk: Chunk) -> ChunkResult:
        making = ChunkInTheMaking(self._setup, self._memory.map_block(chunk.block), chunk)
        crops = self._plan.crops_per_decode
        for first in range(chunk.first, chunk.first + chunk.num_clips, crops):
            positions = making.positions[first : first + crops]
            self._make_clips(making, first, [self._plan.row(position) for position in positions])
        cached = self._dataset.cache.counts
        making.counts.update(cached - self._earlier)
        self._earlier = cached
        return making.finish()

    def _make_clips(self, making: "ChunkInTheMaking", first: int, planned: list[PlanRow]) -> None:
        """Make the clips of one video, or of the first that can be decoded of those that replace it."""
        rows, attempt = planned, making.chunk.attempt
        if attempt:
            rows = self._replace(planned, attempt, f"{self._dataset.where(planned[0].sample)} cannot be decoded")
        while True:
            try:
                started = time.perf_counter()
                video = self._read(rows[0])
                making.count(read_seconds=time.perf_counter() - started)
                making.add_video(first, rows, video)
                return
            except VideoError as error:
                making.faults.append(Fault(rows[0].sample, str(error), len(rows)))
                attempt += 1
                reason = f"{self._dataset.where(rows[0].sample)} cannot be decoded: {error}"
                rows = self._replace(planned, attempt, reason)

    def _replace(self, planned: list[PlanRow], attempt: int, reason: str) -> list[PlanRow]:
        """Return what takes the place of a video's rows after `attempt` bad ones; raise InputError if nothing does."""
        rows = [row for old in planned if (row := self._plan.replacement(old, attempt)) is not None]
        if len(rows) < len(planned) or attempt > MAX_ATTEMPTS:
            raise InputError(reason)
        return rows

    def _read(self, row: PlanRow) -> VideoSlice:
        wanted = row.sample, row.frames
        if self._threads is None:
            return self._reader.clip(*wanted)
        read = self._reads.pop(wanted, None) or self._threads.submit(self._reader.clip, *wanted)
        while not wait([read], self._setup.config.decode_timeout_s / SIGNS_OF_LIFE).done:
            self._connection.send(None)
        return read.result()


class ChunkInTheMaking:
    """A chunk whose slots are filled one video behind the other; what remains has room for all clips as RGB."""

    def __init__(self, setup: WorkerSetup, block: UInt8[np.ndarray, " bytes"], chunk: Chunk) -> None:
        self.chunk, self._setup, self._layout, self._block = chunk, setup, setup.layout, block
        self.positions = setup.plan.positions(chunk.batch)
        self.clips: list[LoadedClip] = []
        self.encoded: dict[int, EncodedVideo] = {}
        self.faults: list[Fault] = []
        self.counts: Counter[str] = Counter()
        self._start = chunk.first * self._layout.slot_bytes
        self.used = 0
        self._tables = self._layout.view_tables(block, len(self.positions)) if setup.upload_planes else []

    def add_video(self, first: int, rows: list[PlanRow], video: VideoSlice) -> None:
        """Add the clips that are cut from a video. Raise VideoError if it cannot be decoded; nothing is added then."""
        if not self._setup.upload_planes:  # clips are used where they are
            self.used = (first - self.chunk.first) * self._layout.slot_bytes
        started, used = time.perf_counter(), self.used
        sample = self._setup.dataset.samples[rows[0].sample]
        crops = self._setup.plan.crops_per_decode
        decode = self.chunk.batch * (self._setup.plan.batch_size // crops) + first // crops
        image, num_decoded = None, 0
        try:
            suits_dali = self.chunk.use_dali and self._setup.policy.suits_dali(sample, decode, video)
            groups = find_groups(video) if suits_dali else None
            if groups and (found := self._allocate(first + len(rows), len(video.data))):
                start, memory = found
                memory[:] = np.frombuffer(video.data, np.uint8)
                wanted = video.num_frames, video.numbers, rows
                self.encoded[first] = EncodedVideo(start, len(video.data), groups, *wanted)
            else:
                image, num_decoded = self._decode(first, rows, video)
                self.count(decode_seconds=time.perf_counter() - started)
        except VideoError:
            self.used = used
            raise
        for row in rows:
            fields = [sample.fields.get(name) for name in self._setup.config.fields]
            augmentation = row.augment_ops, row.erase_box
            self.clips.append(LoadedClip(row.position, sample.key, sample.labels or (), fields, *augmentation, image))
            image = None if image is None else image + self._layout.clip_bytes
        self.count(videos_read=1, bytes_read=len(video.data), frames_decoded=num_decoded)

    def count(self, **amounts: float) -> None:
        self.counts.update(amounts)

    def finish(self) -> ChunkResult:
        return ChunkResult(self.chunk, self.clips, self.encoded, self.used, self.faults, self.counts)

    def _decode(self, first: int, rows: list[PlanRow], video: VideoSlice) -> tuple[int | None, int]:
        """Decode a video to planes, or to RGB, whose start in the block is returned, with the frames decoded."""
        setup, used = self._setup, self.used
        source, sample = find_source(video.data), setup.dataset.samples[rows[0].sample]
        allocate = partial(self._allocate, first + len(rows))
        if setup.upload_planes:
            planes = source.copy_planes(video, sample, rows, setup.plan.frame_size, allocate)
            if planes is not None:
                self._fill_tables(first, rows, planes)
                return None, planes.num_decoded
            self.used = used
        found = allocate(len(rows) * self._layout.clip_bytes)
        assert found is not None
        start, memory = found
        return start, source.cut_views(video, sample, rows, memory.reshape(len(rows), *self._layout.clip_shape))

    def _allocate(self, next_clip: int, num_bytes: int) -> tuple[int, UInt8[np.ndarray, " num_bytes"]] | None:
        """Return the next bytes of the chunk's slots, behind where in the block they begin; None if the clips from
        `next_clip` on would have no room as RGB then."""
        remaining = (self.chunk.first + self.chunk.num_clips - next_clip) * self._layout.clip_bytes
        if self.used + num_bytes + remaining > self.chunk.num_clips * self._layout.slot_bytes:
            return None
        start = self._start + self.used
        self.used += num_bytes
        return start, self._block[start : start + num_bytes]

    def _fill_tables(self, first: int, rows: list[PlanRow], frames: PlanarFrames) -> None:
        """Say in the tables how clips are made of planes; see kernels.DecodedClips."""
        offsets, sizes, boxes, flips, matrices, siting = self._tables
        window, layout, clips = frames.window, frames.layout, slice(first, first + len(rows))
        offsets[clips] = frames.offsets
        sizes[clips] = window.height, window.width, layout.sample_bytes
        boxes[clips] = [(row.crop.x - window.x, row.crop.y - window.y, *row.crop[2:]) for row in rows]
        flips[clips] = [row.flip for row in rows]
        matrices[clips] = make_color_matrix(layout.matrix, layout.full_range, layout.bits)
        siting[clips] = SITING[layout.siting]
