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

from durable import write_text
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
    """`shards` maps a shard's name to its entries in order."""

    settings: dict[str, Any]
    classes: list[str]
    shards: dict[str, list[Entry]]
    rejected: dict[str, str]  # sources that are known to be unusable, with the reason
    retries: bool = False  # whether it tries again what was rejected before
    key_digits: int = EARLIER_KEY_DIGITS  # what earlier versions planned, and did not say, is ended as it was begun

    def save(self, path: Path) -> None:
        value = {field.name: getattr(self, field.name) for field in fields(self)}  # asdict() would copy every entry
        write_text(path, json.dumps(value) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Raises InputError where it is no longer as save() wrote it."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            shards = {name: [Entry(*entry) for entry in entries] for name, entries in value.pop("shards").items()}
            plan = cls(shards=shards, **value)
            if plan.key_digits not in (KEY_DIGITS, EARLIER_KEY_DIGITS):
                raise ValueError(f"key_digits {plan.key_digits}")
            return plan
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is damaged ({error}): put it back, or begin in another folder") from error

    @cached_property
    def places(self) -> dict[str, list[str]]:
        """For every source the shards of its pieces, by number."""
        numbered: dict[str, dict[int, str]] = {}
        for name, entries in self.shards.items():
            for entry in entries:
                numbered.setdefault(entry.source, {})[entry.piece] = name
        return {source: [names[piece] for piece in sorted(names)] for source, names in numbered.items()}

    @cached_property
    def keys(self) -> dict[str, str]:
        """For every source the name of its samples inside the tars."""
        sources = dict.fromkeys(entry.source for entries in self.shards.values() for entry in entries)
        return {source: key_of(source, self.key_digits) for source in sources}

    @cached_property
    def labels(self) -> dict[str, int | None]:
        return {entry.source: entry.label for entries in self.shards.values() for entry in entries}

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.shards)}

    def part_of(self, source: str, num_parts: int) -> int:
        """Which part of a job array works on a video: that of its first piece's shard."""
        return self._order[self.places[source][0]] % num_parts

    def sources(self, shard: str) -> list[str]:
        """Those of which something goes into a shard, in order, each once."""
        return list(dict.fromkeys(entry.source for entry in self.shards[shard]))

    def entry_of(self, source: str, piece: int) -> int:
        """The number of the entry that a source's piece belongs to."""
        return min(piece, len(self.places[source]) - 1)

    def shard_of(self, source: str, piece: int) -> str:
        return self.places[source][self.entry_of(source, piece)]


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
