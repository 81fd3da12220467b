"""The plan of a run, written before the first video is read and never changed: what goes into which shard."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import av
import fsspec
from av.container import InputContainer

from common.atomic_io import atomic_write
from common.errors import InputError
from pipeline.decoding.containers import open_video
from shard_tools.encoding.picture import UnusableError
from shard_tools.encoding.source import open_source
from shard_tools.inputs import Item, TarMember, is_url
from shard_tools.layout import EARLIER_KEY_DIGITS, KEY_DIGITS, make_key
from shard_tools.work import local_copy

PROBED_AT_ONCE = 4096
PROBING_THREADS = 16  # they wait for the disk, or for the network


class Entry(NamedTuple):
    """A video, or a piece of a long one: number `piece`. The last one planned stands for all that may follow."""

    source: str
    label: int | None
    piece: int


class SavedShards(Mapping[str, list[Entry]]):
    """The shards of a plan on the disk, of which memory holds names and places: a line is read when it is asked for."""

    def __init__(self, path: Path, offsets: dict[str, int]):
        self._path = path
        self._offsets = offsets

    def __getitem__(self, name: str) -> list[Entry]:
        offset = self._offsets[name]
        with self._path.open("rb") as file, _damaged(self._path):
            file.seek(offset)
            return _entries(file.readline())

    def __contains__(self, name: object) -> bool:
        return name in self._offsets  # the mixin would read the line

    def __iter__(self) -> Iterator[str]:
        return iter(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)


@dataclass(frozen=True)
class Plan:
    """`shards` maps a shard's name to its entries in order.

    On disk it is a line of JSON with all but the shards, then a line a shard; earlier versions put all into one line.
    Where a source may go into several shards, `places_of` holds all sources in memory.
    """

    settings: dict[str, Any]
    classes: list[str]
    shards: Mapping[str, list[Entry]]
    rejected: dict[str, str]  # sources that are known to be unusable, with the reason
    retries: bool = False  # whether it tries again what was rejected before
    key_digits: int = EARLIER_KEY_DIGITS  # what earlier versions planned, and did not say, is ended as it was begun

    def save(self, path: Path) -> None:
        self.save_with(self.shards.items(), len(self.shards), path)

    def save_with(self, shards: Iterable[tuple[str, list[Entry]]], num_shards: int, path: Path) -> None:
        """Save it with these shards, which are written as they come, instead of its own."""
        head = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "shards"}
        with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
            file.write(json.dumps(head | {"num_shards": num_shards}) + "\n")
            file.writelines(json.dumps(shard) + "\n" for shard in shards)

    @classmethod
    def load(cls, path: Path, part: tuple[int, int] = (0, 1)) -> "Plan":
        """Raises InputError where it is no longer as save() wrote it.

        `part` (i, n): the lines of shards that other parts make by themselves are not looked into.
        """
        with _damaged(path), path.open("rb") as file:
            head = json.loads(file.readline())
            shards = head.pop("shards", None)
            if shards is None:
                parts = 1 if head["settings"].get("max_seconds") else part[1]
                offsets: dict[str, int] = {}
                end = file.tell()
                for number, line in enumerate(file):
                    offsets[line.split(b'"', 2)[1].decode()] = end
                    end += len(line)
                    if number % parts == part[0] % parts:
                        _entries(line)
                if len(offsets) != head.pop("num_shards"):
                    raise ValueError(f"it has {len(offsets)} shards")
                plan = cls(shards=SavedShards(path, offsets), **head)
            else:
                named = {name: [Entry(*entry) for entry in entries] for name, entries in shards.items()}
                plan = cls(shards=named, **head)
            if plan.key_digits not in (KEY_DIGITS, EARLIER_KEY_DIGITS):
                raise ValueError(f"key_digits {plan.key_digits}")
            return plan

    @property
    def splits(self) -> bool:
        """Whether a source may go into several shards."""
        return bool(self.settings.get("max_seconds"))

    @cached_property
    def _places(self) -> dict[str, list[str]]:
        numbered: dict[str, dict[int, str]] = {}
        for name, entries in self.shards.items():
            for entry in entries:
                numbered.setdefault(entry.source, {})[entry.piece] = name
        return {source: [names[piece] for piece in sorted(names)] for source, names in numbered.items()}

    def places_of(self, source: str, shard: str) -> list[str]:
        """The shards of a source's pieces, by number; `shard` is one of them."""
        return self._places[source] if self.splits else [shard]

    def key(self, source: str) -> str:
        """The name of a source's samples inside the tars."""
        return make_key(source, self.key_digits)

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.shards)}

    def part_of(self, source: str, shard: str, num_parts: int) -> int:
        """Which part of a job array works on a video, of which something goes into `shard`: that of its first piece."""
        return self._order[self.places_of(source, shard)[0]] % num_parts

    def parts_of(self, shard: str, num_parts: int) -> set[int]:
        """The parts that work on the videos of a shard."""
        if not self.splits:
            return {self._order[shard] % num_parts}
        return {self.part_of(source, shard, num_parts) for source in self.sources(shard)}

    def sources(self, shard: str) -> list[str]:
        """Those of which something goes into a shard, in order, each once."""
        return list(dict.fromkeys(entry.source for entry in self.shards[shard]))

    def entry_of(self, source: str, shard: str, piece: int) -> int:
        """The number of the entry that a source's piece belongs to."""
        return min(piece, len(self.places_of(source, shard)) - 1)

    def shard_of(self, source: str, shard: str, piece: int) -> str:
        return self.places_of(source, shard)[self.entry_of(source, shard, piece)]


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}): put it back, or begin in another folder") from error


def _entries(line: bytes) -> list[Entry]:
    """Of a shard in a saved plan."""
    _, entries = json.loads(line)
    return [Entry(*entry) for entry in entries]


def in_pieces(items: Iterable[Item], max_seconds: float | None) -> Iterator[Item]:
    """Long videos as so many items as pieces will be made of them, by what their headers say of their length."""
    if max_seconds is None:
        yield from items
        return
    items = iter(items)
    with ThreadPoolExecutor(PROBING_THREADS) as threads:
        while some := list(islice(items, PROBED_AT_ONCE)):
            counts = threads.map(lambda item: max(1, math.ceil(probe_duration(item.location) / max_seconds)), some)
            for item, count in zip(some, counts, strict=True):
                for piece in range(count):
                    yield replace(item, piece=piece, size=item.size // count)


def probe_duration(location: str | TarMember) -> float:
    """How long a video says that it lasts; 0 where it does not say, or is no video."""
    try:
        with _header(location) as container:
            return (container.duration or 0) / av.time_base
    except (UnusableError, av.error.FFmpegError, OSError, ValueError):
        return 0.0


@contextmanager
def _header(location: str | TarMember) -> Iterator[InputContainer]:
    if isinstance(location, str) and is_url(location):
        with fsspec.open(location) as file, open_video(file) as container:
            yield container
    else:
        with local_copy(location, None) as path, open_source(path) as (container, _):
            yield container
