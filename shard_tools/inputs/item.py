"""One video of the input, and what is passed over on the way to it."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from common.logging import printable

NUM_EXAMPLES = 3  # names given of each kind of what is passed over
NUM_EXTENSIONS = 10
HIDDEN = "hidden"
UNKNOWN = "of an extension that no video has"


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
    """What is no video by its name and so is in no shard and no reject: counted by kind, with a few names."""

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
        """A sentence for each kind."""
        return [self._line(kind, count) for kind, count in self.counts.items()]

    def _line(self, kind: str, count: int) -> str:
        names = [*map(printable, self.examples[kind]), *["…"] * (count > NUM_EXAMPLES)]
        most = self.extensions.most_common(NUM_EXTENSIONS) if kind == UNKNOWN else []
        by_extension = f" ({', '.join(f'{printable(name)} {number}' for name, number in most)})" if most else ""
        return f"skipped {count} {kind}{by_extension}: {', '.join(names)}"


def is_url(location: str) -> bool:
    return "://" in location


def is_hidden(name: str) -> bool:
    return name.startswith(".")
