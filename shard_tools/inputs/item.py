"""One video of the input, and what is skipped on the way to it."""

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


@dataclass(frozen=True, slots=True)
class Item:
    """One input video."""

    source: str  # its name in all reports: the path relative to the input, with /
    location: str | TarMember  # where its bytes are: a path, a URL, or in a tar
    label: str | None = None
    size: int = 0  # bytes, 0 where unknown
    problem: str | None = None  # why it cannot be used, if that is already known
    piece: int = 0  # number of the piece, where a long video is split


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
