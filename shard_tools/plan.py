"""The plan of a run, written before the first video is read and never changed: what goes into which shard."""

import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import av
import fsspec
from av.container import InputContainer

from durable import write_aside
from errors import InputError
from pipeline.containers import open_video
from shard_tools.inputs import Item, Member, is_url
from shard_tools.layout import EARLIER_KEY_DIGITS, KEY_DIGITS, key_of
from shard_tools.picture import UnusableError
from shard_tools.source import opened
from shard_tools.work import fetched

PROBING_THREADS = 16  # they wait for the disk, or for the network


class Entry(NamedTuple):
    """A video, or a piece of a long one: number `piece`. The last one planned stands for all that may follow."""

    source: str
    label: int | None
    piece: int


@dataclass(frozen=True)
class Plan:
    """`shards` maps a shard's name to its entries in order.

    On disk it is a line of JSON with all but the shards, then a line a shard; earlier versions put all into one line.
    """

    settings: dict[str, Any]
    classes: list[str]
    shards: dict[str, list[Entry]]
    rejected: dict[str, str]  # sources that are known to be unusable, with the reason
    retries: bool = False  # whether it tries again what was rejected before
    key_digits: int = EARLIER_KEY_DIGITS  # what earlier versions planned, and did not say, is ended as it was begun

    def save(self, path: Path) -> None:
        head = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "shards"}
        with write_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
            file.write(json.dumps(head | {"num_shards": len(self.shards)}) + "\n")
            file.writelines(json.dumps(shard) + "\n" for shard in self.shards.items())

    @classmethod
    def load(cls, path: Path, part: tuple[int, int] = (0, 1)) -> "Plan":
        """Raises InputError where it is no longer as save() wrote it.

        `part` (i, n): of the shards that other parts make by themselves, the names alone.
        """
        try:
            with path.open(encoding="utf-8") as file:
                head = json.loads(next(file, ""))
                shards = head.pop("shards", None)
                if shards is None:
                    parts = 1 if head["settings"].get("max_seconds") else part[1]
                    shards = dict(_shard(line, number % parts == part[0] % parts) for number, line in enumerate(file))
                    if len(shards) != head.pop("num_shards"):
                        raise ValueError(f"it has {len(shards)} shards")
            named = {name: [Entry(*entry) for entry in entries] for name, entries in shards.items()}
            plan = cls(shards=named, **head)
            if plan.key_digits not in (KEY_DIGITS, EARLIER_KEY_DIGITS):
                raise ValueError(f"key_digits {plan.key_digits}")
            return plan
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is damaged ({error}): put it back, or begin in another folder") from error

    @property
    def splits(self) -> bool:
        """Whether a source may go into several shards."""
        return bool(self.settings.get("max_seconds"))

    @cached_property
    def places(self) -> dict[str, list[str]]:
        """For every source the shards of its pieces, by number."""
        if not self.splits:  # one list a shard, not a source
            return {
                entry.source: here for name, entries in self.shards.items() for here in [[name]] for entry in entries
            }
        numbered: dict[str, dict[int, str]] = {}
        for name, entries in self.shards.items():
            for entry in entries:
                numbered.setdefault(entry.source, {})[entry.piece] = name
        return {source: [names[piece] for piece in sorted(names)] for source, names in numbered.items()}

    def key(self, source: str) -> str:
        """The name of a source's samples inside the tars."""
        return key_of(source, self.key_digits)

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.shards)}

    def part_of(self, source: str, num_parts: int) -> int:
        """Which part of a job array works on a video: that of its first piece's shard."""
        return self._order[self.places[source][0]] % num_parts

    def parts_of(self, shard: str, num_parts: int) -> set[int]:
        """The parts that work on the videos of a shard."""
        if not self.splits:
            return {self._order[shard] % num_parts}
        return {self.part_of(source, num_parts) for source in self.sources(shard)}

    def sources(self, shard: str) -> list[str]:
        """Those of which something goes into a shard, in order, each once."""
        return list(dict.fromkeys(entry.source for entry in self.shards[shard]))

    def entry_of(self, source: str, piece: int) -> int:
        """The number of the entry that a source's piece belongs to."""
        return min(piece, len(self.places[source]) - 1)

    def shard_of(self, source: str, piece: int) -> str:
        return self.places[source][self.entry_of(source, piece)]


def _shard(line: str, wanted: bool) -> tuple[str, list[Any]]:
    """A shard of a saved plan; without its entries where they are not wanted, which saves the time to parse them."""
    if not wanted:
        return line.split('"', 2)[1], []
    name, entries = json.loads(line)
    return name, entries


def in_pieces(items: Sequence[Item], max_seconds: float | None) -> list[Item]:
    """Long videos as so many items as pieces will be made of them, by what their headers say of their length."""
    if max_seconds is None:
        return list(items)
    with ThreadPoolExecutor(PROBING_THREADS) as threads:
        counts = threads.map(lambda item: max(1, math.ceil(seconds(item.location) / max_seconds)), items)
    return [
        replace(item, piece=piece, size=item.size // count)
        for item, count in zip(items, counts, strict=True)
        for piece in range(count)
    ]


def seconds(location: str | Member) -> float:
    """How long a video says that it lasts; 0 where it does not say, or is no video."""
    try:
        with _header(location) as container:
            return (container.duration or 0) / av.time_base
    except (UnusableError, av.error.FFmpegError, OSError, ValueError):
        return 0.0


@contextmanager
def _header(location: str | Member) -> Iterator[InputContainer]:
    if isinstance(location, str) and is_url(location):
        with fsspec.open(location) as file, open_video(file) as container:
            yield container
    else:
        with fetched(location, None) as path, opened(path) as (container, _):
            yield container
