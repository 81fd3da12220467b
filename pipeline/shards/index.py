"""The tables of one dataset, which are opened in milliseconds however many samples they have.

Tables are memory-mapped, so that all processes of a machine share one copy in the page cache. Not
all rows are checked at once: a row is checked when it is turned into a Sample, in some
microseconds, and a broken one becomes a bad sample with a reason, which training replaces like a
broken video.
"""

import mmap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt64

from adamae.common.errors import InputError
from adamae.pipeline.shards.format import (
    MULTI_LABEL,
    SAMPLE,
    UNLABELED,
    DatasetInfo,
    Sample,
    TableInfo,
)
from adamae.pipeline.shards.gops import GopIndex
from adamae.pipeline.shards.read_format import (
    REWRITE,
    Locate,
    open_table,
    parse_line,
    read_dataset_info,
)

# Rows of the table of samples that are read at once, 24 MB.
BLOCK_ROWS = 2**18
# The largest number of bytes that are read of a line of the table of names.
MAX_NAME_BYTES = 2**21
# Fields of a Sample that are columns of its row.
ROW_FIELDS = ("num_frames", "fps", "frame_stride", "width", "height", "offset", "size")


class NameLine(NamedTuple):
    """A line of the table of names; see Sample."""

    key: str
    source: str
    labels: tuple[int, ...] | None
    segment: str
    start: float
    fields: dict[str, Any]


