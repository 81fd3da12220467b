"""The samples of one dataset in object storage.

Of a hundred million samples a node needs those of its shards, so each shard's are read from its
samples.jsonl when the first of them is needed: a request for some hundred kilobytes, beside the tar
of some ten megabytes that follows. The table of all samples (92 bytes each) is downloaded only for
what looks at all of them: class labels, data.subset, the search for videos of both splits.
"""

import base64
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Int, Shaped

from adamae.common.errors import InputError
from adamae.pipeline.reading.cache import ShardCache
from adamae.pipeline.shards.format import (
    DATASET_FILE,
    SAMPLE,
    DatasetInfo,
    Sample,
    TableInfo,
)
from adamae.pipeline.shards.gops import GOP, GopIndex
from adamae.pipeline.shards.index import Tables, count_samples
from adamae.pipeline.shards.read_format import Locate, parse_dataset_info, parse_line

# Shards whose lines a process holds, some hundred kilobytes each. A window has 16 by default.
MAX_RECENT_SHARDS = 64


class RemoteTables(Tables):
    """The samples of one dataset at a URL."""

    def __init__(
        self,
        url: str,
        info: DatasetInfo,
        counts: Int[np.ndarray, " shards"],
        locate: Locate,
        cache: ShardCache,
    ) -> None:
        """Hold what has been read at open; see Tables."""
        super().__init__(url, info, counts, locate)
        self._cache = cache
        self._read_lines = lru_cache(MAX_RECENT_SHARDS)(self._split_lines)
        # Startup warnings look at several columns of the same rows.
        self._read_first_rows = lru_cache(1)(self._download_first_rows)

    @classmethod
    def open_url(cls, url: str, cache: ShardCache, description: bytes) -> "RemoteTables":
        """Download the table of shards that `description`, a dataset.json, names.

        Raise InputError as Tables.open does.
        """
        root = url.rstrip("/")

        def download(table: TableInfo) -> Path:
            return cache.fetch_table(f"{root}/{table.file}", table.sha256, table.num_bytes)

        info = parse_dataset_info(description, f"{root}/{DATASET_FILE}", download)
        return cls(root, info, count_samples(root, info, download), download, cache)

    def sample(self, index: int) -> Sample:
        """Read a sample; the hash of its shard's samples.jsonl vouches for its values."""
        sample = self._parse(index)
        labels = sample.labels
        if labels is not None:
            labels = tuple(self.label_ids[label] for label in labels)
        return replace(sample, labels=labels, gops="")

    def gops(self, index: int) -> GopIndex | None:
        """Return the GOPs of a sample; None if it can only be read whole."""
        sample = self._parse(index)
        if not sample.gops:
            return None
        rows = np.frombuffer(base64.b64decode(sample.gops), GOP)
        return GopIndex(rows, sample.size, sample.num_frames)

    def read_labels(self, rows: Int[np.ndarray, " rows"]) -> list[tuple[int, ...]]:
        """Return the class ids in the mix of each of some rows."""
        return [self.sample(row).labels or () for row in rows.tolist()]

    def fetch_index(self, shard: int) -> bytes:
        """Return the samples.jsonl of a shard, from the cache if it is there."""
        info = self.info.shards[shard]
        return self._cache.read_index(f"{self.folder}/{info.samples_name}", info.samples_sha256)

    def _parse(self, index: int) -> Sample:
        shard = int(np.searchsorted(self._ends_of_shards, index, side="right"))
        first = int(self._ends_of_shards[shard] - self.counts[shard])
        try:
            return parse_line(self._read_lines(shard)[index - first], Sample)
        except (ValueError, IndexError, RecursionError) as error:
            raise InputError(
                f"the {self.info.shards[shard].samples_name} of {self.folder} is broken ({error}):"
                " run `python shard_tools/check_shards.py` on the folder it was uploaded from"
            ) from error

    def _split_lines(self, shard: int) -> Sequence[bytes]:
        return self.fetch_index(shard).splitlines()

    def _select(self, rows: slice | Int[np.ndarray, " rows"]) -> Shaped[np.ndarray, " rows"]:
        if isinstance(rows, slice) and rows.stop is not None and rows.stop < len(self):
            return self._read_first_rows(rows.stop)
        return super()._select(rows)

    def _download_first_rows(self, count: int) -> Shaped[np.ndarray, " rows"]:
        """Read the first rows of the table of samples; no hash covers a part of it."""
        table = self.info.tables["samples"]
        store, name = self._cache.store(f"{self.folder}/{table.file}")
        # The header is what lies before the rows.
        start = table.num_bytes - table.num_rows * SAMPLE.itemsize
        end = start + count * SAMPLE.itemsize
        content = store.read_range(name, start, end)
        return np.frombuffer(content, SAMPLE)
