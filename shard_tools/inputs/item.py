"""One sample that the input asks for, what is skipped on the way to it, and what the user says about both."""

import json
import math
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.atomic_io import atomic_write
from common.errors import InputError
from common.logging import log, printable
from shard_tools.temp_table import TempTable

FOLDER = "folder"  # --label-column folder: the name of the folder that the file lies in
NONE = "none"  # --start-column none: numbers that look like times are none
NUM_EXAMPLES = 3  # names given of each kind of what is skipped
HIDDEN = "hidden"
UNKNOWN = "without a video's extension"


class TarMember(NamedTuple):
    """Bytes in the middle of a file: a member of a tar."""

    archive: str
    offset: int
    size: int
    name: str

    def read(self) -> bytes:
        with open(self.archive, "rb") as archive:
            archive.seek(self.offset)
            return archive.read(self.size)


class ParquetCell(NamedTuple):
    """A video in a table: a cell of a Parquet file."""

    archive: str
    row_group: int
    row: int  # in its group
    column: str
    name: str

    def __str__(self) -> str:
        return self.name

    def read(self) -> bytes:
        """Decode the pages of its column up to this row; whole groups of videos may be larger than memory."""
        file = import_pyarrow(self.archive).ParquetFile(self.archive)
        batches = file.iter_batches(batch_size=1, row_groups=[self.row_group], columns=[self.column])
        (batch,) = islice(batches, self.row, self.row + 1)
        (cell,) = batch.column(0).to_pylist()
        return (cell["bytes"] if isinstance(cell, dict) else cell) or b""


def import_pyarrow(where: str) -> Any:
    """Import pyarrow.parquet, which is heavy and needed for Parquet alone."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{where} is Parquet, which needs pyarrow: pip install pyarrow, or save it as CSV") from error
    return pyarrow.parquet


Location = str | TarMember | ParquetCell  # a path, a URL, or in an archive


class Segment(NamedTuple):
    """A part of a video: the frames that are shown from `start` on and before `end`."""

    start: float  # seconds since the first frame, or a frame's number from 0
    end: float  # exclusive; inf: to the end of the video
    in_frames: bool = False
    number: int = 1  # among equal segments of a video

    def __str__(self) -> str:
        """Write it as a media fragment: t=1.5,4 (seconds, to the microsecond: it is a part of file names) or
        frames=10,50; t=1.5,4;2 is the second such."""
        start, end = (f"{round(value, 6)!r}".removesuffix(".0") for value in self[:2])
        return f"{'frames' if self.in_frames else 't'}={start},{end}" + f";{self.number}" * (self.number > 1)

    @classmethod
    def parse(cls, text: str) -> "Segment":
        """Read what __str__ writes."""
        unit, start, end, number = re.split("[=,;]", f"{text};1")[:4]
        return cls(float(start), float(end), unit == "frames", int(number))

    @property
    def problem(self) -> str | None:
        """Why no video can have it."""
        if not 0 <= self.start < math.inf:
            return f"its segment starts at {self.start:g}, which no video has"
        if not self.start < self.end:
            return f"its segment ends at {self.end:g}, not after its start at {self.start:g}"
        if self.in_frames and not all(value.is_integer() or value == math.inf for value in map(float, self[:2])):
            return f"its segment's frames {self.start:g} to {self.end:g} are not whole numbers"
        return None


class Item(NamedTuple):
    """One sample that is asked for: an input video, or a segment of one."""

    source: str  # the path relative to the input, with /
    location: Location  # where its bytes are
    labels: tuple[str, ...] | None = None  # one where classes exclude each other, else any number; None: unlabeled
    size: int = 0  # bytes, 0 where unknown
    problem: str | None = None  # why it cannot be used, if that is already known
    segment: Segment | None = None
    fields: str = ""  # all else that the input says of it (captions, …): a JSON object

    @property
    def name(self) -> str:
        """Its name in all reports: video.mp4, or video.mp4#t=5,8."""
        return join_name(self.source, str(self.segment or ""))

    @property
    def label(self) -> str | None:
        """The label, where there is just one."""
        return self.labels[0] if self.labels and len(self.labels) == 1 else None

    def to_row(self) -> list[Any]:
        """Return its cells in a table."""
        place = self.location if isinstance(self.location, str) else json.dumps(self.location)  # no path starts with [
        problem = self.problem or (self.segment.problem if self.segment else None)
        segment = str(self.segment or "")
        return [self.source, place, dump_labels(self.labels), self.size, problem, segment, self.fields]

    @classmethod
    def from_row(cls, row: list[Any]) -> "Item":
        source, location, labels, size, problem, segment, fields = row
        names = None if labels is None else tuple(json.loads(labels))
        part = Segment.parse(segment) if segment else None
        values = json.loads(location) if location.startswith("[") else []
        place = TarMember(*values) if len(values) == 4 else ParquetCell(*values) if values else location
        return cls(source, place, names, size, problem, part, fields)


@lru_cache(maxsize=2**16)
def dump_labels(labels: tuple[str, ...] | None) -> str | None:
    return None if labels is None else json.dumps(sorted(set(labels)))


def join_name(source: str, segment: str) -> str:
    return f"{source}#{segment}" if segment else source


def split_name(name: str) -> tuple[str, str]:
    """Return the source and the segment of a name."""
    source, separator, segment = name.rpartition("#")
    return (source, segment) if separator and segment.startswith(("t=", "frames=")) else (name, "")


class Skipped:
    """What is not taken for a video, by kind, and so is in no shard and no reject."""

    def __init__(self) -> None:
        self._table = TempTable("CREATE TABLE skipped (source TEXT, kind TEXT)")

    def add(self, kind: str, name: str) -> None:
        self._table.insert("skipped", [(name, kind)], 2)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._table.run("SELECT kind, count(*) FROM skipped GROUP BY kind ORDER BY min(rowid)"))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def take(self, kind: str) -> list[str]:
        """Return the names of a kind, which are taken after all."""
        names = [name for (name,) in self._table.run("SELECT source FROM skipped WHERE kind = ?", kind)]
        self._table.run("DELETE FROM skipped WHERE kind = ?", kind)
        return names

    def lines(self) -> list[str]:
        """Return a sentence for each kind."""
        lines = []
        for kind, count in self.counts.items():
            rows = self._table.run("SELECT source FROM skipped WHERE kind = ? LIMIT ?", kind, NUM_EXAMPLES)
            examples = ", ".join([*(printable(name) for (name,) in rows), *["…"] * (count > NUM_EXAMPLES)])
            lines.append(f"skipped {count} {kind}: {examples}")
        return lines

    def log(self) -> None:
        for line in self.lines():
            log(line, sys.stderr)

    def write(self, path: Path) -> None:
        """Write a line {"source", "reason"} for each."""
        rows = self._table.run("SELECT source, kind FROM skipped ORDER BY source")
        with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"source": name, "reason": f"skipped: {kind}"}) + "\n" for name, kind in rows)


@dataclass(frozen=True)
class ListOptions:
    root: str | None = None
    suffix: str = ""
    path: str | None = None
    label: str | None = None
    start: str | None = None
    end: str | None = None
    subset: str | None = None
    is_split: bool = False  # the subset is only how the split is called: an input without subsets is taken whole
    unlabeled: bool = False
    has_label_map: bool = False
    constant_label: str | None = None  # of all videos
    asks: bool = True  # about folders that are hardly classes; else these are none
