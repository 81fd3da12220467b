"""The tables of one dataset, opened in no time whatever their size, and its samples, looked at when they are used.

Rows are mapped into memory, so that all processes of a machine share one copy in the page cache. Nothing is checked for
all rows at once: a row is checked whenever it is turned into a Sample, in some microseconds, and a broken one becomes a
bad sample like any other, with a reason.
"""

import hashlib
import itertools
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from common.errors import InputError
from common.logging import log
from pipeline.shards.format import SAMPLE, DatasetInfo, Locate, Sample, read_lines, read_table
from pipeline.shards.gops import GOP, GopIndex
from pipeline.shards.rows import RowWriter

HASH_BLOCK = 2**24  # bytes that a thread hashes at a time
HASHED_ROWS = 2**28  # bytes of the table of samples (2,800,000 of them) that are hashed at every open
CHECKED_NAMES = 2**28  # bytes of the table of names that are hashed, in .2 s; a larger one, only check_shards hashes
MAX_NAME = 2**16  # bytes of a line in the table of names
LAZY = ("key", "source")  # fields of a Sample that the table of names holds
ROW_FIELDS = ("container", "codec", "num_frames", "fps", "frame_stride", "width", "height", "label", "sha256", "offset",
              "size")  # fmt: skip


class IndexedSample(Sample):
    """A sample out of the tables; its key and source are read when they are asked for."""

    def __getattr__(self, name: str) -> Any:  # asked only for what is not there yet
        if name not in LAZY or "_read_names" not in self.__dict__:
            raise AttributeError(name)
        self.__dict__.update(zip(LAZY, self.__dict__["_read_names"](), strict=True))
        return self.__dict__[name]

    @classmethod
    def of(cls, read_names: Callable[[], tuple[str, str]], **values: Any) -> "IndexedSample":
        sample = object.__new__(cls)
        sample.__dict__.update(values, _read_names=read_names)
        return sample


