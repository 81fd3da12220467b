"""The items that an input asks for, in a table on disk: there may be more of them than memory should hold."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from adamae.common.errors import InputError
from adamae.common.logging import printable
from adamae.pipeline.shards.arrays import CONTAINER
from adamae.shard_tools.inputs.classes import LabelMap, is_id
from adamae.shard_tools.inputs.folders import examine, label_folders
from adamae.shard_tools.inputs.item import (
    FOLDER,
    Item,
    ListOptions,
    Skipped,
    dump_labels,
    join_name,
    split_name,
)
from adamae.shard_tools.inputs.location import Location
from adamae.shard_tools.splits import GroupOf, choose_held_out
from adamae.shard_tools.temp_table import TempTable

NUM_NAMED = 10  # classes, or files, in a sentence
NUM_REASONS = 5
REJECTED = -1  # in the place of the size of a stored sample
SCHEMA = """
    CREATE TABLE items (source TEXT, location TEXT, labels TEXT, size INTEGER, problem TEXT, segment TEXT, fields TEXT);
    CREATE TABLE pieces AS SELECT * FROM items;
    CREATE TABLE stored (source TEXT, segment TEXT, labels TEXT, size INTEGER)  -- in the dataset; rejects, too
"""
IS_ARRAY = f"lower(CAST(source AS TEXT)) LIKE '%.{CONTAINER}'"
COLUMNS = "source, location, labels, size, problem, segment, fields"
NUM_COLUMNS = 7
IS_NEW = "NOT EXISTS (SELECT 1 FROM stored WHERE stored.source = items.source AND stored.segment = items.segment)"
IS_PLANNED = f"problem IS NULL AND {IS_NEW}"


class ItemStore:
    """The items of an input, in a table on disk. Iterating over them streams, by source and segment."""

    def __init__(self) -> None:
        self._table = TempTable(SCHEMA)
        self.skipped = Skipped()
        self.notes: list[str] = []  # how each list was read
        self.num_repeated = 0  # rows of a whole video that was listed before

    def add(self, items: Iterable[Item]) -> None:
        self._table.insert("items", (item.to_row() for item in items), NUM_COLUMNS)

    def _exists(self, condition: str) -> bool:
        return any(self._table.run(f"SELECT 1 FROM items WHERE {condition} LIMIT 1"))

    @property
    def has_only_arrays(self) -> bool:
        return not self._exists(f"NOT {IS_ARRAY}")

    @property
    def has_segments(self) -> bool:
        return self._exists("segment != ''")

    def skip_arrays(self, kind: str) -> None:
        for (source,) in self._table.run(
            f"SELECT source FROM items WHERE {IS_ARRAY} ORDER BY rowid"
        ):
            self.skipped.add(kind, source)
        self._table.run(f"DELETE FROM items WHERE {IS_ARRAY}")

    def label_by_folder(self, options: ListOptions, where: str, num_outer: int = 0) -> None:
        """Take the folders of all videos, without the `num_outer` first ones, for their classes, unless some have
        labels; remove the videos of subsets that are not wanted."""
        labeled = options.label != FOLDER and (
            options.label is not None or self._exists("labels IS NOT NULL")
        )

        def get_folder(source: str | bytes) -> str:
            return "/".join(_to_text(source).split("/")[num_outer:-1])

        num_videos = Counter(
            get_folder(source) for (source,) in self._table.run("SELECT source FROM items")
        )
        if labeled:
            options = replace(options, unlabeled=True)
        labels_by_folder = label_folders(num_videos, options, where)
        unwanted = num_videos.keys() - labels_by_folder.keys()
        define = self._table.database.create_function
        define("is_unwanted", 1, lambda source: get_folder(source) in unwanted)
        define(
            "find_labels", 1, lambda source: dump_labels(labels_by_folder.get(get_folder(source)))
        )
        if unwanted:
            self._table.run("DELETE FROM items WHERE is_unwanted(source)")
        if not labeled and any(labels_by_folder.values()):
            self._table.run("UPDATE items SET labels = find_labels(source)")

    def deduplicate(self, unlabeled: bool, constant_label: str | None = None) -> None:
        """Keep every video once, as it was added first, and all segments; require that all have labels, or none has."""
        if unlabeled:
            self._table.run(
                "UPDATE items SET labels = ?", constant_label and json.dumps([constant_label])
            )
        self._table.run("CREATE INDEX by_source ON items (source, segment)")
        self._table.run("""UPDATE items SET segment = segment || ';' || number FROM (SELECT rowid AS id, row_number()
            OVER (PARTITION BY source, segment ORDER BY labels, fields, rowid) AS number FROM items WHERE segment != '')
            WHERE id = items.rowid AND number > 1""")
        self._table.run("""CREATE TEMP TABLE repeated AS SELECT source, min(rowid), count(*), min(ifnull(labels, '')),
            max(ifnull(labels, '')) FROM items WHERE segment = '' GROUP BY source HAVING count(*) > 1""")
        # From a table of its own: what a SELECT gives of rows that are deleted meanwhile is not defined.
        for source, first, count, one, other in self._table.run("SELECT * FROM repeated"):
            self.num_repeated += count - 1
            self._table.run(
                "DELETE FROM items WHERE source = ? AND segment = '' AND rowid != ?", source, first
            )
            if one != other:
                problem = f"it is listed with two labels, {_format_labels(one)} and {_format_labels(other)}"
                self._table.run("UPDATE items SET problem = ? WHERE rowid = ?", problem, first)
        if self._exists("labels IS NOT NULL"):
            problem = "it has no label, others have one"
            self._table.run(
                "UPDATE items SET problem = ? WHERE labels IS NULL AND problem IS NULL", problem
            )

    def hold_out(
        self,
        fraction: float,
        keeps_held_out: bool,
        group_of: GroupOf | None,
        earlier_sides: Mapping[str, bool],
    ) -> None:
        """Keep the files that are held out, or else those that are not. Groups, by default files, are not divided.

        `earlier_sides` says of files of an earlier run whether they are held out; they stay so, with their groups.
        Raise InputError if a group cannot stay, or a file has several.
        """
        label_counts: dict[str, Counter[str]] = {}
        group_by_source: dict[str, str] = {}
        sides: dict[str, bool] = {}
        for source, labels, fields in self._table.run(
            "SELECT source, labels, fields FROM items ORDER BY source"
        ):
            group = source
            if group_of is not None:
                group = group_of(source, json.loads(fields or "{}"))
            other_group = group_by_source.setdefault(source, group)
            if other_group != group:
                raise InputError(
                    f"{source} is of the groups {other_group} and {group}: a file has only one"
                )
            names = json.loads(labels) if labels else [""]
            label_counts.setdefault(group, Counter()).update(names)
            if source in earlier_sides:
                side = sides.setdefault(group, earlier_sides[source])
                if side != earlier_sides[source]:
                    raise InputError(
                        f"{group} was on both sides of an earlier run: give another output folder"
                    )
        held_out = choose_held_out(label_counts, fraction, sides)
        for source, group in group_by_source.items():
            if (group in held_out) != keeps_held_out:
                self._table.run("DELETE FROM items WHERE source = ?", source)
        if not keeps_held_out:
            return
        kind = (
            "groups"
            if group_of
            else "files (give --group-by if several show one recording, person or place)"
        )
        note = f"held out: {len(held_out)} of {len(label_counts)} {kind}"
        all_labels = set().union(*label_counts.values())
        missing = all_labels.difference(*(label_counts[group] for group in held_out))
        if missing:
            note += f"; no video of {', '.join(map(printable, sorted(missing)))}"
        self.notes.append(note)

    def __len__(self) -> int:
        return int(next(self._table.run("SELECT count(*) FROM items"))[0])

    def __iter__(self) -> Iterator[Item]:
        return self._select("TRUE")

    def sample(self, count: int) -> Iterator[Item]:
        """Yield `count` to twice as many of the usable items, evenly spaced over all; fewer if there are fewer."""
        step = max(1, len(self) // count)
        return self._select(f"problem IS NULL AND rowid % {step} = 0")

    def new(self) -> Iterator[Item]:
        """Yield the usable ones that the dataset neither holds nor has rejected."""
        return self._select(IS_PLANNED)

    def count_new(self) -> int:
        """Return how many items `new` yields."""
        ((count,),) = self._table.run(f"SELECT count(*) FROM items WHERE {IS_PLANNED}")
        return int(count)

    def shuffle_new(self, seed: int) -> Iterator[Item]:
        """Yield what `new` does with `position`s in a shuffled order, which names and `seed` alone decide.

        Items of one video come together, the video that holds the smallest position first: a video is decoded once,
        and the first shards are complete first.
        """

        def make_key(source: str | bytes, segment: str) -> bytes:
            return shuffle_key(join_name(_to_text(source), segment), seed)

        self._table.database.create_function("shuffle_key", 2, make_key)
        rows = self._table.run(f"""
            SELECT {COLUMNS}, position FROM (
                SELECT *, row_number() OVER (ORDER BY shuffle_key(source, segment)) AS position
                FROM items WHERE {IS_PLANNED}
            ) ORDER BY min(position) OVER (PARTITION BY source), position""")
        for *row, position in rows:
            yield msgspec.structs.replace(Item.from_row(row), position=position)

    def split(self, pieces: Iterable[Item]) -> None:
        """Put pieces in the place of the whole videos that they are cut from."""
        # Into a table of its own first: `pieces` may be made of a query of the items, which must not change meanwhile.
        self._table.insert("pieces", (piece.to_row() for piece in pieces), NUM_COLUMNS)
        self._table.run(
            "DELETE FROM items WHERE segment = '' AND source IN (SELECT source FROM pieces)"
        )
        self._table.run("INSERT INTO items SELECT * FROM pieces")
        self._table.run("DELETE FROM pieces")

    def new_problems(self) -> dict[str, str]:
        """Return the names of the new ones that cannot be used, with the reason."""
        return {
            item.name: item.problem or ""
            for item in self._select(f"problem IS NOT NULL AND {IS_NEW}")
        }

    def _select(self, condition: str) -> Iterator[Item]:
        return map(
            Item.from_row,
            self._table.run(f"SELECT * FROM items WHERE {condition} ORDER BY source, segment"),
        )

    def location(self, source: str) -> Location | None:
        """Return where the bytes of a source are; None if the input has no such source."""
        for row in self._table.run("SELECT * FROM items WHERE source = ? LIMIT 1", source):
            return Item.from_row(row).location
        return None

    def labels(self) -> set[str]:
        """Return the labels of all usable items."""
        rows = self._table.run(
            "SELECT DISTINCT labels FROM items WHERE labels IS NOT NULL AND problem IS NULL"
        )
        return set().union(*(json.loads(labels) for (labels,) in rows))

    def require_distinct_labels(self) -> None:
        """Raise InputError if two labels differ in case or leading zeros only."""
        seen: dict[str, str] = {}
        for label in sorted(self.labels()):
            if (other := seen.setdefault(normalize_label(label), label)) != label:
                what = f"the labels {printable(other)} and {printable(label)} differ in case, spaces or zeros alone"
                raise InputError(f"{what}: write them alike, or give --label-map, or --unlabeled")

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
        define(
            "rename",
            1,
            lambda labels: dump_labels(tuple(names.get(it, it) for it in json.loads(labels))),
        )
        values = "problem = explain_label(labels), labels = rename(labels)"
        self._table.run(f"UPDATE items SET {values} WHERE problem IS NULL AND labels IS NOT NULL")

    def describe(self) -> str:
        """Say what was found: samples, files, classes, and what is wrong."""
        columns = "count(*), count(problem), sum(segment != ''), count(DISTINCT source)"
        total, bad, segments, files = next(self._table.run(f"SELECT {columns} FROM items"))
        labels = sorted(self.labels(), key=_numbers_by_value)
        examples = labels
        if len(labels) > NUM_NAMED:
            examples = [f"{labels[0]}…{labels[-1]}"]
        kind = "segments" if segments else "videos"
        parts = [f"{total - bad} {kind} of {files} files"]
        if labels:
            parts.append(f"{len(labels)} classes ({', '.join(map(printable, examples))})")
        else:
            parts.append("no labels")
        if self.num_repeated:
            parts.append(f"{self.num_repeated} rows repeat another and are left out")
        parts.append(f"{bad} that cannot be used")
        return ", ".join(parts)

    def require_usable(self, max_fraction: float, where: str) -> None:
        """Raise InputError, with reasons, counts and examples, if all or more than `max_fraction` cannot be used."""
        total, num_bad = next(self._table.run("SELECT count(*), count(problem) FROM items"))
        if not total or (num_bad <= max_fraction * total and num_bad < total):
            return
        problems = "FROM items WHERE problem IS NOT NULL"
        counts = f"SELECT problem, count(*) AS n {problems} GROUP BY 1 ORDER BY n DESC LIMIT {NUM_REASONS}"
        reasons = "; ".join(
            f"{count} times: {printable(reason)}" for reason, count in self._table.run(counts)
        )
        rows = self._table.run(f"SELECT source {problems} ORDER BY rowid LIMIT ?", NUM_NAMED)
        names = [printable(source) for (source,) in rows]
        if num_bad > NUM_NAMED:
            names.append("…")
        what = f"{num_bad} of {total} videos cannot be used, and the limit is {max_fraction:.0%} (--max-rejects)"
        if num_bad == total:
            what = f"none of {total} videos can be used"
        fix = ""
        if "no such file" in reasons:
            fix = "; give --root or --suffix if that is what names lack"
        raise InputError(
            f"{what}: {reasons} (in {where}: {', '.join(names)}); nothing was written{fix}"
        )

    def mark_stored(
        self, stored: Iterable[tuple[str, str, tuple[str, ...] | None, int]], rejects: Iterable[str]
    ) -> None:
        """Note what a dataset holds, as (source, segment, labels, bytes), and has rejected, by name: it is not new."""
        # Bytes of files that so far are only known to be there, and whether they can be read.
        unmeasured = "size = 0 AND problem IS NULL AND substr(location, 1, 1) = '/'"
        for rowid, path in self._table.run(f"SELECT rowid, location FROM items WHERE {unmeasured}"):
            size, problem = (0, None) if os.path.isdir(path) else examine(Path(path))
            self._table.run(
                "UPDATE items SET size = ?, problem = ? WHERE rowid = ?", size, problem, rowid
            )
        self._table.run("DELETE FROM stored")
        rows = (
            (source, segment, dump_labels(labels), size) for source, segment, labels, size in stored
        )
        self._table.insert("stored", rows, 4)
        self._table.insert("stored", ((*split_name(name), None, REJECTED) for name in rejects), 4)
        self._table.run("CREATE INDEX IF NOT EXISTS by_stored_source ON stored (source, segment)")

    def find_change(self) -> str | None:
        """Say how many stored samples differ from the input, and how the first does; None if none does."""
        changes = list(self._list_changes("labels", "stored.labels IS NOT items.labels"))
        if changes:
            source, segment, then, now = changes[0]
            first = f"{join_name(source, segment)}, {_format_labels(then)} there and {_format_labels(now)} in the input"
            return f"{len(changes)} videos that have another label now (the first: {first})"
        # A size of 0 is not known.
        differs = "items.size != 0 AND stored.size != 0 AND stored.size != items.size"
        changes = list(self._list_changes("size", differs))
        if changes:
            source, segment, then, now = changes[0]
            first = f"{join_name(source, segment)}, {then} bytes there and {now} bytes in the input"
            return f"{len(changes)} videos that have changed since they were stored (the first: {first})"
        return None

    def _list_changes(self, column: str, differs: str) -> Iterator[list[Any]]:
        """Yield source, segment, stored value and value in the input of each sample whose `column` differs."""
        # Of several stored rows, a lone max() makes SQLite take the values of the last.
        rows = self._table.run(f"""
            SELECT items.source, items.segment, stored.{column}, items.{column}, max(stored.rowid) FROM items
            JOIN stored ON stored.source = items.source AND stored.segment = items.segment
            WHERE problem IS NULL AND stored.size != {REJECTED} AND {differs} GROUP BY 1, 2 ORDER BY 1, 2""")
        for *change, _ in rows:
            yield change


def shuffle_key(name: str, seed: int = 0) -> bytes:
    """Return what shuffled values are sorted by."""
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="replace")).digest()


def _numbers_by_value(label: str) -> tuple[int, str]:
    """Return what labels are sorted by: 2 comes before 10, and names come by their letters."""
    return (len(label), label) if is_id(label) else (0, label)


def _to_text(value: str | bytes) -> str:
    """Return what SQLite hands to a function as text: a name that is not UTF-8 is stored as bytes."""
    return value if isinstance(value, str) else value.decode(errors="surrogatepass")


def normalize_label(label: str) -> str:
    if label.isdecimal():
        return label.lstrip("0") or "0"
    return (
        re.sub(r"[\s_]+", " ", label).casefold() if len(label) > 1 else label
    )  # letters may be classes


def _format_labels(text: str | None) -> str:
    labels = json.loads(text) if text else None
    return repr(labels[0] if labels and len(labels) == 1 else labels)
