"""One sample that the input asks for, what is skipped on the way to it, and what the user says about both."""

import json
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from adamae.common.atomic_io import atomic_write
from adamae.common.logging import log, printable
from adamae.pipeline.shards.format import Bytes, Count, Seconds, Sha256, Side, Stride, Word
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs.location import Location
from adamae.shard_tools.temp_table import TempTable

FOLDER = "folder"  # --label-column folder: the name of the folder that the file lies in
NONE = "none"  # --start-column none: numbers that look like times are none
NUM_EXAMPLES = 3  # names given of each kind of what is skipped
HIDDEN = "hidden"
UNKNOWN = "without a video's extension"


class Stored(msgspec.Struct, frozen=True):
    """A staged video: the file at `path`, and what its Sample will say of it."""

    path: str
    container: Word
    codec: Word
    num_frames: Count
    fps: Annotated[float, Meta(gt=0, lt=1e6)]
    frame_stride: Stride
    width: Side
    height: Side
    start: Seconds
    sha256: Sha256
    source_sha256: str
    source_size: Bytes


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample on its way from the input to a shard: a video, or a segment of one.

    It is written three times, and each time has gained what stands below: as a row of an ItemStore by what reads the
    input, on a line of the plan once its shard is chosen, and in the staging folder once a worker is done with it.
    """

    source: str  # the path relative to the input, with /
    location: Location = (
        ""  # where its bytes are; not in the plan, since a folder may be moved between two runs
    )
    labels: tuple[str, ...] | None = (
        None  # one where classes exclude each other, else any number; None: unlabeled
    )
    size: int = 0  # bytes, 0 where unknown
    problem: str | None = None  # why it cannot be used: known from the start, or found by a worker
    segment: str = ""  # what Segment writes; empty: all of the video
    fields: str = ""  # all else that the input says of it (captions, …): a JSON object

    # The plan adds its place in the dataset; the position counts over all shards of the plan.
    shard: str = ""
    position: int = 0

    # A worker adds this, or a problem.
    stored: Stored | None = None

    @property
    def name(self) -> str:
        """The name in all reports: video.mp4, or video.mp4#t=5,8."""
        return join_name(self.source, self.segment)

    @property
    def label(self) -> str | None:
        """The label, where there is just one."""
        return self.labels[0] if self.labels and len(self.labels) == 1 else None

    def to_row(self) -> list[Any]:
        """Return its cells in the table of an ItemStore."""
        location = self.location
        if not isinstance(location, str):
            # Paths start with a slash and URLs with a letter, so nothing else starts with a brace.
            location = dump_json(location)
        problem = self.problem
        if self.segment and problem is None:
            problem = Segment.parse(self.segment).problem
        return [
            self.source,
            location,
            dump_labels(self.labels),
            self.size,
            problem,
            self.segment,
            self.fields,
        ]

    @classmethod
    def from_row(cls, row: list[Any]) -> "Item":
        """Read what to_row returns."""
        source, location, labels, size, problem, segment, fields = row
        if location.startswith("{"):
            location = msgspec.convert(json.loads(location), Location)
        if labels is not None:
            labels = tuple(json.loads(labels))
        return cls(source, location, labels, size, problem, segment, fields)


def dump_json(value: Any) -> str:
    """Write an item, several, or a location as JSON on one line; pipeline.shards.format.parse_line reads it.

    json writes names that are not UTF-8, as halves of surrogate pairs, which msgspec's own encoder refuses.
    """
    return json.dumps(msgspec.to_builtins(value))


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
        return dict(
            self._table.run("SELECT kind, count(*) FROM skipped GROUP BY kind ORDER BY min(rowid)")
        )

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def take(self, kind: str) -> list[str]:
        """Return the names of a kind, which are taken after all."""
        names = [
            name for (name,) in self._table.run("SELECT source FROM skipped WHERE kind = ?", kind)
        ]
        self._table.run("DELETE FROM skipped WHERE kind = ?", kind)
        return names

    def lines(self) -> list[str]:
        """Return a sentence for each kind."""
        lines = []
        for kind, count in self.counts.items():
            rows = self._table.run(
                "SELECT source FROM skipped WHERE kind = ? LIMIT ?", kind, NUM_EXAMPLES
            )
            examples = ", ".join(
                [*(printable(name) for (name,) in rows), *["…"] * (count > NUM_EXAMPLES)]
            )
            lines.append(f"skipped {count} {kind}: {examples}")
        return lines

    def log(self) -> None:
        for line in self.lines():
            log(line, sys.stderr)

    def write(self, path: Path) -> None:
        """Write a line {"source", "reason"} for each."""
        rows = self._table.run("SELECT source, kind FROM skipped ORDER BY source")
        with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"source": name, "reason": f"skipped: {kind}"}) + "\n"
                for name, kind in rows
            )


@dataclass(frozen=True)
class ListOptions:
    root: str | None = None
    suffix: str = ""
    path: str | None = None
    label: str | None = None
    start: str | None = None
    end: str | None = None
    subset: str | None = None
    is_split: bool = (
        False  # the subset is only how the split is called: an input without subsets is taken whole
    )
    unlabeled: bool = False
    has_label_map: bool = False
    constant_label: str | None = None  # of all videos
    asks: bool = True  # about folders that are hardly classes; else these are none
