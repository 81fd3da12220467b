"""All that an input asks for, in a table on disk: there may be more of them than memory should hold."""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from common.errors import InputError
from common.logging import printable
from pipeline.shards.arrays import CONTAINER
from shard_tools.inputs.classes import LabelMap, is_id
from shard_tools.inputs.folders import label_folders
from shard_tools.inputs.item import Item, Location, ParquetCell, Segment, Skipped, TarMember, join_name, split_name
from shard_tools.inputs.options import FOLDER, ListOptions
from shard_tools.splits import GroupOf, choose_held_out
from shard_tools.temp_table import TempTable

NUM_NAMED = 10  # classes, or files, in a sentence
NUM_REASONS = 5
MAX_SIZE = 2**63 - 1  # of SQLite's numbers; a tar's header may claim more
SCHEMA = """
    CREATE TABLE items (source TEXT, location TEXT, labels TEXT, size INTEGER, problem TEXT, segment TEXT, fields TEXT);
    CREATE TABLE stored (source TEXT, segment TEXT, labels TEXT, size INTEGER);
    CREATE TABLE rejects (source TEXT, segment TEXT)
"""
IS_ARRAY = f"lower(CAST(source AS TEXT)) LIKE '%.{CONTAINER}'"
IS_NEW = """NOT EXISTS (SELECT 1 FROM stored WHERE stored.source = items.source AND stored.segment = items.segment)
    AND NOT EXISTS (SELECT 1 FROM rejects WHERE rejects.source = items.source AND rejects.segment = items.segment)"""


