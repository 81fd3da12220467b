"""The tables of one dataset: made shard after shard, opened in no time whatever their size, looked at when used.

Rows are mapped into memory, so that all processes of a machine share one copy in the page cache. Nothing is checked for
all rows at once: a row is checked whenever it is turned into a Sample, in some microseconds, and a broken one becomes a
bad sample like any other, with a reason.
"""

import base64
import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int, Shaped

from common.errors import InputError
from pipeline.shards.format import (
    MULTI_LABEL,
    SAMPLE,
    UNLABELED,
    DatasetInfo,
    Locate,
    Sample,
    Sides,
    parse_line,
    read_table,
)
from pipeline.shards.gops import GOP, GopIndex

HASH_BLOCK = 2**24  # bytes that a thread hashes at a time
HASHED_ROWS = 2**28  # bytes of the table of samples (2,800,000 of them) that are hashed at every open
HASHED_NAMES = 2**28  # bytes of the table of names that are hashed, in .2 s; a larger one, only check_shards hashes
MAX_NAME = 2**21  # bytes of a line in the table of names
REWRITE = "write them again with `python shard_tools/check_shards.py {} --rewrite-tables`"
COPIED = ("num_frames", "fps", "frame_stride", "width", "height", "offset", "size")  # from a row to its Sample


class NamesRow(msgspec.Struct, array_like=True, omit_defaults=True):
    """A line of the table of names: what a sample has of text, and what most samples do not have; see Sample."""

    key: str
    source: str
    labels: tuple[int, ...] | None = None  # where there is other than one
    segment: str = ""
    start: float = 0.0
    fields: dict[str, Any] = {}


