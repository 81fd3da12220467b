"""Which video goes into which shard, decided before the first one is read.

A pure function of the sorted list of sources and the settings: that is what makes shards the same at any number of
workers and after any interruption. A video that turns out to be unusable leaves a gap and moves no other.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import TypeVar

from shard_tools.inputs import Item
from shard_tools.settings import Settings

T = TypeVar("T")

# Of the digest in a key, hexadecimal. n sources, all of one file name, have two of one key with a probability of about
# n² / 2^(4 digits + 1): with 10⁹ sources 6e-12. Earlier versions' 10 digits made it 36 % with 10⁶ of them.
KEY_DIGITS = 24
EARLIER_KEY_DIGITS = 10


def shuffled_by(values: Iterable[T], name: Callable[[T], str], seed: int = 0) -> list[T]:
    """Values in an order that depends on the seed and each one's name alone."""
    return sorted(values, key=lambda value: shuffle_key(name(value), seed))


def shuffle_key(name: str, seed: int = 0) -> bytes:
    """What shuffled values are sorted by."""
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="replace")).digest()


def assign(items: Sequence[Item], settings: Settings) -> list[list[Item]]:
    """Shuffled items cut into shards of equal count, or of about equal bytes; no shard is empty."""
    if not items:
        return []
    order = shuffled_by(
        items, lambda item: f"{item.source}\0{item.piece}" if item.piece else item.source, settings.seed
    )
    least = min(settings.min_shards, len(order))
    if settings.shard_mb is None:
        num_shards = max(least, -(-len(order) // settings.samples_per_shard))
        edges = [number * len(order) // num_shards for number in range(num_shards + 1)]
        return [order[start:end] for start, end in pairwise(edges)]
    total = sum(item.size for item in order)
    num_shards = max(least, round(total / (settings.shard_mb * 1e6)), 1)
    numbers = []
    before = 0
    for item in order:
        # Where the middle of the item's bytes falls: a shard errs by half an item at each end.
        numbers.append(int((before + item.size / 2) / max(total, 1) * num_shards))
        before += item.size
    return [[item for _, item in group] for _, group in groupby(zip(numbers, order, strict=True), lambda pair: pair[0])]


def key_of(source: str, digits: int = KEY_DIGITS) -> str:
    """A name for a sample inside the tars: readable, without dots and slashes, different for different sources."""
    digest = hashlib.sha256(source.encode(errors="surrogateescape")).hexdigest()[:digits]
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePosixPath(source).stem).strip("-")[: 70 - digits]
    return f"{readable}-{digest}" if readable else digest
