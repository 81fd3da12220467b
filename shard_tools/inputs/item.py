"""One sample that the input asks for, and what is skipped on the way to it."""

import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from common.logging import log, printable

NUM_EXAMPLES = 3  # names given of each kind of what is skipped
NUM_EXTENSIONS = 10
HIDDEN = "hidden"
UNKNOWN = "without a video's extension"


class TarMember(NamedTuple):
    """Bytes in the middle of a file: a member of a tar."""

    archive: str
    offset: int
    size: int
    name: str


class Segment(NamedTuple):
    """A part of a video: the frames that are shown from `start` on and before `end`."""

    start: float  # seconds since the first frame, or a frame's number from 0
    end: float  # exclusive; inf: to the end of the video
    in_frames: bool = False
    number: int = 1  # among equal segments of a video

    def __str__(self) -> str:
        """Write it as a media fragment: t=1.5,4 (seconds) or frames=10,50; t=1.5,4;2 is the second such."""
        start, end = (f"{value!r}".removesuffix(".0") for value in self[:2])
        return f"{'frames' if self.in_frames else 't'}={start},{end}" + f";{self.number}" * (self.number > 1)

    @classmethod
    def parse(cls, text: str) -> "Segment":
        """Read what __str__ writes."""
        fragment, _, number = text.partition(";")
        unit, _, ends = fragment.partition("=")
        start, _, end = ends.partition(",")
        return cls(float(start), float(end), unit == "frames", int(number or 1))

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


@dataclass(frozen=True, slots=True)
class Item:
    """One sample that is asked for: an input video, or a segment of one."""

    source: str  # the path relative to the input, with /
    location: str | TarMember  # where its bytes are: a path, a URL, or in a tar
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


def join_name(source: str, segment: str) -> str:
    return f"{source}#{segment}" if segment else source


def split_name(name: str) -> tuple[str, str]:
    """Return the source and the segment of a name."""
    source, separator, segment = name.rpartition("#")
    return (source, segment) if separator and segment.startswith(("t=", "frames=")) else (name, "")


def one_label(label: str | None) -> tuple[str] | None:
    return None if label is None else (label,)


class Skipped:
    """Counts, by kind and with a few names, what has no video's name and so is in no shard and no reject."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = defaultdict(list)
        self.extensions: Counter[str] = Counter()  # of those of UNKNOWN kind

    def add(self, kind: str, name: str) -> None:
        self.counts[kind] += 1
        if len(self.examples[kind]) < NUM_EXAMPLES:
            self.examples[kind].append(name)
        if kind == UNKNOWN:
            self.extensions[PurePosixPath(name).suffix.lower() or "none"] += 1

    @property
    def total(self) -> int:
        return self.counts.total()

    def lines(self) -> list[str]:
        """Return a sentence for each kind."""
        lines = []
        for kind, count in self.counts.items():
            names = [*map(printable, self.examples[kind]), *["…"] * (count > NUM_EXAMPLES)]
            most = self.extensions.most_common(NUM_EXTENSIONS) if kind == UNKNOWN else []
            by_extension = f" ({', '.join(f'{printable(name)} {number}' for name, number in most)})" if most else ""
            lines.append(f"skipped {count} {kind}{by_extension}: {', '.join(names)}")
        return lines

    def log(self) -> None:
        for line in self.lines():
            log(line, sys.stderr)


def is_hidden(name: str) -> bool:
    return name.startswith(".")
