"""The tables of one dataset: made shard after shard, opened in no time whatever their size, looked at when used.

Rows are mapped into memory, so that all processes of a machine share one copy in the page cache. Nothing is checked for
all rows at once: a row is checked whenever it is turned into a Sample, in some microseconds, and a broken one becomes a
bad sample like any other, with a reason.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from adamae.common.errors import InputError
from adamae.pipeline.reading.cache import ShardCache
from adamae.pipeline.reading.storage import is_remote
from adamae.pipeline.shards.format import (
    DATASET_FILE,
    MULTI_LABEL,
    REWRITE,
    SAMPLE,
    UNLABELED,
    DatasetInfo,
    Locate,
    Sample,
    TableInfo,
    open_table,
    parse_dataset_info,
    parse_line,
    read_dataset_info,
)
from adamae.pipeline.shards.gops import GopIndex

MAX_NAME = 2**21  # bytes of a line in the table of names
ROW_FIELDS = (
    "num_frames",
    "fps",
    "frame_stride",
    "width",
    "height",
    "offset",
    "size",
)  # of a Sample in its row


class NameLine(NamedTuple):
    """A line of the table of names; see Sample."""

    key: str
    source: str
    labels: tuple[int, ...] | None
    segment: str
    start: float
    fields: dict[str, Any]


class Tables:
    """The samples of one dataset, by number."""

    def __init__(
        self,
        folder: str,
        info: DatasetInfo,
        counts: Int[np.ndarray, " shards"],
        samples: Shaped[np.ndarray, " samples"],
        locate: Locate,
    ) -> None:
        """samples: rows of SAMPLE; counts: of them in each shard; GOPs and names are opened when they are needed."""
        self.folder, self.info, self.counts, self.rows, self._locate = (
            folder,
            info,
            counts,
            samples,
            locate,
        )
        self._ends_of_shards = np.cumsum(counts)
        self.label_ids = list(range(len(info.classes)))  # of the mix, by labels of this dataset
        self._codecs, self._size_ranges = list(info.codecs), list(info.codecs.values())

    @classmethod
    def open(cls, folder: str, cache: ShardCache) -> "Tables":
        """Map the tables in a folder, or the copies of them that are cached, into memory.

        Raise InputError if one is missing, changed or not the one that dataset.json describes, or the dataset is empty.
        """

        def locate(table: TableInfo) -> Path:
            url = f"{folder.rstrip('/')}/{table.file}"
            return (
                cache.fetch_table(url, table.sha256, table.num_bytes)
                if is_remote(folder)
                else Path(url)
            )

        if is_remote(folder):
            url = f"{folder.rstrip('/')}/{DATASET_FILE}"
            store, name = cache.store(url)
            if (data := store.read(name)) is None:
                raise InputError(f"{url} does not exist")
            info = parse_dataset_info(data, url, locate)
        else:
            info = read_dataset_info(Path(folder))
        if not info.num_samples:
            raise InputError(f"{folder} holds no video: see its rejected.jsonl")
        shards, samples = (open_table(name, info, locate) for name in ("shards", "samples"))
        first, counts = (
            shards["first_sample"].astype(np.int64),
            shards["num_samples"].astype(np.int64),
        )
        if not (
            np.array_equal(first, np.cumsum(counts) - counts)
            and counts.sum() == len(samples) == info.num_samples
        ):
            raise InputError(
                f"{folder} has {len(samples)} rows of samples, {counts.sum()} in its table of shards and"
                f" {info.num_samples} in dataset.json: {REWRITE.format(folder)}"
            )
        return cls(folder, info, counts, samples, locate)

    def locate_shard(self, shard: int) -> str:
        return f"{self.folder.rstrip('/')}/{self.info.shards[shard].name}"

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, number: int) -> Sample:
        """Look up a sample; where its row is broken, one that has a `problem` and else harmless values."""
        row = dict(zip(SAMPLE.names or (), self.rows[number].item(), strict=True))
        end = int(self.rows["name"][number + 1]) if number + 1 < len(self) else len(self._names)
        line = self._names[row["name"] : min(end, row["name"] + MAX_NAME)].tobytes()
        try:
            names = parse_line(line, NameLine)
            problem = self._find_problem(number, row, names.labels)
        except (ValueError, RecursionError):
            names = NameLine(
                f"sample-{number}", f"sample {number}, whose name cannot be read", None, "", 0.0, {}
            )
            problem = "its line of the table of names cannot be read"
        if problem:
            stride = (self.info.frame_strides or [1])[0]
            return Sample(
                names.key, "", "", 1, 1.0, stride, 64, 64, None, names.source, "", problem=problem
            )
        labels = (
            None if names.labels is None else tuple(self.label_ids[label] for label in names.labels)
        )
        return Sample(
            container=self.info.containers[row["container"]],
            codec=self._codecs[row["codec"]],
            sha256=row["sha256"].hex(),
            **{name: row[name] for name in ROW_FIELDS},
            **names._replace(labels=labels)._asdict(),
        )

    def read_labels(self, rows: Int[np.ndarray, " rows"]) -> list[tuple[int, ...]]:
        """Read the classes of each of some rows, as numbered in the mix."""
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
        """Copy a column of some rows, with labels of the mix."""
        column = self.rows[name][rows]
        if name != "label":
            return column
        known = (column >= 0) & (
            column < len(self.label_ids)
        )  # broken rows are for `sample` to report
        labels = np.array([*self.label_ids, UNLABELED], column.dtype)[np.where(known, column, -1)]
        return np.where(column == MULTI_LABEL, MULTI_LABEL, labels)

    def gops(self, number: int) -> GopIndex | None:
        """Look up the groups of pictures of a sample; None if it can only be read whole."""
        first, count, size, num_frames = self.rows[["first_gop", "num_gops", "size", "num_frames"]][
            number
        ].item()
        return GopIndex(self._gops[first : first + count], size, num_frames) if count else None

    def _find_problem(
        self, number: int, row: dict[str, Any], labels: tuple[int, ...] | None
    ) -> str:
        """Say why a row cannot be used; empty if it can."""
        info, num_classes = self.info, len(self.info.classes)
        shard_bytes = info.shards[
            int(np.searchsorted(self._ends_of_shards, number, side="right"))
        ].num_bytes
        if row["codec"] >= len(self._codecs) or row["container"] >= len(info.containers):
            return "its row has a codec or a container that the dataset does not have"
        end, sizes = row["offset"] + row["size"], self._size_ranges[row["codec"]]
        are_labels = row["label"] == summarize_labels(labels) and all(
            0 <= x < num_classes for x in labels or ()
        )
        checks = [
            (
                row["offset"] < end <= shard_bytes,
                f"the bytes {row['offset']} to {end} of {shard_bytes} in the shard",
            ),
            (
                1 <= row["num_frames"] <= row["size"],
                f"{row['num_frames']} frames in {row['size']} bytes",
            ),
            (0 < row["fps"] < 1e6, f"{row['fps']} frames per second"),  # NaN is not either
            (sizes.contain(row["width"], row["height"]), f"{row['width']}x{row['height']} pixels"),
            (row["frame_stride"] in info.frame_strides, f"a frame stride of {row['frame_stride']}"),
            (
                are_labels,
                f"label {row['label']}, its line of names {labels}, and there are {num_classes} classes",
            ),
        ]
        return next((f"its row has {what}" for is_right, what in checks if not is_right), "")

    @cached_property
    def _names(self) -> np.ndarray:
        return open_table("names", self.info, self._locate)

    @cached_property
    def _gops(self) -> np.ndarray:
        return open_table("gops", self.info, self._locate)


def summarize_labels(labels: tuple[int, ...] | None) -> int:
    """Return what the column `label` holds: the label, where there is just one."""
    if labels is None:
        return UNLABELED
    if len(labels) == 1:
        return labels[0]
    return MULTI_LABEL
