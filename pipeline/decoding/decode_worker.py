"""What a decode worker does: it plans, reads and decodes chunks of batches, and replaces bad videos by the plan's rule.

Workers are processes: PyAV takes and releases the GIL about a hundred times a clip, for which the threads of one
process would wait, as would the training step; and a crash or hang costs one video. A worker imports PyAV and NumPy,
but not PyTorch, and opens the dataset and the plan by itself. Of the batches it is told nothing but numbers: a chunk is
a pure function of its fields, so it can be sent to any worker, again and again.
"""

import os
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from adamae.common.errors import InputError
from adamae.common.processes import end_with_parent
from adamae.kernels.clip_tables import color_matrix
from adamae.pipeline.clip_memory import BlockLayout, ClipMemory
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.colors import CHROMA_PLACES
from adamae.pipeline.decoding.joining import EncodedVideo, GpuCodecs, find_groups
from adamae.pipeline.decoding.planes import PlanarFrames
from adamae.pipeline.decoding.sources import find_source
from adamae.pipeline.planning.augmentations import AugmentOp, EraseBox
from adamae.pipeline.planning.plan import ClipPlan, PlanRow
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError

MAX_ATTEMPTS = 100  # replacements in a row for one clip
CHUNKS_AHEAD = 4  # whose videos are read meanwhile, from object storage
BATCHES_AHEAD = 256  # whose shards are downloaded; these stay in the cache, so early costs nothing
READ_THREADS = DOWNLOAD_THREADS = 8
SIGNS_OF_LIFE = 4  # in the time after which a worker counts as hung, while a download is waited for

make_color_matrix = cache(color_matrix)


class Chunk(NamedTuple):
    """Neighboring clips of a batch, of one or several videos, that one worker makes."""

    batch: int
    first: int  # clip
    num_clips: int
    block: int  # of memory, where the batch goes
    is_for_gpu: bool = (
        False  # whether videos that suit the GPU decoder are only read, and left to it
    )
    is_suspect: bool = False  # whether a worker has died over it
    deaths: tuple[str, ...] = ()  # why workers died over its video, and over what replaced it


class LoadedClip(NamedTuple):
    """What the loader's process needs to know of a clip, which saves it from looking into the tables."""

    position: int
    key: str
    labels: tuple[int, ...]
    fields: list[Any]  # values of data.fields
    augment_ops: tuple[AugmentOp, ...]
    erase_box: EraseBox | None
    image: (
        int | None
    )  # byte of the block at which its RGB begins; None: it is in the tables, or encoded


class Fault(NamedTuple):
    """A video that could not be decoded, and has been replaced."""

    sample: int
    reason: str
    num_clips: int


@dataclass
class ChunkResult:
    chunk: Chunk
    clips: list[LoadedClip] = field(default_factory=list)
    encoded: dict[int, EncodedVideo] = field(
        default_factory=dict
    )  # for the GPU decoder; by the first clip of each
    used_bytes: int = 0  # of the chunk's slots, from the first on
    faults: list[Fault] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # see loader.COUNTERS


class WorkerSetup(NamedTuple):
    dataset: ShardDataset
    plan: ClipPlan
    config: DataConfig
    gpu_codecs: GpuCodecs
    layout: BlockLayout
    upload_planes: bool  # whether planes will do, of which the device makes clips
    number: int = 0  # of this worker
    ends_with_thread: bool = (
        False  # whether it is of no use once the thread that has started it has ended
    )


