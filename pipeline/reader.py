"""Bytes of a sample out of its shard, checked against the hash that was taken when the shard was made."""

import hashlib
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from errors import InputError
from pipeline.dataset import ShardDataset
from pipeline.store import is_remote
from pipeline.video import VideoError
from pipeline.workers import Workers


class Reader:
    """Reads byte ranges of shards, of local ones where they are; safe to use from many threads."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self._downloads: Workers | None = None
        self._requested = lru_cache(maxsize=64)(self._request)
        self._file = lru_cache(maxsize=64)(self._open)  # a file that falls out is closed when its last reader is done

    def read(self, sample: int) -> bytes:
        """The video of a sample. Raises VideoError if its bytes are not those that were put there.

        The hash costs 0.6 ms a megabyte and finds what decoders do not: most flipped bytes decode to something.
        """
        video = self._dataset.samples[sample]
        if video.problem:
            raise VideoError(video.problem)
        file = self._file(int(self._dataset.shard_of[sample]))  # held here: another thread may push it out of the cache
        data = os.pread(file.fileno(), video.size, video.offset)
        if len(data) < video.size:
            raise VideoError(f"the shard ends after {len(data)} of the video's {video.size} bytes")
        if hashlib.sha256(data).hexdigest() != video.sha256:
            raise VideoError("the bytes have changed since the shard was made (sha256 differs)")
        return data

    def expect(self, samples: Iterable[int]) -> None:
        """Have the shards of samples that will be read soon downloaded in the background; returns at once."""
        for shard in {int(self._dataset.shard_of[sample]) for sample in samples}:
            if is_remote(self._dataset.shards[shard]):
                self._requested(shard)

    def close(self) -> None:
        """Close the files; reading again opens them again."""
        self._file.cache_clear()
        if self._downloads is not None:
            self._downloads.close()

    def _request(self, shard: int) -> None:
        if self._downloads is None:
            self._downloads = Workers(2, "shards")
        # An error is left for the read to find.
        self._downloads.submit(lambda _: self._local(shard))

    def _open(self, shard: int) -> BinaryIO:
        try:
            return open(self._local(shard), "rb")
        except FileNotFoundError as error:
            place = self._dataset.shards[shard]
            raise InputError(f"{place} is missing: run `python shard_tools/check_shards.py` on its folder") from error

    def _local(self, shard: int) -> Path:
        place = self._dataset.shards[shard]
        if not is_remote(place):
            return Path(place)
        return self._dataset.cache.fetch(place, version=self._dataset.info.shards[shard].sha256)
