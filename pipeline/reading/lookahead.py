"""Download in the background: shards of the next batches, and clips of shards that the cache has no room for."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial

from common.errors import InputError
from pipeline.planning.plan import ClipPlan
from pipeline.pool import ThreadPool
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice

THREADS = 8
SHARD_BATCHES = 256  # batches whose shards are downloaded ahead; these stay in the cache, so early costs nothing
CLIP_BATCHES, CLIP_BYTES = 16, 2**28  # of clips, which wait in memory
Clip = tuple[int, tuple[int, ...]]  # sample, frames


class LookAhead:
    """Threads that download for one plan and process."""

    def __init__(
        self,
        dataset: ShardDataset,
        plan: ClipPlan,
        unit: Callable[[int], int],
        download: Callable[[int], bool],
        read: Callable[[int, tuple[int, ...]], VideoSlice],
    ) -> None:
        """Take what threads call: `unit`, a number for what is downloaded with a sample; `download` that, False if the
        cache is full; `read`, a clip from the store."""
        self._dataset, self._plan, self._unit, self._download, self._read = dataset, plan, unit, download, read
        self._downloads, self._reads = (ThreadPool(THREADS, "look-ahead") for _ in range(2))
        self._lock = threading.Lock()
        self._batch = -1  # the newest that the loader has begun
        self._shard_batch = self._clip_batch = 0  # the next ones to look at
        self._is_cached: dict[int, bool | None] = {}  # by unit; None: on its way
        self._is_full = False
        self._clips: dict[Clip, Future[VideoSlice]] = {}  # on their way, or waiting
        self._clip_bytes = 0

    def advance(self, batch: int) -> None:
        """Look ahead from `batch`, which the loader begins now; return at once."""
        with self._lock:
            if batch != self._batch + 1:  # from the beginning
                self._shard_batch = self._clip_batch = batch
                for future in self._clips.values():
                    future.cancel()
                self._clips.clear()
                self._clip_bytes = 0
            self._batch = batch
        self._reads.submit(self._look)

    def take(self, clip: Clip) -> VideoSlice | None:
        """Wait for a clip if it is on its way; None: nobody reads it. Raises what reading it has raised."""
        with self._lock:
            future = self._clips.pop(clip, None)
            if future is None:
                return None
            self._clip_bytes -= self._dataset.samples[clip[0]].size
        self._reads.submit(self._look)
        return None if future.cancel() else future.result()

    def close(self) -> None:
        """Stop the threads."""
        self._downloads.close()
        self._reads.close()

    def _look(self) -> None:
        """Submit what has come into view: downloads, and reads of clips whose shards are known to find no room."""
        with self._lock:
            while self._shard_batch <= self._batch + SHARD_BATCHES:
                for sample in (samples := self._plan.samples(self._shard_batch)):
                    if (unit := self._unit(sample)) not in self._is_cached:
                        self._is_cached[unit] = None
                        self._downloads.submit(partial(self._download_unit, sample, unit))
                if not samples:
                    break
                self._shard_batch += 1
            self._clip_batch = max(self._clip_batch, self._batch + 1)
            while self._is_full and self._clip_bytes < CLIP_BYTES and self._clip_batch <= self._batch + CLIP_BATCHES:
                states = [self._is_cached.get(self._unit(sample)) for sample in self._plan.samples(self._clip_batch)]
                if not states or None in states:
                    break
                rows = self._plan.batch(self._clip_batch)[:: self._plan.views] if not all(states) else []
                for row, is_cached in zip(rows, states, strict=False):
                    clip = row.sample, row.frames
                    if not is_cached and clip not in self._clips:
                        self._clip_bytes += self._dataset.samples[row.sample].size
                        self._clips[clip] = self._reads.submit(partial(self._read, *clip))
                self._clip_batch += 1

    def _download_unit(self, sample: int, unit: int) -> None:
        is_cached = True
        with suppress(InputError, CancelledError):  # whoever needs it meets the error again
            is_cached = self._download(sample)
        with self._lock:
            self._is_cached[unit] = is_cached
            self._is_full |= not is_cached
        self._look()