def run_worker(socket: int, file: int) -> None:
    """Make chunks until nobody is left who could send some, and exit; `file`: the memory where clips go."""
    connection = Connection(socket)
    with suppress(OSError, EOFError):
        try:
            setup: WorkerSetup = connection.recv()
            if (
                setup.ends_with_thread
            ):  # the end of the pipe tells as well, but not a worker that was stopped
                end_with_parent()
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
        # Threads are started when they are first needed: for shards in object storage.
        self._read_threads, self._download_threads = map(
            ThreadPoolExecutor, (READ_THREADS, DOWNLOAD_THREADS)
        )
        self._reads: dict[tuple[int, tuple[int, ...]], Future[VideoSlice]] = {}
        self._next_batch = 0  # to look at
        self._shards: set[int] = set()  # seen

    def read_ahead(self, chunk: Chunk) -> None:
        """Begin to read the videos of a chunk, and the shards of later batches, if they are in object storage."""
        if not self._dataset.is_remote:
            return
        self._download_ahead(chunk.batch)
        positions = self._plan.positions(chunk.batch)[chunk.first : chunk.first + chunk.num_clips]
        for position in positions[:: self._plan.crops_per_decode]:
            row = self._plan.row(position)
            if (row.sample, row.frames) not in self._reads:
                read = self._read_threads.submit(self._dataset.read_clip, row.sample, row.frames)
                self._reads[row.sample, row.frames] = read

    def _download_ahead(self, batch: int) -> None:
        """Begin to download those shards of the batches from `batch` on that are this worker's."""
        self._next_batch = max(self._next_batch, batch)
        while self._next_batch <= batch + BATCHES_AHEAD and (
            samples := self._plan.samples(self._next_batch)
        ):
            for shard in dict.fromkeys(int(self._dataset.shard_of(sample)) for sample in samples):
                if (
                    shard % self._setup.config.workers == self._setup.number
                    and shard not in self._shards
                ):
                    self._shards.add(
                        shard
                    )  # whoever needs one whose download fails meets the error again
                    self._download_threads.submit(self._dataset.find_shard, shard)
            self._next_batch += 1

    def make_chunk(self, chunk: Chunk) -> ChunkResult | Exception:
        """Write the clips of a chunk to its slots; return the error where a shard cannot be read, or no video can take
        a bad one's place. Any other error ends this process, as a crash of FFmpeg does."""
        writer = ChunkWriter(self._setup, self._memory.map_block(chunk.block), chunk)
        positions, crops = self._plan.positions(chunk.batch), self._plan.crops_per_decode
        try:
            for first in range(chunk.first, chunk.first + chunk.num_clips, crops):
                planned = [
                    self._plan.row(position) for position in positions[first : first + crops]
                ]
                self._make_clips(writer, first, planned)
        except (InputError, OSError) as error:
            return error
        writer.result.counts.update(self._dataset.cache.take_counts())
        return writer.result

    def _make_clips(self, writer: "ChunkWriter", first: int, planned: list[PlanRow]) -> None:
        """Make the clips of one video, or of the first that can be decoded of those that replace it.

        Raise InputError if none is left.
        """
        rows, deaths = planned, writer.result.chunk.deaths
        for attempt in count(1):
            try:
                if attempt <= len(deaths):
                    raise VideoError(deaths[attempt - 1])
                started = time.perf_counter()
                video = self._read(rows[0])
                writer.result.counts.update(read_seconds=time.perf_counter() - started)  # type: ignore[call-overload]
                writer.add_video(first, rows, video)
                return
            except VideoError as error:
                writer.result.faults.append(Fault(rows[0].sample, str(error), len(rows)))
                reason = (
                    f"{self._dataset.describe_location(rows[0].sample)} cannot be decoded: {error}"
                )
            rows = [
                row for old in planned if (row := self._plan.replacement(old, attempt)) is not None
            ]
            if not rows or attempt > MAX_ATTEMPTS:
                raise InputError(reason)

    def _read(self, row: PlanRow) -> VideoSlice:
        wanted = row.sample, row.frames
        if not self._dataset.is_remote:
            return self._dataset.read_clip(*wanted)
        read = self._reads.pop(wanted, None) or self._read_threads.submit(
            self._dataset.read_clip, *wanted
        )
        while not wait([read], self._setup.config.decode_timeout_s / SIGNS_OF_LIFE).done:
            self._connection.send(None)
        return read.result()