class Inputs:
    """Items by source and segment, in their order. All of them stream."""

    def __init__(self) -> None:
        self._table = TempTable(SCHEMA)
        self.notes: list[str] = []  # how each list was read
        self.num_repeated = self.num_merged = 0  # rows that say nothing new, or only other fields

    def add(self, items: Iterable[Item]) -> None:
        rows = (
            (
                item.source,
                item.location if isinstance(item.location, str) else json.dumps(item.location),  # no path starts with [
                _dump_labels(item.labels),
                min(item.size, MAX_SIZE),
                item.problem or (item.segment.problem if item.segment else None),
                str(item.segment or ""),
                item.fields,
            )
            for item in items
        )
        self._table.insert("items", rows, 7)

    def _index(self) -> None:
        self._table.run("CREATE INDEX IF NOT EXISTS by_source ON items (source, segment)")

    def _exists(self, condition: str) -> bool:
        return self._table.fetch_one(f"SELECT 1 FROM items WHERE {condition} LIMIT 1") is not None

    @property
    def has_only_arrays(self) -> bool:
        return not self._exists(f"NOT {IS_ARRAY}")

    @property
    def has_segments(self) -> bool:
        return self._exists("segment != ''")

    def skip_arrays(self, skipped: Skipped, kind: str) -> None:
        for (source,) in self._table.run(f"SELECT source FROM items WHERE {IS_ARRAY} ORDER BY rowid"):
            skipped.add(kind, source)
        self._table.run(f"DELETE FROM items WHERE {IS_ARRAY}")

    def label_by_folder(self, options: ListOptions, where: str, num_outer: int = 0) -> None:
        """Take the folders of all videos, without the `num_outer` first ones, for their classes, unless some have
        labels; remove the videos of subsets that are not wanted."""
        labeled = options.label != FOLDER and (options.label is not None or self._exists("labels IS NOT NULL"))

        def get_folder(source: str | bytes) -> str:
            name = source if isinstance(source, str) else source.decode(errors="surrogatepass")
            return "/".join(name.split("/")[num_outer:-1])

        counts = Counter(get_folder(source) for (source,) in self._table.run("SELECT source FROM items"))
        found = label_folders(counts, replace(options, unlabeled=True) if labeled else options, where)
        define = self._table.database.create_function
        define("is_wanted", 1, lambda source: get_folder(source) in found)
        define("find_labels", 1, lambda source: _dump_labels(found[get_folder(source)]))
        if len(found) < len(counts):
            self._table.run("DELETE FROM items WHERE NOT is_wanted(source)")
        if not labeled and any(found.values()):
            self._table.run("UPDATE items SET labels = find_labels(source)")

    def deduplicate(self, unlabeled: bool, constant_label: str | None = None) -> None:
        """Keep every video once, as it was added first, and all segments; require that all have labels, or none has."""
        self._index()
        self._table.run("""CREATE TEMP TABLE repeated AS SELECT rowid AS id, * FROM items WHERE (source, segment) IN
            (SELECT source, segment FROM items GROUP BY source, segment HAVING count(*) > 1)""")
        rows = self._table.run("SELECT source, segment, labels, fields, id FROM repeated ORDER BY source, segment, id")
        for (source, segment), group in groupby(rows, itemgetter(0, 1)):
            if segment:
                order = sorted((labels or "", fields, row) for _, _, labels, fields, row in group)
                for number, (_, _, row) in enumerate(order[1:], 2):
                    self._table.run("UPDATE items SET segment = ? WHERE rowid = ?", f"{segment};{number}", row)
            else:
                self._merge(source, list(group))
        self._table.run("DROP TABLE repeated")
        if unlabeled:
            labels = None if constant_label is None else json.dumps([constant_label])
            self._table.run("UPDATE items SET labels = ?", labels)
        elif self._exists("labels IS NULL AND problem IS NULL") and self._exists("labels IS NOT NULL"):
            problem = "it has no label, others have one"
            self._table.run("UPDATE items SET problem = ? WHERE labels IS NULL AND problem IS NULL", problem)

    def _merge(self, source: str, rows: list[list[Any]]) -> None:
        """Keep the first row of a whole video, with the fields of all, if they agree on its labels."""
        first = rows[0][-1]
        labels, fields = ([*dict.fromkeys(row[n] for row in rows)] for n in (2, 3))
        self.num_merged += len(fields) - 1
        self.num_repeated += len(rows) - len(fields)
        if len(labels) > 1:
            problem = f"it is listed with two labels, {' and '.join(map(_format_labels, labels[:2]))}"
            self._table.run("UPDATE items SET problem = ? WHERE rowid = ?", problem, first)
        if len(fields) > 1:
            self._table.run("UPDATE items SET fields = ? WHERE rowid = ?", merge_fields(fields), first)
        self._table.run("DELETE FROM items WHERE source = ? AND segment = '' AND rowid != ?", source, first)

    def measure(self) -> None:
        """Find out the bytes of files that so far are only known to be there, and whether they can be read."""
        unmeasured = """SELECT rowid, location FROM items WHERE rowid > ? AND size = 0 AND problem IS NULL
            AND substr(location, 1, 1) = '/' LIMIT 10000"""
        rowid = 0
        while rows := list(self._table.run(unmeasured, rowid)):
            for rowid, path in rows:
                with suppress(OSError):  # it was there: whoever reads it will say what is wrong
                    status = os.stat(path)
                    problem = None if os.access(path, os.R_OK) else "no permission to read it"
                    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                    self._table.run("UPDATE items SET size = ?, problem = ? WHERE rowid = ?", size, problem, rowid)

    def hold_out(self, share: float, keep: bool, group_of: GroupOf | None, known: Mapping[str, bool]) -> None:
        """Keep the files that are held out, or drop them, by whole groups, by default files. Those of `known` sides
        stay there, and their groups with them."""
        groups: dict[str, Counter[str]] = {}
        group_by_source: dict[str, str] = {}
        sides: dict[str, bool] = {}
        rows = self._table.run("SELECT source, labels, fields FROM items ORDER BY source, rowid")
        for source, labels, fields in rows:
            group = group_of(source, json.loads(fields or "{}")) if group_of else source
            if (other := group_by_source.setdefault(source, group)) != group:
                raise InputError(f"{source} is of the groups {other} and {group}: a file has only one")
            groups.setdefault(group, Counter()).update(json.loads(labels) if labels else [""])
            if source in known and sides.setdefault(group, known[source]) != known[source]:
                raise InputError(f"{group} was on both sides of an earlier run: give another output folder")
        held_out = choose_held_out(groups, share, sides)
        self._index()
        for source, group in group_by_source.items():
            if (group in held_out) != keep:
                self._table.run("DELETE FROM items WHERE source = ?", source)
        if keep:
            kind = "groups" if group_of else "files (give --group-by if several show one recording, person or place)"
            missing = set().union(*groups.values()) - set().union(*(groups[group] for group in held_out))
            note = f"; no video of {', '.join(map(printable, sorted(missing)))}" if missing else ""
            self.notes.append(f"held out: {len(held_out)} of {len(groups)} {kind}{note}")

    def __len__(self) -> int:
        return self._count("TRUE")

    def __iter__(self) -> Iterator[Item]:
        return self._select("TRUE")

    def choose(self, count: int) -> Iterator[Item]:
        """Yield about so many of the usable ones, up to twice as many, from all over."""
        return self._select(f"problem IS NULL AND rowid % {max(1, len(self) // count)} = 0")

    def new(self) -> Iterator[Item]:
        """Yield the usable ones that the dataset neither holds nor has rejected."""
        return self._select(f"problem IS NULL AND {IS_NEW}")

    def new_problems(self) -> dict[str, str]:
        """Return the names of the new ones that cannot be used, with the reason."""
        return {item.name: item.problem or "" for item in self._select(f"problem IS NOT NULL AND {IS_NEW}")}

    def _select(self, condition: str) -> Iterator[Item]:
        return map(_to_item, self._table.run(f"SELECT * FROM items WHERE {condition} ORDER BY source, segment"))

    @property
    def num_usable(self) -> int:
        return self._count("problem IS NULL")

    def _count(self, condition: str) -> int:
        return int(next(self._table.run(f"SELECT count(*) FROM items WHERE {condition}"))[0])

    def location(self, source: str) -> Location | None:
        row = self._table.fetch_one("SELECT location FROM items WHERE source = ?", source)
        return None if row is None else _parse_location(row[0])

    def labels(self) -> set[str]:
        return set().union(*self._label_sets())

    def require_distinct_labels(self) -> None:
        """Raise InputError if two labels differ in case or leading zeros only."""
        seen: dict[str, str] = {}
        for label in sorted(self.labels()):
            other = seen.setdefault(normalize_label(label), label)
            if other != label:
                what = f"the labels {printable(other)} and {printable(label)} differ in case, spaces or zeros alone"
                raise InputError(f"{what}: write them alike, or give --label-map, or --unlabeled")

    def _label_sets(self) -> Iterator[list[str]]:
        rows = self._table.run("SELECT DISTINCT labels FROM items WHERE labels IS NOT NULL AND problem IS NULL")
        return (json.loads(labels) for (labels,) in rows)

    def apply_label_map(self, label_map: LabelMap) -> None:
        """Turn what lists write for a class into its name; any unknown label is a problem."""
        names, first = label_map.match(self.labels())
        if first is not None:
            self.notes.append(f"labels are numbers from {first}: {first} is {label_map.names[0]}")

        def explain(labels: str) -> str | None:
            unknown = (label for label in json.loads(labels) if label not in names)
            return next((f"its label {label!r} is not in the label map" for label in unknown), None)

        define = self._table.database.create_function
        define("explain_label", 1, explain)
        define("rename", 1, lambda labels: _dump_labels(tuple(names[label] for label in json.loads(labels))))
        usable = "problem IS NULL AND labels IS NOT NULL"
        self._table.run(f"UPDATE items SET problem = explain_label(labels) WHERE {usable}")
        self._table.run(f"UPDATE items SET labels = rename(labels) WHERE {usable}")

    def describe(self) -> str:
        """Say what was found: samples, files, classes, and what is wrong."""
        columns = "count(*), sum(problem IS NULL), sum(segment != ''), sum(problem IS NULL AND labels IS NULL)"
        total, usable, segments, unlabeled = next(self._table.run(f"SELECT {columns} FROM items"))
        files = next(self._table.run("SELECT count(DISTINCT source) FROM items"))[0] if segments else total
        labels = sorted(self.labels(), key=lambda label: (len(label), label) if is_id(label) else (0, label))
        some = [f"{labels[0]}…{labels[-1]}"] if len(labels) > NUM_NAMED else labels
        parts = [
            f"{usable} {'segments' if segments else 'videos'} of {files} files",
            f"{len(labels)} classes ({', '.join(map(printable, some))})" if labels else "no labels",
            f"{unlabeled} without a label" if labels and unlabeled else "",
            f"{total - files} rows share a video" if segments else "",
            f"{self.num_merged} rows say more of a video, whose fields are lists" if self.num_merged else "",
            f"{self.num_repeated} rows repeat another and are left out" if self.num_repeated else "",
            f"{total - usable} that cannot be used",
        ]
        return ", ".join(filter(None, parts))

    def require_usable(self, limit: float, where: str) -> None:
        """Raise InputError if more than this share cannot be used, or all, with reasons, counts and examples."""
        total, bad = len(self), len(self) - self.num_usable
        if not total or (bad <= limit * total and bad < total):
            return
        problems = "FROM items WHERE problem IS NOT NULL"
        most = f"SELECT problem, count(*) AS n {problems} GROUP BY 1 ORDER BY n DESC LIMIT {NUM_REASONS}"
        said = "; ".join(f"{count} times: {printable(reason)}" for reason, count in self._table.run(most))
        rows = self._table.run(f"SELECT source {problems} ORDER BY rowid LIMIT ?", NUM_NAMED)
        names = ", ".join([*(printable(source) for (source,) in rows), *["…"] * (bad > NUM_NAMED)])
        share = f"{bad} of {total} videos cannot be used, and the limit is {limit:.0%} (--max-rejects)"
        share = f"none of {total} videos can be used" if bad == total else share
        fix = "; give --root or --suffix if that is what names lack" if "no such file" in said else ""
        raise InputError(f"{share}: {said} (in {where}: {names}); nothing was written{fix}")

    def compare(self, stored: Iterable[tuple[str, str, tuple[str, ...] | None, int]], rejects: Iterable[str]) -> None:
        """Tell what a dataset holds, as (source, segment, labels, bytes), and has rejected, by name: not new."""
        self._index()
        self.measure()
        self._table.run("DELETE FROM stored")
        self._table.run("DELETE FROM rejects")
        rows = ((*place, _dump_labels(labels), size) for *place, labels, size in stored)
        self._table.insert("stored", rows, 4)
        self._table.insert("rejects", map(split_name, rejects), 2)
        for table in ("stored", "rejects"):
            self._table.run(f"CREATE INDEX IF NOT EXISTS by_{table}_source ON {table} (source, segment)")

    def find_change(self) -> str | None:
        """Say how many stored samples differ from the input, and how the first does; None if none does."""
        for column, differs, what in (
            ("labels", "stored.labels IS NOT items.labels", "have another label now"),
            ("size", "items.size AND stored.size AND stored.size != items.size", "have changed since they were stored"),
        ):
            query = f"""
                SELECT items.source, items.segment, stored.{column}, items.{column}, max(stored.rowid) FROM items
                JOIN stored ON stored.source = items.source AND stored.segment = items.segment
                WHERE items.problem IS NULL AND {differs} GROUP BY items.source, items.segment ORDER BY 1, 2
            """
            rows = list(self._table.run(query))
            if rows:
                source, segment, then, now, _ = rows[0]
                how = f"{then} bytes then and {now} now"
                if column == "labels":
                    how = f"{_format_labels(then)} there and {_format_labels(now)} in the input"
                return f"{len(rows)} videos that {what} (the first: {join_name(source, segment)}, {how})"
        return None


