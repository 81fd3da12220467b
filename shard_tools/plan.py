"""Which video goes into which shard: decided and written down before the first one is read, and never changed.

A pure function of the sorted sources and the settings, so that shards have the same bytes with any number of workers
and after any interruption. A video that turns out to be unusable leaves a gap and moves no other one.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import av
import fsspec

from common.atomic_io import atomic_write
from common.errors import InputError
from pipeline.decoding.containers import open_video
from pipeline.reading.storage import is_remote
from shard_tools.encoding.picture import UnusableError
from shard_tools.encoding.source import open_source
from shard_tools.inputs import Item, Location
from shard_tools.inputs.item import join_name
from shard_tools.settings import Settings
from shard_tools.temp_table import TempTable
from shard_tools.work import Entry, local_copy

KEY_DIGITS = 24  # hexadecimal: among 10⁹ files of one name, two have the same key with a probability of 6e-12
PROBED_AT_ONCE = 4096
PROBING_THREADS = 16  # they wait for the disk, or for the network


@contextmanager
def _open_plan(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except (ValueError, TypeError) as error:  # no JSON, or JSON of another shape
        raise InputError(f"{path} is damaged ({error}): restore it, or start in another folder") from error


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    On disk it is one JSON line per shard, [name, entries], then one with the other fields. Memory holds where the lines
    start.
    """

    settings: dict[str, Any]
    classes: list[str]
    rejected: dict[str, str]  # sources that are known to be unusable, with the reason
    retries: bool  # whether it tries again what was rejected before
    splits: bool  # whether several entries, in any shards, are made of one source
    path: Path = field(compare=False)
    offsets: dict[str, int] = field(compare=False)  # shard -> first byte of its line

    @classmethod
    def load(cls, path: Path) -> "Plan":
        offsets: dict[str, int] = {}
        offset = 0
        with _open_plan(path) as file:
            for line in file:
                if not line.startswith(b"["):
                    return cls(**json.loads(line), path=path, offsets=offsets)
                offsets[line[2 : line.index(b'"', 2)].decode()] = offset
                offset += len(line)
            raise ValueError("its last line is missing")

    def entries(self, shard: str) -> list[Entry]:
        with _open_plan(self.path) as file:
            file.seek(self.offsets[shard])
            _, entries = json.loads(file.readline())
            return [Entry(*entry) for entry in entries]

    @cached_property
    def _table(self) -> TempTable:
        """All entries, where several are made of one video."""
        table = TempTable("CREATE TABLE entries (source BLOB, shard BLOB, entry BLOB)")
        for shard in self.offsets:
            table.insert("entries", ((it.source, shard, json.dumps(it)) for it in self.entries(shard)), 3)
        return table

    def entries_by_source(self) -> Iterator[tuple[str, list[tuple[str, Entry]]]]:
        """Yield (source, [(shard, entry), …]), where `splits` source by source, else shard by shard."""
        if not self.splits:
            yield from ((entry.source, [(shard, entry)]) for shard in self.offsets for entry in self.entries(shard))
            return
        rows = self._table.run("SELECT source, shard, entry FROM entries ORDER BY source, shard, rowid")
        for source, group in groupby(rows, itemgetter(0)):
            yield source, [(shard, Entry(*json.loads(entry))) for _, shard, entry in group]


def save_plan(
    path: Path,
    settings: Settings,
    classes: list[str],
    rejected: dict[str, str],
    retries: bool,
    splits: bool,
    shards: Iterable[list[Entry]],
    first_number: int,
) -> None:
    """Write a plan; `shards` are written as they come and named by number."""
    rest = {"settings": settings.to_json(), "classes": classes, "rejected": rejected, "retries": retries}
    rest["splits"] = splits
    with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
        for number, entries in enumerate(shards, first_number):
            file.write(json.dumps([f"shard-{number:06d}.tar", entries]) + "\n")
        file.write(json.dumps(rest) + "\n")


def shard_number(name: str) -> int:
    """Return 17 for shard-000017.tar."""
    return int(name.removeprefix("shard-").removesuffix(".tar"))


