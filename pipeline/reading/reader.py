"""Read the bytes of samples, checked against the hashes taken at shard creation, from files or object storage."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common.errors import InputError
from pipeline.planning.plan import ClipPlan
from pipeline.reading.storage import is_remote
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError

DOWNLOAD_THREADS = 8
BATCHES_AHEAD = 256  # whose shards are downloaded; these stay in the cache, so early costs nothing


class Reader:
    """Safe to use from many threads."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset

    def read(self, sample: int) -> bytes:
        """Read a whole video; see `clip`."""
        return self.clip(sample, ()).data

    def clip(self, sample: int, frames: Sequence[int]) -> VideoSlice:
        """Read the GOPs of a video that hold these frames, or all of it where there are no closed GOPs or no frames;
        from the store if the local copy of a remote shard, which is removed, is damaged.

        Raises VideoError if the bytes are not those that were stored, InputError if they cannot be had.
        """
        video, shard = self._dataset.samples[sample], int(self._dataset.shard_of(sample))
        if video.problem:
            raise VideoError(video.problem)
        cache, url, file = self._dataset.cache, self._dataset.shards[shard], self.find_shard(shard)
        gops = self._dataset.gops[sample] if frames else None
        slice_video = partial(gops.slice_video if gops else partial(check_video, video), tuple(frames))
        if is_remote(url):
            cache.count(**{"cache_hits" if file else "streamed_clips": 1})
        if file:
            try:
                with open(file, "rb", buffering=0) as opened:
                    return slice_video(lambda offset, size: os.pread(opened.fileno(), size, video.offset + offset))
            except FileNotFoundError as error:  # or another process has evicted it
                if not is_remote(url):
                    advice = "run `python shard_tools/check_shards.py` on its folder"
                    raise InputError(f"{file} is missing: {advice}") from error
            except VideoError:
                if not is_remote(url):
                    raise
                file.unlink(missing_ok=True)
        store, name = cache.store(url)
        return slice_video(lambda offset, size: store.read_range(name, start := video.offset + offset, start + size))

    def find_shard(self, shard: int) -> Path | None:
        """Return the file of a shard, downloaded if it is remote; None if the cache does not keep it."""
        url, info = self._dataset.shards[shard], self._dataset.info.shards[shard]
        if not is_remote(url):
            return Path(url)
        return self._dataset.cache.fetch(url, info.sha256, info.num_bytes)


def check_video(video: Sample, frames: tuple[int, ...], read: Callable[[int, int], bytes]) -> VideoSlice:
    """Read a whole video. The hash costs .6 ms per megabyte and finds what decoders do not: most flipped bytes decode
    to something."""
    data = read(0, video.size)
    if len(data) < video.size:
        raise VideoError(f"the shard ends after {len(data)} of the video's {video.size} bytes")
    if hashlib.sha256(data).hexdigest() != video.sha256:
        raise VideoError("the bytes have changed since the shard was made (sha256 differs)")
    return VideoSlice(data, frames, video.num_frames)


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
            for shard in dict.fromkeys(int(self._dataset.shard_of(sample)) for sample in samples):
                if shard % self._num_workers == self._worker and shard not in self._shards:
                    self._shards.add(shard)  # whoever needs one whose download fails meets the error again
                    self._threads.submit(self._reader.find_shard, shard)
            self._next_batch += 1
