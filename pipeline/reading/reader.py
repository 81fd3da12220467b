"""Read the bytes of samples, checked against the hashes taken at shard creation, from files or object storage."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.errors import InputError
from pipeline.planning.plan import ClipPlan
from pipeline.reading.storage import is_remote
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import Sample
from pipeline.shards.gops import GopIndex, VideoSlice
from pipeline.video_error import VideoError

DOWNLOAD_THREADS = 8
BATCHES_AHEAD = 256  # whose shards are downloaded; these stay in the cache, so early costs nothing
ReadRange = Callable[[int, int], bytes]  # offset in the video, bytes: fewer at the end of the shard
T = TypeVar("T")


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

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset

    def read(self, sample: int) -> bytes:
        """Read a whole video; raises VideoError if its bytes are not those that were stored."""
        return self._read_checked(sample, partial(parse_video, self._dataset.samples[sample]))

    def clip(self, sample: int, frames: Sequence[int]) -> VideoSlice:
        """Read the GOPs of a video that hold these frames, or all of it where it has no closed GOPs.

        Waits for the download of a remote shard. Raises VideoError if the bytes are not those that were stored,
        InputError if they cannot be had.
        """
        video, gops = self._dataset.samples[sample], self._dataset.gops[sample]
        return self._read_checked(sample, partial(parse_clip, video, gops, tuple(frames)))

    def find_shard(self, shard: int) -> Path | None:
        """Return the file of a shard, downloaded if it is remote; None if the cache does not keep it."""
        url, info = self._dataset.shards[shard], self._dataset.info.shards[shard]
        if not is_remote(url):
            return Path(url)
        return self._dataset.cache.fetch(url, info.sha256, info.num_bytes)

    def _read_checked(self, sample: int, parse: Callable[[ReadRange], T]) -> T:
        """Call `parse`; if the local copy of a remote shard is damaged, remove it and call again with the store's."""
        video, shard = self._dataset.samples[sample], int(self._dataset.shard_of[sample])
        if video.problem:
            raise VideoError(video.problem)
        cache, url = self._dataset.cache, self._dataset.shards[shard]
        if not is_remote(url):
            return read_file(Path(url), video, parse)
        copy = self.find_shard(shard)
        cache.count(**{"cache_hits" if copy else "streamed_clips": 1})
        if copy:
            try:
                return read_file(copy, video, parse)
            except InputError:  # it is missing: another process has evicted it
                pass
            except VideoError:
                copy.unlink(missing_ok=True)
        store, name = cache.store(url)
        return parse(lambda offset, size: store.read_range(name, first := video.offset + offset, first + size))


class LookAhead:
    """Downloads the shards of the next batches of a plan in threads: those that are this worker's, of `num_workers`."""

    def __init__(self, reader: Reader, dataset: ShardDataset, plan: ClipPlan, worker: int, num_workers: int) -> None:
        self._reader, self._dataset, self._plan = reader, dataset, plan
        self._worker, self._num_workers = worker, num_workers
        self._threads = ThreadPoolExecutor(DOWNLOAD_THREADS)
        self._next_batch = 0  # to look at
        self._shards: set[int] = set()  # seen

    def advance(self, batch: int) -> None:
        """Look ahead from `batch`; return at once."""
        self._next_batch = max(self._next_batch, batch)
        while self._next_batch <= batch + BATCHES_AHEAD and (samples := self._plan.samples(self._next_batch)):
            for shard in dict.fromkeys(int(self._dataset.shard_of[sample]) for sample in samples):
                if shard % self._num_workers == self._worker and shard not in self._shards:
                    self._shards.add(shard)  # whoever needs one whose download fails meets the error again
                    self._threads.submit(self._reader.find_shard, shard)
            self._next_batch += 1
