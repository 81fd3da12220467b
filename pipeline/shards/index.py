"""The tables of one dataset, opened in no time whatever their size, and its samples, looked at when they are used.

Rows are mapped into memory, so that all processes of a machine share one copy in the page cache. Nothing is checked for
all rows at once: a row is checked whenever it is turned into a Sample, in some microseconds, and a broken one becomes a
bad sample like any other, with a reason.
"""

import hashlib
import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from common.errors import InputError
from pipeline.shards.format import SAMPLE, BrokenSample, DatasetInfo, Locate, Sample, read_table
from pipeline.shards.gops import GopIndex

HASH_BLOCK = 2**24  # bytes that a thread hashes at a time
HASHED_ROWS = 2**28  # bytes of the table of samples (2,800,000 of them) that are hashed at every open
HASHED_NAMES = 2**28  # bytes of the table of names that are hashed, in .2 s; a larger one, only check_shards hashes
MAX_NAME = 2**16  # bytes of a line in the table of names
REWRITE = "write them again with `python shard_tools/check_shards.py {} --rewrite-tables`"


class Tables:
    """The samples of one dataset, by number."""

    def __init__(
        self,
        info: DatasetInfo,
        first_of_shard: Int[np.ndarray, " shards"],
        samples: Shaped[np.ndarray, " samples"],
        locate: Locate,
    ) -> None:
        """Take `samples`, rows of SAMPLE; the tables of GOPs and names are opened when they are first needed."""
        self.info, self.first_of_shard, self.rows, self._locate = info, first_of_shard, samples, locate
        self._codecs, self._sides = list(info.codecs), list(info.codecs.values())
        self._num_gops = info.tables["gops"].num_rows if info.tables else 0

    @classmethod
    def open(cls, info: DatasetInfo, folder: Path, locate: Locate) -> "Tables":
        """Map the tables of a dataset into memory; raises InputError if one is missing, cut, or not of this dataset."""
        shards, samples = read_table("shards", info, locate), read_table("samples", info, locate)
        first, counts = shards["first_sample"].astype(np.int64), shards["num_samples"].astype(np.int64)
        if not (np.array_equal(first, np.cumsum(counts) - counts) and counts.sum() == len(samples) == info.num_samples):
            raise InputError(
                f"{folder} has {len(samples)} rows of samples, {counts.sum()} in its table of shards and"
                f" {info.num_samples} in dataset.json: {REWRITE.format(folder)}"
            )
        return cls(info, first, samples, locate)

    def __len__(self) -> int:
        return len(self.rows)

    def shard_of(self, number: int) -> int:
        return int(np.searchsorted(self.first_of_shard, number, side="right")) - 1

    def sample(self, number: int) -> Sample:
        """Sample `number`; where its row is broken, one that has a `problem` and else harmless values."""
        row = dict(zip(SAMPLE.names or (), self.rows[number].item(), strict=True))
        problem = self._problem(number, row)
        if problem:
            return self._stand_in(number, problem)
        key, source = self._read_names(number)
        return Sample(
            key=key,
            source=source,
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

    def check_content(self, folder: Path) -> None:
        """Raise InputError if the tables of shards and samples are not as they were written, as far as `content` tells:
        of a label, for one, nobody would see it."""
        if self.info.content not in ("", self.content):
            raise InputError(f"the tables of {folder} have changed since they were written: {REWRITE.format(folder)}")

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
        if not -1 <= row["label"] < len(info.classes):
            return f"its row says label {row['label']}, and there are {len(info.classes)} classes"
        if row["num_gops"] and not 2 <= row["num_gops"] <= self._num_gops - row["first_gop"]:
            return f"its row says {row['num_gops']} rows of the GOP table from {row['first_gop']} on"
        return ""

    def _stand_in(self, number: int, problem: str) -> Sample:
        key, source = self._read_names(number)
        strides = self.info.frame_strides
        return BrokenSample(
            key=key,
            source=source,
            problem=problem,
            container="",
            codec="",
            num_frames=1,
            fps=1.0,
            frame_stride=strides[0] if strides else 1,
            width=64,
            height=64,
            label=None,
            sha256="",
        )

    def _read_names(self, number: int) -> tuple[str, str]:
        """Read key and source. They are for people: where they cannot be read, the number stands in."""
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
