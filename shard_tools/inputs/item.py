"""One sample of the input, what is skipped on the way to it, and what the user says about both."""

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

# Names that a message gives of each kind of what is skipped.
NUM_EXAMPLES = 3
# Two of the kinds; the others are in folders.KINDS.
HIDDEN = "hidden or system files"
UNKNOWN = "without a video's extension"
# What to_row writes of a location in an archive begins with the tag that msgspec gives it.
TAGGED = '{"type": '


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

    It is written three times, and each time has gained what stands below: as a row of an ItemStore
    by what reads the input, on a line of the plan once its shard is chosen, and in the staging
    folder once a worker is done with it.
    """

    # The path relative to the input, with /.
    source: str
    # Where the bytes are. It is not in the plan, since a folder may be moved between two runs.
    location: Location = ""
    # One where classes exclude each other, else any number; None: unlabeled.
    labels: tuple[str, ...] | None = None
    # Bytes; 0 where unknown.
    size: int = 0
    # The reason why it cannot be used, known from the start or found by a worker.
    problem: str | None = None
    # What Segment writes; empty: all of the video.
    segment: str = ""
    # All else that the input says of it (captions, …): a JSON object.
    fields: str = ""

    # The plan adds where it goes in the dataset. Positions count over all shards of the plan.
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
        """The label if there is just one, else None."""
        if self.labels and len(self.labels) == 1:
            return self.labels[0]
        return None

    def to_row(self) -> list[Any]:
        """Return the cells of this item in the table of an ItemStore."""
        location = self.location
        if not isinstance(location, str):
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
        # A path begins with a slash; a URL of a broken list may begin with a brace.
        if location.startswith(TAGGED):
            location = msgspec.convert(json.loads(location), Location)
        if labels is not None:
            labels = tuple(json.loads(labels))
        return cls(source, location, labels, size, problem, segment, fields)


def dump_json(value: Any) -> str:
    """Write an item, several, or a location as JSON on one line; format.parse_line reads it.

    json writes names that are not UTF-8, as halves of surrogate pairs, which msgspec's own encoder
    refuses.
    """
    return json.dumps(msgspec.to_builtins(value))


@lru_cache(maxsize=2**16)
def dump_labels(labels: tuple[str, ...] | None) -> str | None:
    """Return labels as an ItemStore keeps them: a sorted JSON list, each once."""
    if labels is None:
        return None
    return json.dumps(sorted(set(labels)))


def join_name(source: str, segment: str) -> str:
    return f"{source}#{segment}" if segment else source


def split_name(name: str) -> tuple[str, str]:
    """Return the source and the segment of a name."""
    source, separator, segment = name.rpartition("#")
    # Names of files may hold a #, too (HMDB51's do).
    if separator and segment.startswith(("t=", "frames=")):
        return source, segment
    return name, ""


class Skipped:
    """The files that are not taken for videos, by kind; they are in no shard and no reject."""

    def __init__(self) -> None:
        self._table = TempTable("CREATE TABLE skipped (source TEXT, kind TEXT)")

    def add(self, kind: str, name: str) -> None:
        self._table.insert("skipped", [(name, kind)], 2)

    @property
    def counts(self) -> dict[str, int]:
        """The number of files of each kind, in the order in which the kinds were met."""
        query = "SELECT kind, count(*) FROM skipped GROUP BY kind ORDER BY min(rowid)"
        return dict(self._table.run(query))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def take(self, kind: str) -> list[str]:
        """Remove a kind, since its files are read after all, and return their names."""
        rows = self._table.run("SELECT source FROM skipped WHERE kind = ?", kind)
        names = [name for (name,) in rows]
        self._table.run("DELETE FROM skipped WHERE kind = ?", kind)
        return names

    def lines(self) -> list[str]:
        """Return a sentence for each kind."""
        query = "SELECT source FROM skipped WHERE kind = ? LIMIT ?"
        lines = []
        for kind, count in self.counts.items():
            examples = [printable(name) for (name,) in self._table.run(query, kind, NUM_EXAMPLES)]
            if count > NUM_EXAMPLES:
                examples.append("…")
            lines.append(f"skipped {count} {kind}: {', '.join(examples)}")
        return lines

    def log(self) -> None:
        for line in self.lines():
            log(line, sys.stderr)

    def write(self, path: Path) -> None:
        """Write a line {"source", "reason"} for each file."""
        rows = self._table.run("SELECT source, kind FROM skipped ORDER BY source")
        with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
            for name, kind in rows:
                record = {"source": name, "reason": f"skipped: {kind}"}
                file.write(json.dumps(record) + "\n")


@dataclass(frozen=True)
class ListOptions:
    """What the options of a command say about lists and folders."""

    # The folder that the paths of a list are relative to.
    root: str | None = None
    # What the names of a list lack at their ends, such as .mp4.
    suffix: str = ""
    # What the columns of a list hold, as Reading writes it; the entry of tars that is the label.
    columns: str | None = None
    # The name of a list's format, whatever columns it has.
    format: str | None = None
    # Whether the command has --columns, which a question about a list then proposes.
    takes_columns: bool = False
    # The subset to take, or "all".
    subset: str | None = None
    # The subset is only what the split is called: an input without subsets is taken whole.
    is_split: bool = False
    unlabeled: bool = False
    has_label_map: bool = False
    # The label of all videos.
    constant_label: str | None = None
    # The number of the folder in each path that is its label: of run/day1/a.mp4, 1 is run.
    label_folder: int | None = None
    # If it is not clear which folders are classes, the user is asked; if False, none are.
    asks: bool = True
