"""Read the bytes of samples, checked against the hashes taken at shard creation, from local shards or object storage.

What lies in object storage is downloaded ahead in the background: shards of the next batches, and clips of shards that
the cache has no room for.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from common.errors import InputError
from pipeline.planning.plan import ClipPlan
from pipeline.pool import ThreadPool
from pipeline.reading.storage import is_remote
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError

REQUEST = 2**22  # bytes that are transferred in the time that a request takes, 40 ms at 100 MiB/s
THREADS = 8
SHARD_BATCHES = 256  # batches whose shards are downloaded ahead; these stay in the cache, so early costs nothing
CLIP_BATCHES, CLIP_BYTES = 16, 2**28  # of clips, which wait in memory
Clip = tuple[int, tuple[int, ...]]  # sample, frames
ReadRange = Callable[[int, int], bytes]  # offset in the video, bytes: fewer at the end of the shard
T = TypeVar("T")


class Reader:
    """Safe to use from many threads."""

    def __init__(self, dataset: ShardDataset, plan: ClipPlan | None = None) -> None:
        """Prepare to read; `plan`: what will be read, whose remote shards are downloaded ahead."""
        self._dataset, self._plan = dataset, plan
        self._stop = threading.Event()
        self._comes_whole = lru_cache(maxsize=4096)(self._is_worth_downloading)
        self._ahead: LookAhead | None = None
        if plan is not None and dataset.is_remote:
            self._ahead = LookAhead(self, dataset, plan)
            dataset.cache.needs = self._is_needed

    def read(self, sample: int) -> bytes:
        """Read a whole video; raises VideoError if its bytes are not those that were stored.

        The hash costs .6 ms per megabyte and finds what decoders do not: most flipped bytes decode to something.
        """
        video = self._usable(sample)

        def read_whole(read: ReadRange) -> bytes:
            data = read(0, video.size)
            if len(data) < video.size:
                raise VideoError(f"the shard ends after {len(data)} of the video's {video.size} bytes")
            if hashlib.sha256(data).hexdigest() != video.sha256:
                raise VideoError("the bytes have changed since the shard was made (sha256 differs)")
            return data

        return self._read_checked(sample, video, read_whole)

    def clip(self, sample: int, frames: Sequence[int]) -> VideoSlice:
        """Read the GOPs of a video that hold these frames, or all of it where it has no closed GOPs.

        Waits for the download of a remote shard. Raises VideoError if the bytes are not those that were stored,
        InputError if they cannot be had, CancelledError if the reader is closed meanwhile.
        """
        wanted = sample, tuple(frames)
        return (self._ahead and self._ahead.take(wanted)) or self.read_clip(*wanted)

    def advance(self, batch: int) -> None:
        """Download what the plan's batches from `batch` on read, in the background; return at once."""
        if self._ahead is not None:
            self._ahead.advance(batch)

    def close(self) -> None:
        """Stop all downloads."""
        self._stop.set()
        if self._ahead is not None:
            self._ahead.close()

    def read_clip(self, sample: int, frames: tuple[int, ...]) -> VideoSlice:
        """Read a clip that is not read ahead."""
        video, gops = self._usable(sample), self._dataset.gops[sample]
        if gops is None:
            return VideoSlice(self.read(sample), frames, video.num_frames)
        return self._read_checked(sample, video, lambda read: gops.slice_video(frames, read))

    def download(self, sample: int) -> bool:
        """Download what holds a sample; return whether it is on this machine now."""
        video = self._dataset.samples[sample]
        shard = self._dataset.shards[int(self._dataset.shard_of[sample])]
        return bool(video.problem) or not is_remote(shard) or self._copy(sample, video)[0] is not None

    def unit(self, sample: int) -> int:
        """A number for what is downloaded at once: the shard, or where few of its samples are read, the sample."""
        shard = int(self._dataset.shard_of[sample])
        return shard if self._comes_whole(shard) else -1 - sample

    def _usable(self, sample: int) -> Sample:
        video = self._dataset.samples[sample]
        if video.problem:
            raise VideoError(video.problem)
        return video

    def _read_checked(self, sample: int, video: Sample, parse: Callable[[ReadRange], T]) -> T:
        """Call `parse`; if the local copy of a remote shard is damaged, remove it and call again with the store's."""
        cache, place = self._dataset.cache, self._dataset.shards[int(self._dataset.shard_of[sample])]
        remote = is_remote(place)
        copy, start = self._copy(sample, video) if remote else (Path(place), video.offset)
        if remote:
            cache.count(**{"cache_hits" if copy else "streamed_clips": 1})
        if copy:
            try:
                with open(copy, "rb", buffering=0) as file:
                    return parse(lambda offset, size: os.pread(file.fileno(), size, start + offset))
            except FileNotFoundError as error:
                if not remote:  # else another process has made room of it
                    advice = "run `python shard_tools/check_shards.py` on its folder"
                    raise InputError(f"{place} is missing: {advice}") from error
            except VideoError:
                if not remote:
                    raise
                copy.unlink(missing_ok=True)
        store, name = cache.store(place)
        return parse(
            lambda offset, size: store.read_range(name, first := video.offset + offset, first + size, self._stop)
        )

    def _copy(self, sample: int, video: Sample) -> tuple[Path | None, int]:
        """The local copy of what holds a sample, None if the cache is full; and the byte at which the video begins."""
        shard = int(self._dataset.shard_of[sample])
        info = self._dataset.info.shards[shard]
        is_whole = self._comes_whole(shard)
        size, start = (info.num_bytes, None) if is_whole else (video.size, video.offset)
        copy = self._dataset.cache.fetch(self._dataset.shards[shard], info.sha256, size, start, self._stop)
        return copy, video.offset if is_whole else 0

    @cached_property
    def _fractions(self) -> np.ndarray:
        return np.ones(len(self._dataset.shards)) if self._plan is None else self._plan.read_fractions()

    def _is_worth_downloading(self, shard: int) -> bool:
        """Whether one request for a shard is cheaper than one for each of the samples that are read."""
        info = self._dataset.info.shards[shard]
        return bool(self._fractions[shard] * (info.num_samples * REQUEST + info.num_bytes) >= info.num_bytes)

    @cached_property
    def _needed_names(self) -> frozenset[str]:
        shards, infos, path = self._dataset.shards, self._dataset.info.shards, self._dataset.cache.path
        return frozenset(path(shards[n], infos[n].sha256).stem for n in np.flatnonzero(self._fractions).tolist())

    def _is_needed(self, copy: Path) -> bool:
        return bool(self._fractions.all()) or copy.stem.partition("@")[0] in self._needed_names