class Tables:
    """The samples of one dataset, by number."""

    def __init__(
        self,
        info: DatasetInfo,
        first_of_shard: Int[np.ndarray, " shards"],
        samples: Shaped[np.ndarray, " samples"],
        locate: Locate,
        folder: Path,
    ) -> None:
        """Take `samples`, rows of SAMPLE; the tables of GOPs and names are opened when they are first needed."""
        self.info, self.first_of_shard, self.rows, self._locate = info, first_of_shard, samples, locate
        self.folder = folder
        self.labels: tuple[int, ...] | None = None  # in a mix, by those of this dataset; None: they are the same
        self._codecs, self._sides = list(info.codecs), list(info.codecs.values())
        self._num_gops = info.tables["gops"].num_rows if info.tables else 0

    @classmethod
    def open(cls, info: DatasetInfo, folder: Path, locate: Locate) -> "Tables":
        """Map the tables of a dataset into memory.

        Raises InputError if one is missing, cut, not of this dataset, or no longer as it was written, as far as
        `content` tells: of a label, for one, nobody would see it.
        """
        shards, samples = read_table("shards", info, locate), read_table("samples", info, locate)
        first, counts = shards["first_sample"].astype(np.int64), shards["num_samples"].astype(np.int64)
        if not (np.array_equal(first, np.cumsum(counts) - counts) and counts.sum() == len(samples) == info.num_samples):
            raise InputError(
                f"{folder} has {len(samples)} rows of samples, {counts.sum()} in its table of shards and"
                f" {info.num_samples} in dataset.json: {REWRITE.format(folder)}"
            )
        tables = cls(info, first, samples, locate, folder)
        if info.content not in ("", tables.content):
            raise InputError(f"the tables of {folder} have changed since they were written: {REWRITE.format(folder)}")
        return tables

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, number: int) -> Sample:
        """Look up a sample; where its row is broken, one that has a `problem` and else harmless values."""
        row = dict(zip(SAMPLE.names or (), self.rows[number].item(), strict=True))
        names = self._read_names(number)
        labels = {UNLABELED: None, MULTI_LABEL: names.labels}.get(row["label"], (row["label"],))
        if problem := self._problem(number, row, labels):
            stride = (self.info.frame_strides or [1])[0]
            return Sample(names.key, "", "", 1, 1.0, stride, 64, 64, None, names.source, "", problem=problem)
        if self.labels is not None and labels is not None:
            labels = tuple(self.labels[label] for label in labels)
        return Sample(
            key=names.key,
            source=names.source,
            container=self.info.containers[row["container"]],
            codec=self._codecs[row["codec"]],
            labels=labels,
            sha256=row["sha256"].hex(),
            segment=names.segment,
            start=names.start,
            fields=names.fields,
            **{name: row[name] for name in COPIED},
        )

    def read_labels(self, rows: Int[np.ndarray, " rows"]) -> list[tuple[int, ...]]:
        """Read the classes of each of some rows, as numbered in the mix."""
        labels = self.column("label", rows).tolist()
        return [
            self.sample(row).labels or () if label == MULTI_LABEL else (label,) if label >= 0 else ()
            for row, label in zip(rows.tolist(), labels, strict=True)
        ]

    def column(self, name: str, rows: slice | Int[np.ndarray, " rows"]) -> Shaped[np.ndarray, " rows"]:
        """Copy a column of some rows, with labels of the mix."""
        column = self.rows[name][rows]
        if name != "label" or self.labels is None:
            return column
        known = (column >= 0) & (column < len(self.labels))  # broken rows are for `sample` to report
        ids = np.array([*self.labels, UNLABELED], column.dtype)[np.where(known, column, -1)]
        return np.where(column == MULTI_LABEL, MULTI_LABEL, ids)

    def gops(self, number: int) -> GopIndex | None:
        """Look up the groups of pictures of a sample; None if it can only be read whole."""
        row = self.rows[number]
        first, count = int(row["first_gop"]), int(row["num_gops"])
        if not count:
            return None
        return GopIndex(np.asarray(self._gops[first : first + count]), int(row["size"]), int(row["num_frames"]))

    @cached_property
    def content(self) -> str:
        """Hash of what the tables of shards and samples say: now, which takes .25 s for a million samples on 2 cores,
        or, of tables above HASHED_ROWS, when they were made."""
        if self.info.content and self.rows.nbytes > HASHED_ROWS:
            return self.info.content
        digest = hashlib.sha256(self._hash_rows())
        for shard in self.info.shards:
            digest.update(f"{shard.name} {shard.num_samples} {shard.sha256}\n".encode())
        if self.info.multi_label:  # where there are several labels, that table has them
            digest.update(self.info.tables["names"].sha256.encode())
        return digest.hexdigest()

    def _hash_rows(self) -> bytes:
        """Hash blocks side by side."""
        step = HASH_BLOCK // SAMPLE.itemsize
        with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as threads:
            blocks = (self.rows[start : start + step] for start in range(0, len(self.rows), step))
            return b"".join(threads.map(lambda rows: hashlib.sha256(rows.tobytes()).digest(), blocks))

    def _problem(self, number: int, row: dict[str, Any], labels: tuple[int, ...] | None) -> str:
        """Say why a row cannot be used; empty if it can."""
        info, shard = self.info, int(np.searchsorted(self.first_of_shard, number, side="right")) - 1
        if row["shard"] != shard:
            return f"its row says shard {row['shard']} and stands among those of shard {shard}"
        num_bytes = info.shards[shard].num_bytes
        if not 0 < row["size"] <= num_bytes - row["offset"]:
            return f"its row says {row['size']} bytes from {row['offset']} on, of {num_bytes} in the shard"
        if not 1 <= row["num_frames"] <= row["size"]:
            return f"its row says {row['num_frames']} frames in {row['size']} bytes"
        if not 0 < row["fps"] < 1e6:  # NaN is not either
            return f"its row says {row['fps']} frames per second"
        if row["codec"] >= len(self._codecs) or row["container"] >= len(info.containers):
            return "its row says a codec or a container that the dataset does not have"
        sides = self._sides[row["codec"]]
        if not (
            sides.min_width <= row["width"] <= sides.max_width and sides.min_height <= row["height"] <= sides.max_height
        ):
            return f"its row says {row['width']}x{row['height']} pixels, as no video of the dataset has"
        if row["frame_stride"] not in info.frame_strides:
            return f"its row says every {row['frame_stride']}th frame is kept, as of no video of the dataset"
        if row["label"] == MULTI_LABEL and labels is None:
            return "its row says that its labels are in the table of names, and they are not"
        if unknown := [label for label in labels or () if not 0 <= label < len(info.classes)]:
            return f"its row says label {unknown[0]}, and there are {len(info.classes)} classes"
        if row["num_gops"] and not 2 <= row["num_gops"] <= self._num_gops - row["first_gop"]:
            return f"its row says {row['num_gops']} rows of the GOP table from {row['first_gop']} on"
        return ""

    def _read_names(self, number: int) -> "NamesRow":
        """Read a row of the table of names; where it cannot be read, the number stands in for key and source."""
        first = min(int(self.rows["name"][number]), len(self._names))
        end = self._names.find(b"\n", first, first + MAX_NAME)
        line = self._names[first:end] if end >= 0 else b""
        try:
            return parse_line(line, NamesRow)
        except (ValueError, RecursionError):
            return NamesRow(f"sample-{number}", f"sample {number}, whose name cannot be read")

    @cached_property
    def _names(self) -> bytes | mmap.mmap:
        table = self.info.tables["names"]
        path = self._locate(table)
        if not path.is_file() or path.stat().st_size != table.num_bytes or not table.num_bytes:
            raise InputError(f"{path} is missing or incomplete: {REWRITE.format(path.parent)}")
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(mapped) <= HASHED_NAMES and hashlib.sha256(mapped).hexdigest() != table.sha256:
            raise InputError(f"{path} has changed since it was written: {REWRITE.format(path.parent)}")
        return mapped

    @cached_property
    def _gops(self) -> np.ndarray:
        return read_table("gops", self.info, self._locate)