class Tables:
    """The samples of one dataset, by number."""

    def __init__(
        self,
        info: DatasetInfo,
        first_of_shard: Int[np.ndarray, " shards"],
        samples: Shaped[np.ndarray, " samples"],
        tables: Mapping[str, Path | np.ndarray | bytes],
        problems: Mapping[int, str] | None = None,
    ) -> None:
        """`samples` are rows of SAMPLE; `tables` has "gops" and "names", as files or as what would be in them.

        `problems` are known of some samples beforehand.
        """
        self.info, self.first_of_shard, self.rows = info, first_of_shard, samples
        self._tables, self._problems = tables, dict(problems or {})
        self._codecs, self._sides = list(info.codecs), list(info.codecs.values())
        self._num_gops = info.tables["gops"].num_rows if info.tables else 0

    @classmethod
    def open(cls, info: DatasetInfo, folder: Path, locate: Locate) -> "Tables":
        """Map the tables of a dataset into memory; of schema version 1, make them out of those of its shards.

        Raises InputError if one is missing, cut, or not of this dataset.
        """
        if info.schema_version == 1:
            return _read_version_1(info, folder)
        shards, samples = read_table("shards", info, locate), read_table("samples", info, locate)
        first, counts = shards["first_sample"].astype(np.int64), shards["num_samples"].astype(np.int64)
        if not (np.array_equal(first, np.cumsum(counts) - counts) and counts.sum() == len(samples) == info.num_samples):
            raise InputError(
                f"{folder} has {len(samples)} rows of samples, {counts.sum()} in its table of shards and"
                f" {info.num_samples} in dataset.json: write them again with `python shard_tools/check_shards.py"
                f" --rewrite-tables {folder}`"
            )
        return cls(info, first, samples, _Located(info, locate))

    def __len__(self) -> int:
        return len(self.rows)

    def shard_of(self, number: int) -> int:
        return int(np.searchsorted(self.first_of_shard, number, side="right")) - 1

    def sample(self, number: int) -> Sample:
        """Sample `number`; where its row is broken, one that has a `problem` and else harmless values."""
        row = dict(zip(SAMPLE.names or (), self.rows[number].item(), strict=True))
        problem = self._problems.get(number) or self._problem(number, row)
        if problem:
            return self._stand_in(number, problem)
        return IndexedSample.of(
            lambda: self._names_of(number),
            container=self.info.containers[row["container"]],
            codec=self._codecs[row["codec"]],
            num_frames=row["num_frames"],
            fps=row["fps"],
            frame_stride=row["frame_stride"],
            width=row["width"],
            height=row["height"],
            label=None if row["label"] < 0 else row["label"],
            sha256=row["sha256"].hex(),
            offset=row["offset"],
            size=row["size"],
        )

    def gops(self, number: int) -> GopIndex | None:
        """The groups of pictures of sample `number`, None if it can only be read whole."""
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
        digest = hashlib.sha256(self._hash_of_rows())
        for shard in self.info.shards:
            digest.update(f"{shard.name} {shard.num_samples} {shard.sha256}\n".encode())
        return digest.hexdigest()

    @property
    def have_changed(self) -> bool:
        """Whether tables of shards and samples are not as they were written, as far as `content` tells."""
        return self.info.content not in ("", self.content)

    def set_aside_changed(self, folder: Path) -> None:
        """If tables have changed, make bad samples of the rows that do not say what the lines beside the shards say: of
        a label, for one, nobody would see it. Raises InputError if these cannot be read."""
        if not self.have_changed:
            return
        for shard, first in zip(self.info.shards, self.first_of_shard.tolist(), strict=True):
            lines = read_lines(folder, shard)
            for number in range(first, first + shard.num_samples):
                row = self.sample(number)
                if not _agree(row, next(lines, "")):
                    self._problems[number] = row.problem or f"its row is not what {shard.samples_name} says"
        if self._problems:
            said = f"note: {len(self._problems)} rows in {folder / self.info.tables['samples'].file} have changed"
            log(
                f"{said} and are passed over: write it again with shard_tools/check_shards.py --rewrite-tables",
                sys.stderr,
            )

    def _hash_of_rows(self) -> bytes:
        """Blocks are hashed side by side."""
        step = HASH_BLOCK // SAMPLE.itemsize
        with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as threads:
            blocks = (self.rows[start : start + step] for start in range(0, len(self.rows), step))
            return b"".join(threads.map(lambda rows: hashlib.sha256(rows.tobytes()).digest(), blocks))

    def _problem(self, number: int, row: dict[str, Any]) -> str:
        """Why a row cannot be used, empty if it can."""
        info, shard = self.info, self.shard_of(number)
        if row["shard"] != shard:
            return f"its row says shard {row['shard']} and stands among those of shard {shard}"
        num_bytes = info.shards[shard].num_bytes
        if not 0 < row["size"] <= num_bytes - row["offset"]:
            return f"its row says {row['size']} bytes from {row['offset']} on, of {num_bytes} in the shard"
        if not 1 <= row["num_frames"] <= row["size"]:
            return f"its row says {row['num_frames']} frames in {row['size']} bytes"
        if not 0 < row["fps"] < 1e6:  # NaN is not either
            return f"its row says {row['fps']} frames a second"
        if row["codec"] >= len(self._codecs) or row["container"] >= len(info.containers):
            return "its row says a codec or a container that the dataset does not have"
        sides = self._sides[row["codec"]]
        if not (
            sides.min_width <= row["width"] <= sides.max_width and sides.min_height <= row["height"] <= sides.max_height
        ):
            return f"its row says {row['width']}x{row['height']} pixels, as no video of the dataset has"
        if row["frame_stride"] not in info.frame_strides:
            return f"its row says every {row['frame_stride']}th frame is kept, as of no video of the dataset"
        if not -1 <= row["label"] < len(info.classes):
            return f"its row says label {row['label']}, and there are {len(info.classes)} classes"
        if row["num_gops"] and not 2 <= row["num_gops"] <= self._num_gops - row["first_gop"]:
            return f"its row says {row['num_gops']} rows of the GOP table from {row['first_gop']} on"
        return ""

    def _stand_in(self, number: int, problem: str) -> Sample:
        strides = self.info.frame_strides
        return IndexedSample.of(
            lambda: self._names_of(number),
            problem=problem,
            container="",
            codec="",
            num_frames=1,
            fps=1.0,
            label=None,
            frame_stride=strides[0] if strides else 1,
            width=64,
            height=64,
            sha256="",
            offset=0,
        )

    def _names_of(self, number: int) -> tuple[str, str]:
        """Key and source. They are for people: where they cannot be read, the number stands in."""
        first = min(int(self.rows["name"][number]), len(self._names))
        end = self._names.find(b"\n", first, first + MAX_NAME)
        try:
            key, source = json.loads(self._names[first:end] if end >= 0 else b"")
        except (ValueError, TypeError, RecursionError):
            key, source = None, None
        if not isinstance(key, str) or not isinstance(source, str):
            return f"sample-{number}", f"sample {number}, whose name cannot be read"
        return key, source

    @cached_property
    def _names(self) -> bytes | mmap.mmap:
        names = self._tables["names"]
        if not isinstance(names, Path):
            assert isinstance(names, bytes)
            return names
        with names.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(mapped) <= CHECKED_NAMES and hashlib.sha256(mapped).hexdigest() != self.info.tables["names"].sha256:
            said = f"note: {names} has changed since it was made, so videos are called by their number"
            log(f"{said}: write it again with shard_tools/check_shards.py --rewrite-tables", sys.stderr)
            return b""
        return mapped

    @cached_property
    def _gops(self) -> np.ndarray:
        gops = self._tables["gops"]
        assert isinstance(gops, np.ndarray)
        return gops