class Tables:
    """The samples of one dataset in a folder; see remote_index.py for those at a URL."""

    def __init__(
        self, folder: str, info: DatasetInfo, counts: Int[np.ndarray, " shards"], locate: Locate
    ) -> None:
        """Hold the tables, which are opened when they are first needed.

        counts: samples of each shard; locate: returns the file of a table.
        """
        self.folder = folder
        self.info = info
        self.counts = counts
        self._locate = locate
        self._ends_of_shards = np.cumsum(counts)
        # Class ids in the mix of this dataset's labels. ShardDataset sets them for a mix of several
        # datasets.
        self.label_ids = list(range(len(info.classes)))
        # In the order of the column `codec`, whose rows hold indices.
        self._codecs = list(info.codecs)
        self._size_ranges = list(info.codecs.values())

    @classmethod
    def open(cls, folder: str) -> "Tables":
        """Map the tables in a folder into memory.

        Raise InputError if one is missing, changed or not the one that dataset.json describes, or
        if the dataset is empty.
        """
        path = Path(folder)
        info = read_dataset_info(path)

        def locate(table: TableInfo) -> Path:
            return path / table.file

        tables = cls(folder, info, count_samples(folder, info, locate), locate)
        if len(tables.rows) != info.num_samples:
            raise InputError(
                f"{folder} has {len(tables.rows)} rows of samples and {info.num_samples} in"
                f" dataset.json: {REWRITE.format(folder)}"
            )
        return tables

    def locate_shard(self, shard: int) -> str:
        """Return the path or URL of a shard."""
        return f"{self.folder.rstrip('/')}/{self.info.shards[shard].name}"

    def __len__(self) -> int:
        return self.info.num_samples

    @cached_property
    def rows(self) -> Shaped[np.ndarray, " samples"]:
        """The rows of SAMPLE."""
        return open_table("samples", self.info, self._locate)

    def sample(self, index: int) -> Sample:
        """Read a sample. If its row is broken, the sample has a `problem` and harmless values."""
        row = dict(zip(SAMPLE.names or (), self.rows[index].item(), strict=True))
        try:
            names = parse_line(self._read_name(index, row["name"]), NameLine)
            problem = self._find_problem(index, row, names.labels)
        except (ValueError, RecursionError):
            source = f"sample {index}, whose name cannot be read"
            names = NameLine(f"sample-{index}", source, None, "", 0.0, {})
            problem = "its line of the table of names cannot be read"
        if problem:
            return self._make_bad_sample(names, problem)
        labels = names.labels
        if labels is not None:
            labels = tuple(self.label_ids[label] for label in labels)
        return Sample(
            container=self.info.containers[row["container"]],
            codec=self._codecs[row["codec"]],
            sha256=row["sha256"].hex(),
            **{name: row[name] for name in ROW_FIELDS},
            **names._replace(labels=labels)._asdict(),
        )

    def _read_name(self, index: int, start: int) -> bytes:
        """Read the line of a sample in the table of names."""
        end = len(self._names)
        if index + 1 < len(self):
            end = int(self.rows["name"][index + 1])
        return self._names[start : min(end, start + MAX_NAME_BYTES)].tobytes()

    def _make_bad_sample(self, names: NameLine, problem: str) -> Sample:
        """Return a sample that cannot be read, but planned and cropped like any other."""
        stride = 1
        if self.info.frame_strides:
            stride = self.info.frame_strides[0]
        return Sample(
            key=names.key,
            container="",
            codec="",
            num_frames=1,
            fps=1.0,
            frame_stride=stride,
            width=64,
            height=64,
            labels=None,
            source=names.source,
            sha256="",
            problem=problem,
        )

    def read_labels(self, rows: Int[np.ndarray, " rows"]) -> list[tuple[int, ...]]:
        """Return the class ids in the mix of each of some rows."""
        classes: list[tuple[int, ...]] = []
        for row, label in zip(rows.tolist(), self.column("label", rows).tolist(), strict=True):
            if label == MULTI_LABEL:
                classes.append(self.sample(row).labels or ())
            elif label >= 0:
                classes.append((label,))
            else:
                classes.append(())
        return classes

    def column(
        self, name: str, rows: slice | Int[np.ndarray, " rows"]
    ) -> Shaped[np.ndarray, " rows"]:
        """Copy a column of some rows; labels become class ids in the mix."""
        column = self._select(rows)[name]
        if name != "label":
            return column
        # Labels of broken rows become UNLABELED here; `sample` reports them.
        is_class = (column >= 0) & (column < len(self.label_ids))
        ids = np.array([*self.label_ids, UNLABELED], column.dtype)
        unlabeled = len(ids) - 1
        labels = ids[np.where(is_class, column, unlabeled)]
        return np.where(column == MULTI_LABEL, MULTI_LABEL, labels)

    def _select(self, rows: slice | Int[np.ndarray, " rows"]) -> Shaped[np.ndarray, " rows"]:
        return self.rows[rows]

    def read_hashes(self) -> Iterator[UInt64[np.ndarray, "rows 4"]]:
        """Yield the SHA-256 of all samples in blocks, each as four words of the hash in order.

        A pass over a mapped table would fill the memory of the process, 9 GB for 100 million
        samples, so each block is unmapped when the next one is asked for.
        """
        for start in range(0, len(self), BLOCK_ROWS):
            hashes = np.ascontiguousarray(self.rows["sha256"][start : start + BLOCK_ROWS])
            # The order of big-endian words is that of the hashes.
            yield hashes.view(">u8").reshape(-1, 4).astype(np.uint64)
            release_pages(self.rows)

    def gops(self, index: int) -> GopIndex | None:
        """Return the GOPs of a sample; None if it can only be read whole."""
        row = self.rows[["first_gop", "num_gops", "size", "num_frames"]][index]
        first, count, size, num_frames = row.item()
        if not count:
            return None
        return GopIndex(self._gops[first : first + count], size, num_frames)

    def _find_problem(self, index: int, row: dict[str, Any], labels: tuple[int, ...] | None) -> str:
        """Return why a row cannot be used, or an empty string."""
        if row["codec"] >= len(self._codecs) or row["container"] >= len(self.info.containers):
            return "its row has a codec or a container that the dataset does not have"
        shard = int(np.searchsorted(self._ends_of_shards, index, side="right"))
        shard_bytes = self.info.shards[shard].num_bytes
        end = row["offset"] + row["size"]
        if not row["offset"] < end <= shard_bytes:
            return f"its row has the bytes {row['offset']} to {end} of {shard_bytes} in the shard"
        if not 1 <= row["num_frames"] <= row["size"]:
            return f"its row has {row['num_frames']} frames in {row['size']} bytes"
        # NaN is refused too, as it compares false.
        if not 0 < row["fps"] < 1e6:
            return f"its row has {row['fps']} frames per second"
        if not self._size_ranges[row["codec"]].contains(row["width"], row["height"]):
            return f"its row has {row['width']}x{row['height']} pixels"
        if row["frame_stride"] not in self.info.frame_strides:
            return f"its row has a frame stride of {row['frame_stride']}"
        num_classes = len(self.info.classes)
        are_classes = all(0 <= label < num_classes for label in labels or ())
        if row["label"] != summarize_labels(labels) or not are_classes:
            return (
                f"its row has label {row['label']}, its line of names {labels}, and there are"
                f" {num_classes} classes"
            )
        return ""

    @cached_property
    def _names(self) -> np.ndarray:
        return open_table("names", self.info, self._locate)

    @cached_property
    def _gops(self) -> np.ndarray:
        return open_table("gops", self.info, self._locate)


def count_samples(folder: str, info: DatasetInfo, locate: Locate) -> Int[np.ndarray, " shards"]:
    """Return the number of samples of each shard; raise InputError if that contradicts `info`."""
    if not info.num_samples:
        raise InputError(f"{folder} holds no video: see its rejected.jsonl")
    shards = open_table("shards", info, locate)
    first = shards["first_sample"].astype(np.int64)
    counts = shards["num_samples"].astype(np.int64)
    are_consecutive = np.array_equal(first, np.cumsum(counts) - counts)
    if not are_consecutive or counts.sum() != info.num_samples:
        raise InputError(
            f"{folder} has {counts.sum()} samples in its table of shards and {info.num_samples} in"
            f" dataset.json: {REWRITE.format(folder)}"
        )
    return counts


def release_pages(table: np.ndarray) -> None:
    """Give back the memory into which a mapped table was read; the page cache keeps it."""
    owner: Any = table
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)


def summarize_labels(labels: tuple[int, ...] | None) -> int:
    """Return what the column `label` holds: the label, if there is exactly one."""
    if labels is None:
        return UNLABELED
    if len(labels) == 1:
        return labels[0]
    return MULTI_LABEL