class RowWriter:
    """Turns samples into rows of the tables, shard after shard, and collects what dataset.json says of all of them."""

    def __init__(self) -> None:
        self.num_samples = self._num_gops = self._num_name_bytes = self._num_shards = self._num_unlabeled = 0
        self._codecs: dict[str, Sides] = {}  # in the order of their numbers, as are containers
        self._containers: dict[str, int] = {}
        self._strides: set[int] = set()
        self._multi_label = False

    def make_rows(self, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, bytes]:
        """Make the rows of the next shard's samples, in tar order: of SAMPLE, of GOP, and lines of names."""
        names = [_names_line(sample) for sample in samples]
        gops = [np.frombuffer(base64.b64decode(sample.gops), GOP) for sample in samples]
        rows = np.array([self._row(sample) for sample in samples], SAMPLE)
        rows["shard"] = self._num_shards
        rows["num_gops"] = [len(part) for part in gops]
        rows["name"] = self._num_name_bytes + np.cumsum([0, *map(len, names)])[:-1]
        rows["first_gop"] = self._num_gops + np.cumsum([0, *map(len, gops)])[:-1]
        self._num_shards += 1
        self.num_samples += len(samples)
        self._num_gops += sum(map(len, gops))
        self._num_name_bytes += sum(map(len, names))
        return rows, np.concatenate([np.empty(0, GOP), *gops]), b"".join(names)

    def describe(self, info: DatasetInfo) -> DatasetInfo:
        """Add to `info` what is known of all samples."""
        return replace(
            info,
            codecs=self._codecs,
            containers=list(self._containers),
            frame_strides=sorted(self._strides),
            num_unlabeled=self._num_unlabeled,
            multi_label=self._multi_label,
        )

    def _row(self, sample: Sample) -> tuple[int | float | bytes, ...]:
        width, height, stride = sides = sample.width, sample.height, sample.frame_stride
        label = UNLABELED if sample.labels is None else MULTI_LABEL if sample.label is None else sample.label
        found = Sides(1, width, width, height, height)
        self._codecs[sample.codec] = found.merge(self._codecs[sample.codec]) if sample.codec in self._codecs else found
        self._strides.add(stride)
        self._num_unlabeled += label == UNLABELED
        self._multi_label |= label == MULTI_LABEL
        codec = list(self._codecs).index(sample.codec)
        container = self._containers.setdefault(sample.container, len(self._containers))
        place = 0, label, sample.offset, sample.size, 0, 0
        return *place, sample.fps, 0, sample.num_frames, *sides, codec, container, bytes.fromhex(sample.sha256)


def _names_line(sample: Sample) -> bytes:
    """Write a line of the table of names, in ASCII whatever the letters are, without defaults at its end."""
    labels = None if sample.label is not None else sample.labels
    values = [sample.key, sample.source, labels, sample.segment, sample.start, sample.fields]
    while values[-1] in (None, "", 0.0, {}):  # not (): none of the classes
        values.pop()
    return json.dumps(values).encode() + b"\n"
