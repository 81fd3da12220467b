"""Download in the background: shards of the next batches, and clips of shards that the cache has no room for."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial

from common.errors import InputError
from pipeline.planning.plan import ClipPlan
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
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._batch = -1  # the newest that the loader has begun
        self._shard_batch = self._clip_batch = 0  # the next ones to look at
        self._is_cached: dict[int, bool | None] = {}  # by unit; None: on its way
        self._is_full = False
        self._next_samples: deque[int] = deque()
        self._next_clips: deque[tuple[int, Clip]] = deque()  # with their batch
        self._clips: dict[Clip, Future[VideoSlice]] = {}  # on their way, or waiting
        self._clip_bytes = 0

    def advance(self, batch: int) -> None:
        """Look ahead from `batch`, which the loader begins now; return at once."""
        with self._changed:
            if not self._threads and not self._stopped:
                self._threads = [
                    threading.Thread(target=self._work, name="look-ahead", daemon=True) for _ in range(THREADS)
                ]
                for thread in self._threads:
                    thread.start()
            if batch != self._batch + 1:  # from the beginning
                self._shard_batch = self._clip_batch = batch
                self._next_samples.clear()
                self._next_clips.clear()
                self._clips.clear()
                self._clip_bytes = 0
            self._batch = batch
            self._changed.notify_all()

    def take(self, clip: Clip) -> VideoSlice | None:
        """Wait for a clip if it is on its way; None: nobody reads it. Raises what reading it has raised."""
        with self._changed:
            future = self._clips.pop(clip, None)
            if future is None:
                return None
            self._clip_bytes -= self._dataset.samples[clip[0]].size
            self._changed.notify_all()
        return future.result()

    def close(self) -> None:
        """Stop the threads."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(5)

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for something to do; None: nothing ever."""
        with self._changed:
            while not self._stopped:
                if (clip := self._next_clip()) is not None:
                    future = self._clips[clip] = Future[VideoSlice]()
                    self._clip_bytes += self._dataset.samples[clip[0]].size
                    return partial(self._read_clip, clip, future)
                if (sample := self._next_sample()) is not None:
                    return partial(self._download_unit, sample)
                self._changed.wait()
        return None

    def _next_clip(self) -> Clip | None:
        """The next clip that is to be streamed and that no worker of the loader has begun to read itself."""
        self._clip_batch = max(self._clip_batch, self._batch + 1)
        while self._is_full and self._clip_bytes < CLIP_BYTES:
            while self._next_clips:
                batch, clip = self._next_clips.popleft()
                if batch > self._batch and clip not in self._clips:
                    return clip
            states = [self._is_cached.get(self._unit(sample)) for sample in self._plan.samples(self._clip_batch)]
            if not states or None in states or self._clip_batch > self._batch + CLIP_BATCHES:
                return None
            rows = self._plan.batch(self._clip_batch)[:: self._plan.views] if not all(states) else []
            self._next_clips.extend(
                (self._clip_batch, (row.sample, row.frames))
                for row, is_cached in zip(rows, states, strict=False)
                if not is_cached
            )
            self._clip_batch += 1
        return None

    def _next_sample(self) -> int | None:
        """The next sample whose unit has not been downloaded."""
        while True:
            while self._next_samples:
                sample = self._next_samples.popleft()
                if (unit := self._unit(sample)) not in self._is_cached:
                    self._is_cached[unit] = None
                    return sample
            if self._shard_batch > self._batch + SHARD_BATCHES:
                return None
            if not (samples := self._plan.samples(self._shard_batch)):
                return None
            self._next_samples.extend(samples)
            self._shard_batch += 1

    def _download_unit(self, sample: int) -> None:
        is_cached = True
        with suppress(InputError, CancelledError):  # whoever needs it meets the error again
            is_cached = self._download(sample)
        with self._changed:
            self._is_cached[self._unit(sample)] = is_cached
            self._is_full |= not is_cached
            self._changed.notify_all()

    def _read_clip(self, clip: Clip, future: "Future[VideoSlice]") -> None:
        try:
            future.set_result(self._read(*clip))
        except BaseException as error:  # raised where the clip is taken
            future.set_exception(error)