def _agree(row: Sample, line: Sample | str) -> bool:
    """Whether a row of the table says what a line beside a shard says; names and groups have hashes of their own."""
    return isinstance(line, Sample) and all(getattr(row, name) == getattr(line, name) for name in ROW_FIELDS)


class _Located(Mapping[str, Path | np.ndarray | bytes]):
    """Tables that are fetched and opened when they are first needed."""

    def __init__(self, info: DatasetInfo, locate: Locate) -> None:
        self._info, self._locate = info, locate

    def __getitem__(self, name: str) -> Path | np.ndarray:
        if name != "names":
            return read_table(name, self._info, self._locate)
        table = self._info.tables[name]
        path = self._locate(table)
        if not path.is_file() or path.stat().st_size != table.num_bytes or not table.num_bytes:
            raise InputError(
                f"{path} is missing or not whole: write it again with shard_tools/check_shards.py --rewrite-tables"
            )
        return path

    def __iter__(self) -> Iterator[str]:
        return iter(("gops", "names"))

    def __len__(self) -> int:
        return 2


def _read_version_1(info: DatasetInfo, folder: Path) -> Tables:
    """Tables in memory out of the `samples.jsonl` of the shards."""
    maker = RowWriter()
    rows, names = [np.empty(0, SAMPLE)], []
    problems: dict[int, str] = {}
    for shard in info.shards:
        lines = list(read_lines(folder, shard))
        if len(lines) != shard.num_samples:
            raise InputError(
                f"{folder / shard.samples_name} lists {len(lines)} samples where dataset.json says"
                f" {shard.num_samples}: run `python shard_tools/check_shards.py {folder}`"
            )
        problems |= {maker.num_samples + n: line for n, line in enumerate(lines) if isinstance(line, str)}
        made = maker.rows_of(lines)
        rows.append(made.samples)
        names.append(made.names)
    counts = np.array([shard.num_samples for shard in info.shards], np.int64)
    tables: dict[str, Path | np.ndarray | bytes] = {"gops": np.empty(0, GOP), "names": b"".join(names)}
    first = np.array([0, *itertools.accumulate(counts.tolist())][:-1], np.int64)
    return Tables(maker.describe(info), first, np.concatenate(rows), tables, problems)