def _to_item(row: list[Any]) -> Item:
    source, location, labels, size, problem, segment, fields = row
    names = None if labels is None else tuple(json.loads(labels))
    part = Segment.parse(segment) if segment else None
    return Item(source, _parse_location(location), names, size, problem, part, fields)


def normalize_label(label: str) -> str:
    if label.isdecimal():
        return label.lstrip("0") or "0"
    return re.sub(r"[\s_]+", " ", label).casefold() if len(label) > 1 else label  # letters may be classes


def merge_fields(texts: list[str]) -> str:
    """Return what several rows say of a video: fields that differ become lists with an entry a row."""
    rows = [json.loads(text or "{}") for text in texts]
    merged = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}
    merged = {name: cells if any(cell != cells[0] for cell in cells) else cells[0] for name, cells in merged.items()}
    return json.dumps(merged, ensure_ascii=False)


@lru_cache(maxsize=2**16)
def _dump_labels(labels: tuple[str, ...] | None) -> str | None:
    return None if labels is None else json.dumps(sorted(set(labels)))


def _format_labels(text: str | None) -> str:
    labels = json.loads(text) if text else None
    return repr(labels[0] if labels and len(labels) == 1 else labels)


def _parse_location(text: str) -> Location:
    if not text.startswith("["):
        return text
    values = json.loads(text)
    return TarMember(*values) if len(values) == len(TarMember._fields) else ParquetCell(*values)
