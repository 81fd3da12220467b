"""All videos of an input, in a table on disk: there may be more of them than memory should hold."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from pipeline.shards.arrays import CONTAINER
from shard_tools.inputs.classes import is_id
from shard_tools.inputs.item import Item, Skipped, TarMember
from shard_tools.temp_table import TempTable

MAX_SIZE = 2**63 - 1  # of SQLite's numbers; a tar's header may claim more
SCHEMA = """
    CREATE TABLE items (source BLOB, location BLOB, label BLOB, size INTEGER, problem BLOB, is_array INTEGER);
    CREATE TABLE names (label BLOB PRIMARY KEY, name BLOB, problem BLOB) WITHOUT ROWID;
    CREATE TABLE stored (source BLOB, label BLOB, size INTEGER);
    CREATE TABLE rejects (source BLOB PRIMARY KEY) WITHOUT ROWID
"""
IS_NEW = """NOT EXISTS (SELECT 1 FROM stored WHERE stored.source = items.source)
    AND source NOT IN (SELECT source FROM rejects)"""


class Inputs:
    """Items by source, each once, in the order of their sources. All of them stream."""

    def __init__(self) -> None:
        self._table = TempTable(SCHEMA)

    def add(self, items: Iterable[Item]) -> None:
        self._table.insert("items", map(_to_row, items), 6)

    @property
    def has_only_arrays(self) -> bool:
        return self._table.fetch_one("SELECT 1 FROM items WHERE NOT is_array LIMIT 1") is None

    def skip_arrays(self, skipped: Skipped, kind: str) -> None:
        for (source,) in self._table.run("SELECT source FROM items WHERE is_array ORDER BY rowid"):
            skipped.add(kind, source)
        self._table.run("DELETE FROM items WHERE is_array")

    def deduplicate(self, unlabeled: bool) -> None:
        """Keep every source once, as it was added first; require that all have labels, or none has."""
        table = self._table
        table.run("CREATE INDEX by_source ON items (source)")
        conflicts = "GROUP BY source HAVING count(DISTINCT coalesce(label, x'')) > 1"
        for source, first in list(table.run(f"SELECT source, min(rowid) FROM items {conflicts}")):
            rows = table.run("SELECT label FROM items WHERE source = ? ORDER BY rowid", source)
            label, *others = [label for (label,) in rows]
            other = [other for other in others if other != label][-1]
            problem = f"it is listed with two labels, {label!r} and {other!r}"
            table.run("UPDATE items SET problem = ? WHERE rowid = ?", problem, first)
        repeated = "FROM items GROUP BY source HAVING count(*) > 1"
        table.run(f"""DELETE FROM items
            WHERE source IN (SELECT source {repeated}) AND rowid NOT IN (SELECT min(rowid) {repeated})""")
        if unlabeled:
            table.run("UPDATE items SET label = NULL")
        elif table.fetch_one("SELECT 1 FROM items WHERE label IS NOT NULL LIMIT 1"):
            problem = "it has no label, others have one"
            table.run("UPDATE items SET problem = ? WHERE label IS NULL AND problem IS NULL", problem)

    def __len__(self) -> int:
        return self._count("TRUE")

    def __iter__(self) -> Iterator[Item]:
        return self._select("TRUE ORDER BY source")

    def by_size(self) -> Iterator[Item]:
        """Yield the usable ones from the smallest to the largest."""
        return self._select("problem IS NULL ORDER BY size, source")

    def new(self) -> Iterator[Item]:
        """Yield the usable ones that the dataset neither holds nor has rejected."""
        return self._select(f"problem IS NULL AND {IS_NEW} ORDER BY source")

    def new_problems(self) -> dict[str, str]:
        """Return the new sources that cannot be used, with the reason."""
        found = self._select(f"problem IS NOT NULL AND {IS_NEW} ORDER BY source")
        return {item.source: item.problem or "" for item in found}

    def _select(self, condition: str) -> Iterator[Item]:
        rows = self._table.run(f"SELECT source, location, label, size, problem FROM items WHERE {condition}")
        return (Item(source, _parse_location(location), *others) for source, location, *others in rows)

    @property
    def num_usable(self) -> int:
        return self._count("problem IS NULL")

    def _count(self, condition: str) -> int:
        return int(next(self._table.run(f"SELECT count(*) FROM items WHERE {condition}"))[0])

    def location(self, source: str) -> str | TarMember | None:
        row = self._table.fetch_one("SELECT location FROM items WHERE source = ?", source)
        return None if row is None else _parse_location(row[0])

    def labels(self) -> set[str]:
        return {label for (label,) in self._table.run("SELECT DISTINCT label FROM items WHERE label IS NOT NULL")}

    def apply_label_map(self, classes: list[str]) -> None:
        """Turn labels that are numbers of the label map into names; any other unknown label is a problem."""
        by_id = dict(enumerate(classes))
        rows: list[tuple[str, str | None, str | None]] = [(name, name, None) for name in classes]
        for label in self.labels() - set(classes):
            name = by_id.get(int(label)) if is_id(label) else None
            rows.append((label, name, None if name is not None else f"its label {label!r} is not in the label map"))
        self._table.run("DELETE FROM names")
        self._table.insert("names", dict.fromkeys(rows), 3)
        self._table.run("""UPDATE items SET (label, problem) = (SELECT name, names.problem FROM names
            WHERE names.label = items.label) WHERE problem IS NULL AND label IS NOT NULL""")

    def compare(self, stored: Iterable[tuple[str, str | None, int]], rejects: Iterable[str]) -> None:
        """Tell what a dataset holds, as (source, label, bytes), and what it has rejected: these are not new."""
        self._table.run("DELETE FROM stored")
        self._table.run("DELETE FROM rejects")
        self._table.insert("stored", stored, 3)
        self._table.insert("rejects", ((source,) for source in rejects), 1)
        self._table.run("CREATE INDEX IF NOT EXISTS by_stored_source ON stored (source)")

    def find_change(self) -> str | None:
        """Say how many stored videos differ from the input, and how the first does; None if none does."""
        changes = {
            "label": ("stored.label IS NOT items.label", "have another label now", "{!r} there and {!r} in the input"),
            "size": (
                "items.size AND stored.size AND stored.size != items.size",
                "have changed since they were stored",
                "{} bytes then and {} now",
            ),
        }
        for column, (differs, what, how) in changes.items():
            rows = self._table.run(f"""
                SELECT items.source, stored.{column}, items.{column} FROM items
                JOIN stored ON stored.source = items.source
                WHERE items.problem IS NULL AND {differs} ORDER BY items.source, stored.rowid
            """)
            last_samples = [list(samples)[-1] for _, samples in groupby(rows, itemgetter(0))]
            if last_samples:
                source, *values = last_samples[0]
                return f"{len(last_samples)} videos that {what} (the first: {source}, {how.format(*values)})"
        return None


def _to_row(item: Item) -> tuple[Any, ...]:
    is_array = item.source.lower().endswith(f".{CONTAINER}")
    return item.source, json.dumps(item.location), item.label, min(item.size, MAX_SIZE), item.problem, is_array


def _parse_location(text: str) -> str | TarMember:
    location = json.loads(text)
    return location if isinstance(location, str) else TarMember(*location)