class ChunkWriter:
    """Fills the slots of a chunk, one video behind the other; what remains has room for all clips as RGB."""

    def __init__(
        self, setup: WorkerSetup, block: UInt8[np.ndarray, " bytes"], chunk: Chunk
    ) -> None:
        self.result = ChunkResult(chunk)
        self._setup, self._layout, self._block = setup, setup.layout, block
        self._start = chunk.first * self._layout.slot_bytes
        num_clips = len(setup.plan.positions(chunk.batch))
        self._tables = self._layout.view_tables(block, num_clips) if setup.upload_planes else []

    def add_video(self, first: int, rows: list[PlanRow], video: VideoSlice) -> None:
        """Add the clips that are cut from a video. Raise VideoError if it cannot be decoded; nothing is added then."""
        result, started = self.result, time.perf_counter()
        if not self._setup.upload_planes:  # clips are used where they are
            result.used_bytes = (first - result.chunk.first) * self._layout.slot_bytes
        used, sample = result.used_bytes, self._setup.dataset.samples[rows[0].sample]
        image, num_decoded = None, 0
        try:
            if not self._keep_encoded(first, rows, sample, video):
                image, num_decoded = self._decode(first, rows, sample, video)
                result.counts.update(decode_seconds=time.perf_counter() - started)  # type: ignore[call-overload]
        except VideoError:
            result.used_bytes = used
            raise
        fields = [sample.fields.get(name) for name in self._setup.config.fields]
        for row in rows:
            augmentation = (
                row.augment_ops,
                row.erase_box,
            )  # whole rows would cost the loader's process .1 ms a batch
            result.clips.append(
                LoadedClip(
                    row.position, sample.key, sample.labels or (), fields, *augmentation, image
                )
            )
            image = None if image is None else image + self._layout.clip_bytes
        result.counts.update(videos_read=1, bytes_read=len(video.data), frames_decoded=num_decoded)

    def _keep_encoded(
        self, first: int, rows: list[PlanRow], sample: Sample, video: VideoSlice
    ) -> bool:
        """Write a video as it is to the slots if the GPU decoder takes it; return whether it does."""
        if not self.result.chunk.is_for_gpu or not self._setup.gpu_codecs.include(sample, video):
            return False
        groups = find_groups(video)
        if groups is None:
            return False
        allocated = self._allocate(first + len(rows), len(video.data))
        if allocated is None:
            return False
        start, memory = allocated
        memory[:] = np.frombuffer(video.data, np.uint8)
        place = slice(start, start + len(video.data))
        self.result.encoded[first] = EncodedVideo(
            place, *groups, video.num_frames, video.numbers, rows
        )
        return True

    def _decode(
        self, first: int, rows: list[PlanRow], sample: Sample, video: VideoSlice
    ) -> tuple[int | None, int]:
        """Decode a video to planes, or to RGB, whose start in the block is returned, with the frames decoded."""
        setup, used, source = self._setup, self.result.used_bytes, find_source(video.data)
        allocate = partial(self._allocate, first + len(rows))
        if setup.upload_planes:
            planes = source.copy_planes(video, sample, rows, setup.plan.frame_size, allocate)
            if planes is not None:
                self._fill_tables(slice(first, first + len(rows)), rows, planes)
                return None, planes.num_decoded
            self.result.used_bytes = used
        found = allocate(len(rows) * self._layout.clip_bytes)
        assert found is not None
        start, memory = found
        return start, source.cut_views(
            video, sample, rows, memory.reshape(len(rows), *self._layout.clip_shape)
        )

    def _allocate(
        self, next_clip: int, num_bytes: int
    ) -> tuple[int, UInt8[np.ndarray, " num_bytes"]] | None:
        """Return the next bytes of the chunk's slots, behind where in the block they begin; None if the clips from
        `next_clip` on would have no room as RGB then."""
        chunk, start = self.result.chunk, self._start + self.result.used_bytes
        remaining = (chunk.first + chunk.num_clips - next_clip) * self._layout.clip_bytes
        if start + num_bytes + remaining > self._start + chunk.num_clips * self._layout.slot_bytes:
            return None
        self.result.used_bytes += num_bytes
        return start, self._block[start : start + num_bytes]

    def _fill_tables(self, clips: slice, rows: list[PlanRow], frames: PlanarFrames) -> None:
        """Say in the tables how clips are made of planes; see kernels.DecodedClips."""
        offsets, sizes, boxes, flips, matrices, siting = self._tables
        window, layout = frames.window, frames.layout
        offsets[clips] = frames.offsets
        sizes[clips] = window.height, window.width, layout.sample_bytes
        boxes[clips] = [
            (row.crop.x - window.x, row.crop.y - window.y, *row.crop[2:]) for row in rows
        ]
        flips[clips] = [row.flip for row in rows]
        matrices[clips] = make_color_matrix(layout.matrix, layout.full_range, layout.bits)
        siting[clips] = CHROMA_PLACES[layout.siting]
