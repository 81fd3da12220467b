"""All videos of an input, in a table on the disk: there may be more of them than memory should hold."""

import pickle
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from pipeline.shards.arrays import CONTAINER
from shard_tools.inputs.classes import is_id
from shard_tools.inputs.item import Item, Skipped, TarMember
from shard_tools.temp_table import TempTable, as_bytes, as_text

LARGEST = 2**63 - 1  # of SQLite's numbers; a tar's header may say more of what is no file
COLUMNS = "source, location, label, size, problem"


class Inputs(TempTable):
    """Items by source, each once. What is asked for streams: nothing here grows with their number but the disk."""

    schema = """
        CREATE TABLE items (source BLOB, location BLOB, label BLOB, size INTEGER, problem BLOB, is_array INTEGER);
        CREATE TABLE stored (source BLOB, label BLOB, size INTEGER);
        CREATE TABLE rejects (source BLOB PRIMARY KEY) WITHOUT ROWID;
        CREATE TABLE renamed (label BLOB PRIMARY KEY, name BLOB, problem BLOB) WITHOUT ROWID;
    """
    content = "the names of all videos"
    row_bytes = 800

    def __init__(self) -> None:
        super().__init__()
        self._teach("two_labels", _two_labels, 2)

    def add(self, items: Iterable[Item]) -> None:
        self._insert("items", map(_row, items), 6)

    @property
    def only_arrays(self) -> bool:
        return self._one("SELECT 1 FROM items WHERE NOT is_array LIMIT 1") is None

    def pass_over_arrays(self, skipped: Skipped, kind: str) -> None:
        for (source,) in self._run("SELECT source FROM items WHERE is_array ORDER BY rowid"):
            skipped.add(kind, as_text(source))
        self._run("DELETE FROM items WHERE is_array")

    def deduplicate(self, unlabelled: bool) -> None:
        """See to it that every source is there once, as it was added first, and that all have labels or none has."""
        self._run("CREATE INDEX by_source ON items (source)")
        self._run("""CREATE TABLE again AS
            SELECT source, min(rowid) AS first FROM items GROUP BY source HAVING count(*) > 1""")
        others = "FROM items AS other WHERE other.source = items.source AND other.label IS NOT items.label"
        self._run(f"""UPDATE items
            SET problem = two_labels(label, (SELECT label {others} ORDER BY other.rowid DESC LIMIT 1))
            WHERE rowid IN (SELECT first FROM again) AND EXISTS (SELECT 1 {others})""")
        self._run("""DELETE FROM items
            WHERE source IN (SELECT source FROM again) AND rowid NOT IN (SELECT first FROM again)""")
        if unlabelled:
            self._run("UPDATE items SET label = NULL")
        elif self._one("SELECT 1 FROM items WHERE label IS NOT NULL LIMIT 1"):
            problem = as_bytes("it has no label, others have one")
            self._run("UPDATE items SET problem = ? WHERE label IS NULL AND problem IS NULL", problem)

    def __len__(self) -> int:
        return int(self._one("SELECT count(*) FROM items")[0])

    def __iter__(self) -> Iterator[Item]:
        return map(_item, self._run(f"SELECT {COLUMNS} FROM items ORDER BY source"))

    @property
    def num_usable(self) -> int:
        return int(self._one("SELECT count(*) FROM items WHERE problem IS NULL")[0])

    def by_size(self) -> Iterator[Item]:
        """Those that have no problem, from the smallest to the largest."""
        return map(_item, self._run(f"SELECT {COLUMNS} FROM items WHERE problem IS NULL ORDER BY size, source"))

    def location(self, source: str) -> str | TarMember | None:
        row = self._one("SELECT location FROM items WHERE source = ?", as_bytes(source))
        return None if row is None else pickle.loads(row[0])

    def labels(self) -> set[str]:
        return {as_text(label) for (label,) in self._run("SELECT DISTINCT label FROM items WHERE label IS NOT NULL")}

    def name_labels(self, classes: list[str]) -> None:
        """Under a label map, a label is a name of it, or a number of one; all others make a video unusable."""
        rows = []
        for label in self.labels() - set(classes):
            known = is_id(label) and int(label) < len(classes)
            name, problem = (
                (classes[int(label)], None) if known else (None, f"its label {label!r} is not in the label map")
            )
            rows.append((as_bytes(label), as_bytes(name), as_bytes(problem)))
        self._run("DELETE FROM renamed")
        self._insert("renamed", rows, 3)
        self._run("""
            UPDATE items SET (label, problem) = (SELECT name, problem FROM renamed WHERE renamed.label = items.label)
            WHERE problem IS NULL AND label IN (SELECT label FROM renamed)
        """)

    def compare(self, stored: Iterable[tuple[str, str | None, int]], rejects: Iterable[str]) -> None:
        """What a dataset holds, as (source, label, bytes), and what it has rejected: these are not new."""
        self._run("DELETE FROM stored")
        self._run("DELETE FROM rejects")
        self._insert("stored", ((as_bytes(name), as_bytes(label), size) for name, label, size in stored), 3)
        self._insert("rejects", ((as_bytes(source),) for source in rejects), 1)
        self._run("CREATE INDEX IF NOT EXISTS by_stored_source ON stored (source)")

    def relabelled(self) -> tuple[int, str]:
        """How many stored videos have another label now, and what is to say of the first."""
        return self._changed(
            "stored.label",
            "items.label",
            "stored.label IS NOT items.label",
            "{!r} there and {!r} in the input",
            as_text,
        )

    def resized(self) -> tuple[int, str]:
        """How many stored videos have another size now, and what is to say of the first."""
        differ = "items.size AND stored.size AND stored.size != items.size"
        return self._changed("stored.size", "items.size", differ, "{} bytes then and {} now", int)

    def _changed(self, then: str, now: str, differ: str, sentence: str, shown: Any) -> tuple[int, str]:
        rows = self._run(f"""
            SELECT items.source, {then}, {now} FROM items JOIN stored ON stored.source = items.source
            WHERE items.problem IS NULL AND {differ} ORDER BY items.source, stored.rowid
        """)
        count, first = 0, ""
        for source, samples in groupby(rows, itemgetter(0)):
            *_, (_, there, here) = samples
            count += 1
            first = first or f"{as_text(source)}, {sentence.format(shown(there), shown(here))}"
        return count, first

    _NEW = """NOT EXISTS (SELECT 1 FROM stored WHERE stored.source = items.source)
        AND source NOT IN (SELECT source FROM rejects)"""

    def new(self) -> Iterator[Item]:
        """What the dataset neither holds nor has rejected, and has no problem, in the order of the sources."""
        return map(
            _item, self._run(f"SELECT {COLUMNS} FROM items WHERE problem IS NULL AND {self._NEW} ORDER BY source")
        )

    def new_problems(self) -> dict[str, str]:
        """Sources that are new and cannot be used, with the reason."""
        rows = self._run(f"SELECT source, problem FROM items WHERE problem IS NOT NULL AND {self._NEW} ORDER BY source")
        return {as_text(source): as_text(problem) for source, problem in rows}


def _row(item: Item) -> tuple[Any, ...]:
    return (
        as_bytes(item.source),
        pickle.dumps(item.location),
        as_bytes(item.label),
        min(item.size, LARGEST),
        as_bytes(item.problem),
        item.source.lower().endswith(f".{CONTAINER}"),
    )


def _item(row: tuple[Any, ...]) -> Item:
    source, location, label, size, problem = row
    return Item(as_text(source), pickle.loads(location), as_text(label), size, as_text(problem))


def _two_labels(first: bytes | None, other: bytes | None) -> bytes | None:
    return as_bytes(f"it is listed with two labels, {as_text(first)!r} and {as_text(other)!r}")
