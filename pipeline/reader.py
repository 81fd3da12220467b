"""Bytes of a sample out of its shard, checked against the hashes that were taken when the shard was made."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from errors import InputError
from pipeline.dataset import ShardDataset
from pipeline.groups import Cut
from pipeline.shards import Sample
from pipeline.store import is_remote
from pipeline.video_error import VideoError
from pipeline.workers import Task, Workers

OPENS = 5  # tries to open a copy before another process makes room of it
T = TypeVar("T")


class Reader:
    """Reads byte ranges of shards, of local ones where they are; safe to use from many threads."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self._downloads: Workers | None = None
        self._closed = False
        self._starting = threading.Lock()  # no thread begins after the end
        self._requested = lru_cache(maxsize=64)(self._request)
        self._file = lru_cache(maxsize=64)(self._open)  # a file that falls out is closed when its last reader is done
        self._renewed: set[int] = set()
        self._renewing = threading.Lock()

    def download(self, sample: int, task: Task) -> None:
        """Have the sample's shard here; returns at once if it is. The time that this takes is none of the task's.

        Raises InputError if the object store does not give it.
        """
        shard = int(self._dataset.shard_of[sample])
        if is_remote(self._dataset.shards[shard]):
            with task.clock_stopped():
                self._file(shard)

    def read(self, sample: int) -> bytes:
        """The video of a sample. Raises VideoError if its bytes are not those that were put there.

        The hash costs 0.6 ms a megabyte and finds what decoders do not: most flipped bytes decode to something.
        """
        shard, video = int(self._dataset.shard_of[sample]), self._usable(sample)
        return self._tried(shard, partial(self._whole, shard, video))

    def clip(self, sample: int, frames: Sequence[int]) -> Cut:
        """What of a sample's video these frames take: their groups of pictures where it has such, else all of it.

        Raises VideoError if the bytes are not those that were put there.
        """
        shard, video = int(self._dataset.shard_of[sample]), self._usable(sample)
        groups = self._dataset.groups(sample)
        if groups is None:
            return Cut(self.read(sample), tuple(frames), video.num_frames)
        return self._tried(shard, partial(groups.clip_bytes, frames, partial(self._range, shard, video.offset)))

    def _usable(self, sample: int) -> Sample:
        video = self._dataset.samples[sample]
        if video.problem:
            raise VideoError(video.problem)
        return video

    def _tried(self, shard: int, read: Callable[[], T]) -> T:
        try:
            return read()
        except VideoError:
            if not self._renew(shard):
                raise
            return read()

    def _whole(self, shard: int, video: Sample) -> bytes:
        data = self._range(shard, 0, video.offset, video.size)
        if len(data) < video.size:
            raise VideoError(f"the shard ends after {len(data)} of the video's {video.size} bytes")
        if hashlib.sha256(data).hexdigest() != video.sha256:
            raise VideoError("the bytes have changed since the shard was made (sha256 differs)")
        return data

    def _range(self, shard: int, start: int, offset: int, size: int) -> bytes:
        """`size` bytes, fewer at the end of the shard, from `offset` behind `start` on."""
        file = self._file(shard)  # held here: another thread may push it out of the cache
        return os.pread(file.fileno(), size, start + offset)

    def _renew(self, shard: int) -> bool:
        """Download a shard anew if its copy has been damaged here; whether that may have helped."""
        if not is_remote(self._dataset.shards[shard]):
            return False
        with self._renewing:
            if shard not in self._renewed:
                self._renewed.add(shard)
                self._local(shard, fresh=True)
                self._file.cache_clear()
        return True

    def expect(self, samples: Iterable[int]) -> None:
        """Have the shards of samples that will be read soon downloaded in the background; returns at once."""
        for shard in {int(self._dataset.shard_of[sample]) for sample in samples}:
            if is_remote(self._dataset.shards[shard]):
                self._requested(shard)

    def close(self) -> None:
        """Stop the downloads and close the files. What is still to be read opens them again, but downloads nothing."""
        with self._starting:
            self._closed = True
        self._file.cache_clear()
        if self._downloads is not None:
            self._downloads.close()

    def _request(self, shard: int) -> None:
        with self._starting:
            if self._closed:
                return
            if self._downloads is None:
                self._downloads = Workers(2, "shards")
        # An error is left for the read to find.
        self._downloads.submit(lambda _: self._local(shard))

    def _open(self, shard: int) -> BinaryIO:
        place = self._dataset.shards[shard]
        for _ in range(OPENS if is_remote(place) else 1):
            with suppress(FileNotFoundError):
                return open(self._local(shard), "rb")
        if is_remote(place):
            raise InputError(f"the cache is too small to hold {place} until it is opened: raise data.cache_gib")
        raise InputError(f"{place} is missing: run `python shard_tools/check_shards.py` on its folder")

    def _local(self, shard: int, *, fresh: bool = False) -> Path:
        place = self._dataset.shards[shard]
        if not is_remote(place):
            return Path(place)
        info = self._dataset.info.shards[shard]
        return self._dataset.cache.fetch(
            place, version=info.sha256, size=info.num_bytes, fresh=fresh, given_up=lambda: self._closed
        )
