"""What a decode worker does: make chunks of batches, and replace bad videos by the plan's rule.

Workers are processes: PyAV takes and releases the GIL about a hundred times a clip, for which the
threads of one process would wait, as would the training step; and a crash or hang costs one video.
A worker imports PyAV and NumPy, but not PyTorch, and opens the dataset and the plan by itself. Of
the batches it is told nothing but numbers: a chunk is a pure function of its fields, so it can be
sent to any worker, again and again.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection

from adamae.common.errors import InputError
from adamae.common.processes import end_with_parent
from adamae.pipeline.clip_memory import ClipMemory
from adamae.pipeline.decoding.chunk_writer import ChunkWriter
from adamae.pipeline.decoding.chunks import Chunk, ChunkResult, Fault, WorkerSetup
from adamae.pipeline.planning.plan import PlanRow, join_frames
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError

# Replacements in a row for one video. So many bad ones are no accident: the shards are broken.
MAX_ATTEMPTS = 100
# Chunks whose videos are read from object storage while earlier ones are decoded.
CHUNKS_AHEAD = 4
# Batches whose shards are downloaded ahead. These stay in the node's cache, so early costs nothing.
BATCHES_AHEAD = 256
# A request to object storage takes tens of milliseconds, in which its thread does nothing.
NUM_READ_THREADS = 8
NUM_DOWNLOAD_THREADS = 8
# How often a worker that waits for object storage says that it is alive, within the time after
# which it would count as hung: several times, as the store may be slow and the worker is not to
# blame for it.
SIGNS_PER_TIMEOUT = 4


def run_worker(socket: int, file: int) -> None:
    """Make chunks until nobody is left who could send some, and exit.

    `socket` and `file` are numbers of open files: the connection to the loader, and the memory to
    which clips go.
    """
    connection = Connection(socket)
    # When the loader's end is closed, there is nothing left to do.
    with suppress(OSError, EOFError):
        try:
            setup: WorkerSetup = connection.recv()
            if setup.ends_with_thread:
                # The end of the connection tells as well, but not a worker that is stopped.
                end_with_parent()
            worker = DecodeWorker(setup, ClipMemory(setup.layout, file), connection)
        except Exception as error:
            # The loader raises it.
            connection.send(error)
            return
        connection.send(None)
        chunks: deque[Chunk] = deque()
        while True:
            while not chunks or (len(chunks) < CHUNKS_AHEAD and connection.poll()):
                chunk = connection.recv()
                chunks.append(chunk)
                worker.read_ahead(chunk)
            connection.send(worker.make_chunk(chunks.popleft()))
    # Without waiting for threads, which may be in a request.
    os._exit(0)


class DecodeWorker:
    """Makes chunks, one after the other; videos in object storage are read ahead in threads."""

    def __init__(self, setup: WorkerSetup, memory: ClipMemory, connection: Connection) -> None:
        self._setup = setup
        self._memory = memory
        self._connection = connection
        self._dataset = setup.dataset
        self._plan = setup.plan
        # Executors start a thread when they first need it: none for shards on a local disk.
        self._read_threads = ThreadPoolExecutor(NUM_READ_THREADS)
        self._download_threads = ThreadPoolExecutor(NUM_DOWNLOAD_THREADS)
        # By sample and frames.
        self._reads: dict[tuple[int, tuple[int, ...]], Future[VideoSlice]] = {}
        # The first batch whose shards have not been looked at, and the shards of those before it.
        self._next_batch = 0
        self._seen_shards: set[int] = set()
        # Shards whose lists of samples have been asked for.
        self._seen_indexes: set[int] = set()

    def read_ahead(self, chunk: Chunk) -> None:
        """Begin to read a chunk's videos and later batches' shards from object storage."""
        if not self._dataset.is_remote:
            return
        self._download_ahead(chunk.batch)
        positions = self._plan.positions(chunk.batch)
        crops = self._plan.crops_per_decode
        indices = range(chunk.first, chunk.first + chunk.num_clips, crops)
        samples = self._plan.samples(chunk.batch)
        if not self._fetch_indexes([samples[index // crops] for index in indices]):
            # Whoever needs the shard meets the error again.
            return
        for index in indices:
            rows = [self._plan.row(position) for position in positions[index : index + crops]]
            key = rows[0].sample, join_frames(rows)
            if key not in self._reads:
                self._reads[key] = self._read_threads.submit(self._dataset.read_clip, *key)

    def _fetch_indexes(self, samples: Sequence[int]) -> bool:
        """Read the lists of these samples' shards, several at once; return whether all came."""
        shards = {int(self._dataset.shard_of(sample)) for sample in samples} - self._seen_indexes
        reads = [self._read_threads.submit(self._dataset.fetch_index, shard) for shard in shards]
        while wait(reads, self._setup.config.decode_timeout_s / SIGNS_PER_TIMEOUT).not_done:
            self._connection.send(None)
        self._seen_indexes |= shards
        return all(read.exception() is None for read in reads)

    def _download_ahead(self, batch: int) -> None:
        """Begin to download this worker's shards of the batches from `batch` on.

        Shard s is downloaded by worker s modulo the number of workers, so once per rank.
        """
        self._next_batch = max(self._next_batch, batch)
        while self._next_batch <= batch + BATCHES_AHEAD:
            samples = self._plan.samples(self._next_batch)
            if not samples:
                # The plan ends here.
                return
            for sample in samples:
                shard = int(self._dataset.shard_of(sample))
                is_own = shard % self._setup.config.workers == self._setup.number
                if is_own and shard not in self._seen_shards:
                    self._seen_shards.add(shard)
                    # If it fails, whoever needs the shard meets the error again.
                    self._download_threads.submit(self._dataset.fetch_index, shard)
                    self._download_threads.submit(self._dataset.find_shard, shard)
            self._next_batch += 1

    def make_chunk(self, chunk: Chunk) -> ChunkResult | Exception:
        """Write the clips of a chunk to its slots.

        Return the error where a shard cannot be read, or no video can take a bad one's place: the
        loader raises it. Any other error ends this process, as a crash of FFmpeg does.
        """
        writer = ChunkWriter(self._setup, self._memory.map_block(chunk.block), chunk)
        positions = self._plan.positions(chunk.batch)
        crops = self._plan.crops_per_decode
        try:
            for first in range(chunk.first, chunk.first + chunk.num_clips, crops):
                rows = [self._plan.row(position) for position in positions[first : first + crops]]
                self._make_clips(writer, first, rows)
        except (InputError, OSError) as error:
            return error
        writer.result.counts.update(self._dataset.cache.take_counts())
        return writer.result

    def _make_clips(self, writer: ChunkWriter, first: int, planned: list[PlanRow]) -> None:
        """Make the clips of one video, or of the first replacement that can be decoded.

        Raise InputError if there is none.
        """
        rows = planned
        deaths = writer.result.chunk.deaths
        for attempt in count(1):
            try:
                if attempt <= len(deaths):
                    raise VideoError(deaths[attempt - 1])
                started = time.perf_counter()
                video = self._read(rows)
                read_s = time.perf_counter() - started
                writer.result.counts.update(read_seconds=read_s)  # type: ignore[call-overload]
                writer.add_video(first, rows, video)
                return
            except VideoError as error:
                sample = rows[0].sample
                writer.result.faults.append(Fault(sample, str(error), len(rows)))
                where = self._dataset.describe_location(sample)
                reason = f"{where} cannot be decoded: {error}"
            replacements = [self._plan.replacement(row, attempt) for row in planned]
            rows = [row for row in replacements if row is not None]
            if not rows or attempt > MAX_ATTEMPTS:
                raise InputError(reason)

    def _read(self, rows: list[PlanRow]) -> VideoSlice:
        """Read what clips need of their video, or wait until it has been read ahead."""
        key = rows[0].sample, join_frames(rows)
        if not self._dataset.is_remote:
            return self._dataset.read_clip(*key)
        read = self._reads.pop(key, None)
        if read is None:
            read = self._read_threads.submit(self._dataset.read_clip, *key)
        while not wait([read], self._setup.config.decode_timeout_s / SIGNS_PER_TIMEOUT).done:
            self._connection.send(None)
        return read.result()