def assign_shards(
    items: Iterable[tuple[Item, int, bool]], settings: Settings, classes: list[str]
) -> Iterator[list[Entry]]:
    """Shuffle items, each with Entry.piece and is_last, and cut them into shards of equal count, or of about equal
    bytes; no shard is empty."""
    table = TempTable("CREATE TABLE items (shuffle_key BLOB, size INTEGER, entry BLOB)")
    ids = {name: number for number, name in enumerate(classes)}

    def rows() -> Iterator[tuple[Any, ...]]:
        for _, group in groupby(items, lambda item: item[0].source):
            cuts = list(group)
            for item, piece, is_last in cuts:
                key = shuffle_key(f"{item.name}\0{piece}" if piece else item.name, settings.seed)
                labels = None if item.labels is None else [ids[label] for label in item.labels]
                entry = Entry(item.source, str(item.segment or ""), labels, item.fields, piece, is_last)
                yield key, item.size // len(cuts), json.dumps(entry)

    table.insert("items", rows(), 3)
    ((count, num_bytes),) = table.run("SELECT count(*), coalesce(sum(size), 0) FROM items")
    num_shards = min(settings.min_shards, count)
    if settings.shard_mb:
        num_shards = max(num_shards, round(num_bytes / (settings.shard_mb * 1e6)), 1)
    else:
        num_shards = max(num_shards, -(-count // settings.samples_per_shard))
    shuffled = table.run("SELECT size, entry FROM items ORDER BY shuffle_key")

    def numbered() -> Iterator[tuple[int, Entry]]:
        bytes_before = 0
        for place, (size, entry) in enumerate(shuffled):
            if settings.shard_mb:  # by the middle of the item's bytes: a shard errs by half an item at each end
                number = int((bytes_before + size / 2) / max(num_bytes, 1) * num_shards)
            else:
                number = ((place + 1) * num_shards - 1) // count
            bytes_before += size
            yield number, Entry(*json.loads(entry))

    for _, group in groupby(numbered(), itemgetter(0)):
        yield [entry for _, entry in group]


def shuffle_key(name: str, seed: int = 0) -> bytes:
    """Return what shuffled values are sorted by."""
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="replace")).digest()


def make_key(source: str, segment: str = "") -> str:
    """Name a sample inside the tars: readable, without dots and slashes, another name for every source and segment."""
    digest = hashlib.sha256(join_name(source, segment).encode(errors="surrogateescape")).hexdigest()[:KEY_DIGITS]
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePosixPath(source).stem).strip("-")[: 70 - KEY_DIGITS]
    return f"{readable}-{digest}" if readable else digest


def split_long_videos(items: Iterable[Item], clip_seconds: float | None) -> Iterator[tuple[Item, int, bool]]:
    """Yield every item with the number of its piece and whether it is the last: a long video once per piece that will
    be made of it, going by its header."""
    if clip_seconds is None:
        yield from ((item, 0, True) for item in items)
        return
    items = iter(items)

    def count_pieces(item: Item) -> int:
        return 1 if item.segment else max(1, math.ceil(probe_duration(item.location) / clip_seconds))

    with ThreadPoolExecutor(PROBING_THREADS) as threads:
        while some := list(islice(items, PROBED_AT_ONCE)):
            for item, count in zip(some, threads.map(count_pieces, some), strict=True):
                yield from ((item, piece, piece == count - 1) for piece in range(count))


def probe_duration(location: Location) -> float:
    """Return the seconds that a video's header says; 0 if it does not say, or is no video."""
    try:
        with ExitStack() as stack:
            if isinstance(location, str) and is_remote(location):
                container = stack.enter_context(open_video(stack.enter_context(fsspec.open(location))))
            else:
                container, _ = stack.enter_context(open_source(stack.enter_context(local_copy(location))))
            return (container.duration or 0) / av.time_base
    except (UnusableError, av.error.FFmpegError, OSError, ValueError):
        return 0.0
