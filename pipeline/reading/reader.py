"""Read the bytes of samples, checked against the hashes taken at shard creation, from local shards or object storage.

What lies in object storage is downloaded ahead in the background: shards of the next batches, and clips of shards that
the cache does not keep.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.errors import InputError
from pipeline.planning.plan import ClipPlan
from pipeline.pool import ThreadPool
from pipeline.reading.storage import is_remote
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import Sample
from pipeline.shards.gops import GopIndex, VideoSlice
from pipeline.video_error import VideoError

THREADS = 8
SHARD_BATCHES = 256  # batches whose shards are downloaded ahead; these stay in the cache, so early costs nothing
CLIP_BATCHES, CLIP_BYTES = 16, 2**28  # of clips, which wait in memory
Clip = tuple[int, tuple[int, ...]]  # sample, frames
ReadRange = Callable[[int, int], bytes]  # offset in the video, bytes: fewer at the end of the shard
T = TypeVar("T")


@dataclass(frozen=True)
class LocalClip:
    """A clip in a shard that is a file here, for another process to read."""

    file: Path
    video: Sample
    gops: GopIndex | None
    frames: tuple[int, ...]

    def read(self) -> VideoSlice:
        """Raises VideoError if the bytes are not those that were stored, InputError if the file is missing."""
        return read_file(self.file, self.video, partial(parse_clip, self.video, self.gops, self.frames))


def read_file(file: Path, video: Sample, parse: Callable[[ReadRange], T]) -> T:
    """Call `parse` with what reads of a video in a shard."""
    try:
        with open(file, "rb", buffering=0) as shard:
            return parse(lambda offset, size: os.pread(shard.fileno(), size, video.offset + offset))
    except FileNotFoundError as error:
        raise InputError(f"{file} is missing: run `python shard_tools/check_shards.py` on its folder") from error


def parse_video(video: Sample, read: ReadRange) -> bytes:
    """Read a whole video. The hash costs .6 ms per megabyte and finds what decoders do not: most flipped bytes decode
    to something."""
    data = read(0, video.size)
    if len(data) < video.size:
        raise VideoError(f"the shard ends after {len(data)} of the video's {video.size} bytes")
    if hashlib.sha256(data).hexdigest() != video.sha256:
        raise VideoError("the bytes have changed since the shard was made (sha256 differs)")
    return data


def parse_clip(video: Sample, gops: GopIndex | None, frames: tuple[int, ...], read: ReadRange) -> VideoSlice:
    """Read what of a video holds these frames: groups of pictures, or all where it has none."""
    if gops is None:
        return VideoSlice(parse_video(video, read), frames, video.num_frames)
    return gops.slice_video(frames, read)


class Reader:
    """Safe to use from many threads."""

    def __init__(self, dataset: ShardDataset, plan: ClipPlan | None = None) -> None:
        """Prepare to read; `plan`: what will be read, whose remote shards are downloaded ahead."""
        self._dataset, self._stop = dataset, threading.Event()
        self._ahead = LookAhead(self, dataset, plan) if plan is not None and dataset.is_remote else None

    def read(self, sample: int) -> bytes:
        """Read a whole video; raises VideoError if its bytes are not those that were stored."""
        return self._read_checked(sample, partial(parse_video, self._dataset.samples[sample]))

    def find_clip(self, sample: int, frames: Sequence[int]) -> LocalClip | VideoSlice:
        """Return where another process finds a clip, or the clip itself if its shard lies in object storage."""
        video = self._dataset.samples[sample]
        if self._dataset.is_remote:
            return self.clip(sample, frames)
        if video.problem:
            raise VideoError(video.problem)
        file = Path(self._dataset.shards[int(self._dataset.shard_of[sample])])
        return LocalClip(file, video, self._dataset.gops[sample], tuple(frames))

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
        parse = partial(parse_clip, self._dataset.samples[sample], self._dataset.gops[sample], frames)
        return self._read_checked(sample, parse)

    def find_shard(self, shard: int) -> Path | None:
        """Return the file of a shard, downloaded if it is remote; None if the cache does not keep it."""
        place, info = self._dataset.shards[shard], self._dataset.info.shards[shard]
        if not is_remote(place):
            return Path(place)
        return self._dataset.cache.fetch(place, info.sha256, info.num_bytes, self._stop)

    def _read_checked(self, sample: int, parse: Callable[[ReadRange], T]) -> T:
        """Call `parse`; if the local copy of a remote shard is damaged, remove it and call again with the store's."""
        video, shard = self._dataset.samples[sample], int(self._dataset.shard_of[sample])
        if video.problem:
            raise VideoError(video.problem)
        cache, place = self._dataset.cache, self._dataset.shards[shard]
        if not is_remote(place):
            return read_file(Path(place), video, parse)
        copy = self.find_shard(shard)
        cache.count(**{"cache_hits" if copy else "streamed_clips": 1})
        if copy:
            try:
                return read_file(copy, video, parse)
            except InputError:  # it is missing: another process has made room of it
                pass
            except VideoError:
                copy.unlink(missing_ok=True)
        store, name = cache.store(place)
        return parse(
            lambda offset, size: store.read_range(name, first := video.offset + offset, first + size, self._stop)
        )


class LookAhead:
    """Threads that download the shards of the next batches of a plan, and read clips of those that the cache has no
    room for."""

    def __init__(self, reader: Reader, dataset: ShardDataset, plan: ClipPlan) -> None:
        self._reader, self._dataset, self._plan = reader, dataset, plan
        self._downloads, self._reads = (ThreadPool(THREADS, "look-ahead") for _ in range(2))
        self._lock = threading.Lock()
        self._batch = -1  # the newest that the loader has begun
        self._shard_batch = self._clip_batch = 0  # the next ones to look at
        self._shards: set[int] = set()  # seen
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
        return None if future.cancel() else future.result()

    def close(self) -> None:
        """Stop the threads."""
        self._downloads.close()
        self._reads.close()

    def _look(self) -> None:
        """Submit what has come into view."""
        with self._lock:
            while self._shard_batch <= self._batch + SHARD_BATCHES:
                if not (samples := self._plan.samples(self._shard_batch)):
                    break
                for shard in dict.fromkeys(int(self._dataset.shard_of[sample]) for sample in samples):
                    if shard not in self._shards:
                        self._shards.add(shard)  # whoever needs one whose download fails meets the error again
                        self._downloads.submit(partial(self._reader.find_shard, shard))
                self._shard_batch += 1
            self._clip_batch = max(self._clip_batch, self._batch + 1)
            while self._clip_bytes < CLIP_BYTES and self._clip_batch <= self._batch + CLIP_BATCHES:
                if not self._dataset.cache.is_full or not (rows := self._plan.batch(self._clip_batch)):
                    break
                for row in rows[:: self._plan.views]:
                    if (clip := (row.sample, row.frames)) not in self._clips:
                        self._clip_bytes += self._dataset.samples[row.sample].size
                        self._clips[clip] = self._reads.submit(partial(self._reader.read_clip, *clip))
                self._clip_batch += 1
