"""Which video goes into which shard, decided before the first one is read.

A pure function of the sorted list of sources and the settings: that is what makes shards the same at any number of
workers and after any interruption. A video that turns out to be unusable leaves a gap and moves no other.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from itertools import groupby, islice, pairwise
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any

from shard_tools.inputs import Item
from shard_tools.settings import Settings
from shard_tools.temp_table import TempTable, as_bytes, as_text

# Of the digest in a key, hexadecimal. n sources, all of one file name, have two of one key with a probability of about
# n² / 2^(4 digits + 1): with 10⁹ sources 6e-12. Earlier versions' 10 digits made it 36 % with 10⁶ of them.
KEY_DIGITS = 24
EARLIER_KEY_DIGITS = 10


def shuffle_key(name: str, seed: int = 0) -> bytes:
    """What shuffled values are sorted by."""
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="replace")).digest()


class Shuffled(TempTable):
    """Items in an order that depends on the seed, their names and the numbers of their pieces alone."""

    schema = "CREATE TABLE items (shuffle_key BLOB, source BLOB, label BLOB, size INTEGER, piece INTEGER)"
    content = "all videos"
    row_bytes = 400

    def __init__(self, items: Iterable[Item], seed: int):
        super().__init__()
        with self.room():
            self._insert("items", (_shuffled_row(item, seed) for item in items), 5)
            self.count, self.total = self._one("SELECT count(*), coalesce(sum(size), 0) FROM items")

    def __iter__(self) -> Iterator[Item]:
        """Without locations."""
        rows = self._run("SELECT source, label, size, piece FROM items ORDER BY shuffle_key")
        return (Item(as_text(name), "", as_text(label), size, None, piece) for name, label, size, piece in rows)


def _shuffled_row(item: Item, seed: int) -> tuple[Any, ...]:
    name = f"{item.source}\0{item.piece}" if item.piece else item.source
    return shuffle_key(name, seed), as_bytes(item.source), as_bytes(item.label), item.size, item.piece


def assign(order: Shuffled, settings: Settings) -> Iterator[list[Item]]:
    """Shuffled items cut into shards of equal count, or of about equal bytes; no shard is empty."""
    if settings.shard_mb is None:
        num_shards = _num_equal(order, settings)
        items = iter(order)
        for start, end in pairwise(number * order.count // max(num_shards, 1) for number in range(num_shards + 1)):
            yield list(islice(items, end - start))
        return
    for _, group in groupby(_numbered(order, settings), itemgetter(0)):
        yield [item for _, item in group]


def count_shards(order: Shuffled, settings: Settings) -> int:
    """How many `assign` yields; those of about equal bytes are counted one by one."""
    if settings.shard_mb is None:
        return _num_equal(order, settings)
    return sum(1 for _ in groupby(number for number, _ in _numbered(order, settings)))


def _num_equal(order: Shuffled, settings: Settings) -> int:
    return max(min(settings.min_shards, order.count), -(-order.count // settings.samples_per_shard))


def _numbered(order: Shuffled, settings: Settings) -> Iterator[tuple[int, Item]]:
    assert settings.shard_mb is not None
    least = min(settings.min_shards, order.count)
    num_shards = max(least, round(order.total / (settings.shard_mb * 1e6)), 1)
    before = 0
    for item in order:
        # Where the middle of the item's bytes falls: a shard errs by half an item at each end.
        yield int((before + item.size / 2) / max(order.total, 1) * num_shards), item
        before += item.size


class Keys(TempTable):
    """Keys of sources, to find two sources of one key: of one of them nothing would ever be staged."""

    schema = "CREATE TABLE keys (key TEXT, source BLOB, is_stored INTEGER)"
    content = "the keys of all videos"
    row_bytes = 300

    def add(self, pairs: Iterable[tuple[str, str]], are_stored: bool) -> None:
        self._insert("keys", ((key, as_bytes(source), are_stored) for key, source in pairs), 3)

    def alike(self) -> tuple[str, str, str] | None:
        """(key, source, another source) of which one at least is not stored yet, or None."""
        rows = self._run("SELECT key, source, is_stored FROM keys ORDER BY key, is_stored, rowid")
        for key, group in groupby(rows, itemgetter(0)):
            (_, first, is_stored), *others = group
            other = next((source for _, source, _ in others if source != first), None)
            if other is not None and not is_stored:
                return key, as_text(first), as_text(other)
        return None


def make_key(source: str, digits: int = KEY_DIGITS) -> str:
    """A name for a sample inside the tars: readable, without dots and slashes, different for different sources."""
    digest = hashlib.sha256(source.encode(errors="surrogateescape")).hexdigest()[:digits]
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePosixPath(source).stem).strip("-")[: 70 - digits]
    return f"{readable}-{digest}" if readable else digest
