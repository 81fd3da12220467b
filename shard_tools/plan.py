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
from contextlib import contextmanager
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from common.atomic_io import atomic_write
from common.errors import InputError
from shard_tools.inputs import Item
from shard_tools.inputs.item import join_name
from shard_tools.probe import THREADS, probe_header
from shard_tools.settings import Settings
from shard_tools.temp_table import TempTable
from shard_tools.work import Entry

KEY_DIGITS = 24  # hexadecimal: among 10⁹ files of one name, two have the same key with a probability of 6e-12
SHARD_NAME = "shard-{:06d}.tar"
STAGED, FINISHED = "items", "shards"  # folders beside the plan, of results and of what is known of whole shards
PROBED_AT_ONCE = 4096


class Plan:
    """The plan of a run: on disk a JSON line with what holds for all of it, then one per video, [entry, …]."""

    def __init__(self, path: Path) -> None:
        """Read the first line; raise InputError if it is damaged."""
        self._path = path
        with self._open() as file:
            told = json.loads(file.readline())
            self.settings: dict[str, Any] = told["settings"]
            self.classes: list[str] = told["classes"]
            self.rejected: dict[str, str] = told["rejected"]  # sources that are known to be unusable, with the reason
            self.retries: bool = told["retries"]  # whether it tries again what was rejected before
            self.shards: dict[str, int] = told["shards"]  # with the number of their entries

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with self._path.open("rb") as file:
                yield file
        except (ValueError, TypeError, LookupError) as error:  # no JSON, or JSON of another shape
            raise InputError(f"{self._path} is damaged ({error}): restore it, or start in another folder") from error

    def videos(self) -> Iterator[list[Entry]]:
        """Yield all that is made of each video, in the order in which shards are to be finished."""
        with self._open() as file:
            for line in islice(file, 1, None):
                yield [Entry(*entry) for entry in json.loads(line)]


def save_plan(
    path: Path,
    items: Iterable[tuple[Item, int, bool]],
    settings: Settings,
    classes: list[str],
    rejected: dict[str, str],
    retries: bool,
    first_number: int,
) -> None:
    """Plan items, each with Entry.piece and is_last, in shards from `first_number` on, and write it down, if there is
    anything to do."""
    shards, videos = assign_shards(items, settings, classes, first_number)
    if shards or rejected:
        told = {"settings": settings.to_json(), "classes": classes, "rejected": rejected, "retries": retries}
        lines = chain([told | {"shards": shards}], videos)
        for folder in (STAGED, FINISHED):
            (path.parent / folder).mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def shard_number(name: str) -> int:
    """Return 17 for shard-000017.tar."""
    return int(name.removeprefix("shard-").removesuffix(".tar"))


def assign_shards(
    items: Iterable[tuple[Item, int, bool]], settings: Settings, classes: list[str], first_number: int = 0
) -> tuple[dict[str, int], Iterator[list[Entry]]]:
    """Shuffle items and cut them into shards of equal count, or of about equal bytes; none is empty.

    Return the number of entries of each shard, and all that is made of each video, those in the first shards first.
    """
    table = TempTable("CREATE TABLE items (shuffle_key BLOB, size INTEGER, source BLOB, entry BLOB)")
    table.insert("items", _list_rows(items, settings.seed, classes), 4)
    ((count, num_bytes),) = table.run("SELECT count(*), coalesce(sum(size), 0) FROM items")
    num_shards = min(settings.min_shards, count)
    if settings.shard_mb:  # by the middle of the item's bytes: a shard errs by half an item at each end
        num_shards = max(num_shards, round(num_bytes / (settings.shard_mb * 1e6)), 1)
        number = "CAST((sum(size) OVER shuffled - size / 2.0) / :total * :num_shards AS INTEGER)"
    else:
        num_shards = max(num_shards, -(-count // settings.samples_per_shard))
        number = "(row_number() OVER shuffled * :num_shards - 1) / :total"
    table.database.execute(
        f"""CREATE TABLE entries AS SELECT *, dense_rank() OVER (ORDER BY number) - 1 + :first AS shard FROM (
            SELECT source, entry, row_number() OVER shuffled AS position, {number} AS number
            FROM items WINDOW shuffled AS (ORDER BY shuffle_key ROWS UNBOUNDED PRECEDING))""",
        {"total": max(num_bytes if settings.shard_mb else count, 1), "num_shards": num_shards, "first": first_number},
    )
    by_video = table.run("""SELECT source, shard, position, entry FROM entries
        ORDER BY min(position) OVER (PARTITION BY source), position""")
    videos = (
        [
            Entry(*json.loads(entry))._replace(shard=SHARD_NAME.format(shard), position=at)
            for _, shard, at, entry in video
        ]
        for _, video in groupby(by_video, itemgetter(0))
    )
    counts = table.run("SELECT shard, count(*) FROM entries GROUP BY shard ORDER BY shard")
    return {SHARD_NAME.format(shard): num_entries for shard, num_entries in counts}, videos


def _list_rows(items: Iterable[tuple[Item, int, bool]], seed: int, classes: list[str]) -> Iterator[tuple[Any, ...]]:
    """Yield shuffle key, bytes, source and entry of each item."""
    ids = {name: number for number, name in enumerate(classes)}
    for _, group in groupby(items, lambda item: item[0].source):
        cuts = list(group)
        for item, piece, is_last in cuts:
            key = shuffle_key(f"{item.name}\0{piece}" if piece else item.name, seed)
            labels = None if item.labels is None else [ids[label] for label in item.labels]
            entry = Entry(item.source, str(item.segment or ""), labels, item.fields, piece, is_last)
            yield key, item.size // len(cuts), item.source, json.dumps(entry)


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
        return 1 if item.segment else max(1, math.ceil(probe_header(item.location).seconds / clip_seconds))

    with ThreadPoolExecutor(THREADS) as threads:
        while some := list(islice(items, PROBED_AT_ONCE)):
            for item, count in zip(some, threads.map(count_pieces, some), strict=True):
                yield from ((item, piece, piece == count - 1) for piece in range(count))