class LookAhead:
    """Threads that download for the plan of a reader."""

    def __init__(self, reader: Reader, dataset: ShardDataset, plan: ClipPlan) -> None:
        self._reader, self._dataset, self._plan = reader, dataset, plan
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
                    if (unit := self._reader.unit(sample)) not in self._is_cached:
                        self._is_cached[unit] = None
                        self._downloads.submit(partial(self._download_unit, sample, unit))
                if not samples:
                    break
                self._shard_batch += 1
            self._clip_batch = max(self._clip_batch, self._batch + 1)
            while self._is_full and self._clip_bytes < CLIP_BYTES and self._clip_batch <= self._batch + CLIP_BATCHES:
                samples = self._plan.samples(self._clip_batch)
                states = [self._is_cached.get(self._reader.unit(sample)) for sample in samples]
                if not states or None in states:
                    break
                rows = self._plan.batch(self._clip_batch)[:: self._plan.views] if not all(states) else []
                for row, is_cached in zip(rows, states, strict=False):
                    clip = row.sample, row.frames
                    if not is_cached and clip not in self._clips:
                        self._clip_bytes += self._dataset.samples[row.sample].size
                        self._clips[clip] = self._reads.submit(partial(self._reader.read_clip, *clip))
                self._clip_batch += 1

    def _download_unit(self, sample: int, unit: int) -> None:
        is_cached = True
        with suppress(InputError, CancelledError):  # whoever needs it meets the error again
            is_cached = self._reader.download(sample)
        with self._lock:
            self._is_cached[unit] = is_cached
            self._is_full |= not is_cached
        self._look()
