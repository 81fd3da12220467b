"""The items of an input, in a table on disk: there may be more than memory should hold."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from adamae.common.errors import InputError
from adamae.common.logging import format_count, printable
from adamae.pipeline.shards.arrays import CONTAINER
from adamae.shard_tools.inputs.class_folders import label_folders
from adamae.shard_tools.inputs.classes import LabelMap, is_id
from adamae.shard_tools.inputs.copies import find_copies
from adamae.shard_tools.inputs.folders import examine
from adamae.shard_tools.inputs.item import (
    Item,
    ListOptions,
    Skipped,
    dump_labels,
    join_name,
    split_name,
)
from adamae.shard_tools.inputs.location import Location
from adamae.shard_tools.splits import GroupOf, choose_held_out
from adamae.shard_tools.temp_table import TempTable, decode

# Classes, or files, that a sentence names.
NUM_NAMED = 10
# Reasons that a sentence names, the most frequent ones.
NUM_REASONS = 5
# Stands for the size of a stored sample that the dataset has rejected.
REJECTED = -1
# `items` is the input, `stored` the dataset, with its rejects; `pieces` serves ItemStore.split.
SCHEMA = """
    CREATE TABLE items (
        source TEXT, location TEXT, labels TEXT, size INTEGER, problem TEXT, segment TEXT,
        fields TEXT
    );
    CREATE TABLE pieces AS SELECT * FROM items;
    CREATE TABLE stored (source TEXT, segment TEXT, labels TEXT, size INTEGER)
"""
COLUMNS = "source, location, labels, size, problem, segment, fields"
NUM_COLUMNS = 7
IS_ARRAY = f"lower(CAST(source AS TEXT)) LIKE '%.{CONTAINER}'"
IS_NEW = """NOT EXISTS (
    SELECT 1 FROM stored WHERE stored.source = items.source AND stored.segment = items.segment
)"""
IS_PLANNED = f"problem IS NULL AND {IS_NEW}"
# The second of two equal segments of a video gets ;2 behind it, the third ;3.
NUMBER_SEGMENTS = """
    UPDATE items SET segment = segment || ';' || number FROM (
        SELECT rowid AS id, row_number() OVER (
            PARTITION BY source, segment ORDER BY labels, fields, rowid
        ) AS number
        FROM items WHERE segment != ''
    ) WHERE id = items.rowid AND number > 1
"""
FIND_REPEATED = """
    CREATE TEMP TABLE repeated AS SELECT
        source, min(rowid), count(*), min(ifnull(labels, '')), max(ifnull(labels, '')),
        count(DISTINCT fields) > 1
    FROM items WHERE segment = '' GROUP BY source HAVING count(*) > 1
"""


class ItemStore:
    """The items of an input, in a table on disk. Iterating over them streams, sorted by name."""

    def __init__(self) -> None:
        self._table = TempTable(SCHEMA)
        self.skipped = Skipped()
        # Sentences that say how each list was read.
        self.notes: list[str] = []
        # Whether any of the input has columns or entries, which --columns may name.
        self.has_columns = False
        # Whether a list says of which group each video is.
        self.has_groups = False
        # Rows of a whole video that was listed before.
        self.num_repeated = 0

    def add(self, items: Iterable[Item]) -> None:
        self._table.insert("items", (item.to_row() for item in items), NUM_COLUMNS)

    def _exists(self, condition: str) -> bool:
        return any(self._table.run(f"SELECT 1 FROM items WHERE {condition} LIMIT 1"))

    def _define(self, name: str, function: Callable[..., Any], num_arguments: int = 1) -> None:
        """Let queries call a function."""

        def call(*values: Any) -> Any:
            return function(*decode(values))

        self._table.database.create_function(name, num_arguments, call)

    @property
    def has_only_arrays(self) -> bool:
        return not self._exists(f"NOT {IS_ARRAY}")

    @property
    def has_labels(self) -> bool:
        return self._exists("labels IS NOT NULL")

    @property
    def has_segments(self) -> bool:
        return self._exists("segment != ''")

    def skip_arrays(self, kind: str) -> None:
        """Move all arrays to `skipped`, as files of a kind."""
        query = f"SELECT source FROM items WHERE {IS_ARRAY} ORDER BY rowid"
        for (source,) in self._table.run(query):
            self.skipped.add(kind, source)
        self._table.run(f"DELETE FROM items WHERE {IS_ARRAY}")

    def label_by_folder(self, options: ListOptions, where: str, num_outer: int = 0) -> None:
        """Label all videos by their folders, unless some have labels; drop those of other subsets.

        The `num_outer` first folders of a path are no classes. Raise InputError as label_folders.
        """
        if options.label_folder is None and self.has_labels:
            options = replace(options, unlabeled=True)

        def get_folder(source: str) -> str:
            return source.rpartition("/")[0]

        sources = self._table.run("SELECT source FROM items")
        num_videos = Counter(get_folder(source) for (source,) in sources)
        labels = label_folders(num_videos, options, where, num_outer)
        self._define("is_taken", lambda source: get_folder(source) in labels)
        self._table.run("DELETE FROM items WHERE NOT is_taken(source)")
        if any(labels.values()):
            self._define("find_labels", lambda source: dump_labels(labels[get_folder(source)]))
            self._table.run("UPDATE items SET labels = find_labels(source)")

    def deduplicate(self, unlabeled: bool, constant_label: str | None = None) -> None:
        """Keep every video once, and all segments.

        Raise InputError if rows of a whole video differ in their fields. A video that is listed
        with two labels, or without one beside others that have some, has a problem. If
        `unlabeled`, all labels are replaced by `constant_label`, if there is one.
        """
        if unlabeled:
            labels = dump_labels((constant_label,)) if constant_label else None
            self._table.run("UPDATE items SET labels = ?", labels)
        self._table.run("CREATE INDEX by_source ON items (source, segment)")
        self._table.run(NUMBER_SEGMENTS)
        self._drop_repeated()
        if self.has_labels:
            problem = "it has no label, others have one"
            is_missing = "labels IS NULL AND problem IS NULL"
            self._table.run(f"UPDATE items SET problem = ? WHERE {is_missing}", problem)

    def _drop_repeated(self) -> None:
        # What a SELECT gives of rows that are deleted meanwhile is not defined, hence the table.
        self._table.run(FIND_REPEATED)
        for source, first, count, min_labels, max_labels, differs in self._table.run(
            "SELECT * FROM repeated"
        ):
            if differs:
                what = f"{count} rows name {printable(source)} and differ in their fields"
                fix = "give a start and an end of each, or --columns with rest=ignored"
                raise InputError(f"{what}, of which a sample has one: {fix}")
            self.num_repeated += count - 1
            is_later = "source = ? AND segment = '' AND rowid != ?"
            self._table.run(f"DELETE FROM items WHERE {is_later}", source, first)
            if min_labels != max_labels:
                both = f"{_format_value(min_labels)} and {_format_value(max_labels)}"
                problem = f"it is listed with two labels, {both}"
                self._table.run("UPDATE items SET problem = ? WHERE rowid = ?", problem, first)

    def hold_out(
        self,
        fraction: float,
        keeps_held_out: bool,
        group_of: GroupOf | None,
        earlier_sides: Mapping[str, bool],
    ) -> None:
        """Keep the files that are held out, or else those that are not, and note which they are.

        Groups, by default files, are not divided, nor are files with the same bytes.
        `earlier_sides` says of files of an earlier run whether they are held out; they stay so,
        with their groups. Raise InputError if a group cannot stay, or a file has several.
        """
        group_by_source = self._find_groups(group_of)
        label_counts: dict[str, Counter[str]] = {}
        sides: dict[str, bool] = {}
        for source, labels in self._table.run("SELECT source, labels FROM items ORDER BY source"):
            group = group_by_source[source]
            names = json.loads(labels) if labels else [""]
            label_counts.setdefault(group, Counter()).update(names)
            if source in earlier_sides:
                side = sides.setdefault(group, earlier_sides[source])
                if side != earlier_sides[source]:
                    what = f"{group} was on both sides of an earlier run"
                    raise InputError(f"{what}: give another output folder")
        held_out = choose_held_out(label_counts, fraction, sides)
        for source, group in group_by_source.items():
            if (group in held_out) != keeps_held_out:
                self._table.run("DELETE FROM items WHERE source = ?", source)
        kind = "files (give --group-by if several show one recording, person or place)"
        if group_of is not None:
            kind = "groups"
            self._add_groups(group_by_source)
        if keeps_held_out:
            self.notes.append(_describe_held_out(held_out, label_counts, kind))

    def _find_groups(self, group_of: GroupOf | None) -> dict[str, str]:
        """Return the group of each file; groups with copies of one file become one."""
        groups: dict[str, str] = {}
        for item in self:
            group = item.source
            if group_of is not None:
                group = group_of(item.source, json.loads(item.fields or "{}"))
            if groups.setdefault(item.source, group) != group:
                what = f"{item.source} is of the groups {groups[item.source]} and {group}"
                raise InputError(f"{what}: a file has only one")
        joined: dict[str, str] = {}
        for source, first in find_copies(self).items():
            group = _follow(joined, groups[source])
            first_group = _follow(joined, groups[first])
            if group != first_group:
                joined[group] = first_group
        return {source: _follow(joined, group) for source, group in groups.items()}

    def _add_groups(self, group_by_source: Mapping[str, str]) -> None:
        """Name the group of each item in its fields, unless a list has a field of this name.

        Evaluations give accuracies per group, and errors over groups, by it.
        """

        def add_group(source: str, fields: str) -> str:
            return json.dumps({"group": group_by_source[source]} | json.loads(fields or "{}"))

        self._define("add_group", add_group, 2)
        self._table.run("UPDATE items SET fields = add_group(source, fields)")

    def __len__(self) -> int:
        return int(next(self._table.run("SELECT count(*) FROM items"))[0])

    def __iter__(self) -> Iterator[Item]:
        return self._select("TRUE")

    def sample(self, count: int) -> Iterator[Item]:
        """Yield `count` to twice as many usable items, evenly spaced; fewer if there are fewer."""
        step = max(1, len(self) // count)
        return self._select(f"problem IS NULL AND rowid % {step} = 0")

    def new(self) -> Iterator[Item]:
        """Yield the usable items that the dataset neither holds nor has rejected."""
        return self._select(IS_PLANNED)

    def count_new(self) -> int:
        """Return how many items `new` yields."""
        ((count,),) = self._table.run(f"SELECT count(*) FROM items WHERE {IS_PLANNED}")
        return int(count)

    def shuffle_new(self, seed: int) -> Iterator[Item]:
        """Yield what `new` does with `position`s in a shuffled order, by names and `seed` alone.

        Items of one video come together, the video that holds the smallest position first: a video
        is decoded once, and the first shards are complete first. Of segments at the positions
        a: 5, b: 2, a: 0, c: 1, the order is a (0), a (5), c (1), b (2).
        """

        def make_key(source: str, segment: str) -> bytes:
            return shuffle_key(join_name(source, segment), seed)

        self._define("shuffle_key", make_key, 2)
        rows = self._table.run(f"""
            SELECT {COLUMNS}, position FROM (
                SELECT *, row_number() OVER (ORDER BY shuffle_key(source, segment)) AS position
                FROM items WHERE {IS_PLANNED}
            ) ORDER BY min(position) OVER (PARTITION BY source), position""")
        for *row, position in rows:
            yield msgspec.structs.replace(Item.from_row(row), position=position)

    def split(self, pieces: Iterable[Item]) -> None:
        """Replace whole videos by the pieces that they are cut into."""
        # `pieces` may be made of a query of the items, which must not change meanwhile.
        self._table.insert("pieces", (piece.to_row() for piece in pieces), NUM_COLUMNS)
        is_cut = "segment = '' AND source IN (SELECT source FROM pieces)"
        self._table.run(f"DELETE FROM items WHERE {is_cut}")
        self._table.run("INSERT INTO items SELECT * FROM pieces")
        self._table.run("DELETE FROM pieces")

    def new_problems(self) -> dict[str, str]:
        """Return the names of the new items that cannot be used, with the reason."""
        items = self._select(f"problem IS NOT NULL AND {IS_NEW}")
        return {item.name: item.problem or "" for item in items}

    def _select(self, condition: str) -> Iterator[Item]:
        query = f"SELECT * FROM items WHERE {condition} ORDER BY source, segment"
        return map(Item.from_row, self._table.run(query))

    def location(self, source: str) -> Location | None:
        """Return where the bytes of a source are; None if the input has no such source."""
        for row in self._table.run("SELECT * FROM items WHERE source = ? LIMIT 1", source):
            return Item.from_row(row).location
        return None

    def labels(self) -> set[str]:
        """Return the labels of all usable items."""
        is_usable = "labels IS NOT NULL AND problem IS NULL"
        rows = self._table.run(f"SELECT DISTINCT labels FROM items WHERE {is_usable}")
        return set().union(*(json.loads(labels) for (labels,) in rows))

    def require_distinct_labels(self) -> None:
        """Raise InputError if two labels differ in case, spaces or leading zeros only."""
        first_labels: dict[str, str] = {}
        for label in sorted(self.labels()):
            first = first_labels.setdefault(normalize_label(label), label)
            if first != label:
                what = f"the labels {printable(first)} and {printable(label)}"
                raise InputError(
                    f"{what} differ in case, spaces or zeros alone: write them alike,"
                    " or give --label-map, or --unlabeled"
                )

    def apply_label_map(self, label_map: LabelMap) -> None:
        """Turn what lists write for a class into its name; any unknown label is a problem."""
        names, first = label_map.match(self.labels())
        if first is not None:
            self.notes.append(f"labels are numbers from {first}: {first} is {label_map.names[0]}")

        def explain(labels: str) -> str | None:
            for label in json.loads(labels):
                if label not in names:
                    return f"its label {label!r} is not in the label map"
            return None

        def rename(labels: str) -> str | None:
            return dump_labels(tuple(names.get(label, label) for label in json.loads(labels)))

        self._define("explain_label", explain)
        self._define("rename", rename)
        values = "problem = explain_label(labels), labels = rename(labels)"
        self._table.run(f"UPDATE items SET {values} WHERE problem IS NULL AND labels IS NOT NULL")

    def describe(self) -> str:
        """Return a sentence with the numbers of samples, files, classes and problems."""
        columns = "count(*), count(problem), sum(segment != ''), count(DISTINCT source)"
        total, num_bad, segments, files = next(self._table.run(f"SELECT {columns} FROM items"))
        labels = sorted(self.labels(), key=_by_value)
        examples = labels
        if len(labels) > NUM_NAMED:
            examples = [f"{labels[0]}…{labels[-1]}"]
        kind = "segment" if segments else "video"
        parts = [f"{format_count(total - num_bad, kind)} of {format_count(files, 'file')}"]
        if labels:
            names = ", ".join(map(printable, examples))
            parts.append(f"{format_count(len(labels), 'class')} ({names})")
        else:
            parts.append("no labels")
        if self.num_repeated:
            parts.append(f"{format_count(self.num_repeated, 'repeated row')} left out")
        parts.append(f"{num_bad} that cannot be used")
        return ", ".join(parts)

    def require_usable(self, max_fraction: float, where: str) -> None:
        """Raise InputError if all items, or more than `max_fraction`, cannot be used.

        It names reasons, their counts and examples.
        """
        total, num_bad = next(self._table.run("SELECT count(*), count(problem) FROM items"))
        if not total or (num_bad <= max_fraction * total and num_bad < total):
            return
        if num_bad == total:
            what = f"none of {total} videos can be used"
        else:
            limit = f"the limit is {max_fraction:.0%} (--max-rejects)"
            what = f"{num_bad} of {total} videos cannot be used, and {limit}"
        problems = "FROM items WHERE problem IS NOT NULL"
        counts = f"SELECT problem, count(*) AS n {problems} GROUP BY 1 ORDER BY n DESC LIMIT ?"
        reasons = "; ".join(
            f"{count} times: {printable(reason)}"
            for reason, count in self._table.run(counts, NUM_REASONS)
        )
        rows = self._table.run(f"SELECT source {problems} ORDER BY rowid LIMIT ?", NUM_NAMED)
        names = [printable(source) for (source,) in rows]
        if num_bad > NUM_NAMED:
            names.append("…")
        fix = ""
        if "no such file" in reasons:
            fix = "; give --root or --suffix if that is what names lack"
        examples = f"in {where}: {', '.join(names)}"
        raise InputError(f"{what}: {reasons} ({examples}); nothing was written{fix}")

    def mark_stored(
        self, stored: Iterable[tuple[str, str, tuple[str, ...] | None, int]], rejects: Iterable[str]
    ) -> None:
        """Note that what a dataset holds or has rejected is not new.

        `stored` are (source, segment, labels, bytes), `rejects` are names.
        """
        # Lists give no sizes, and asking each file for its own costs time: it is done here alone,
        # where sizes are compared.
        unmeasured = "size = 0 AND problem IS NULL AND substr(location, 1, 1) = '/'"
        for rowid, path in self._table.run(f"SELECT rowid, location FROM items WHERE {unmeasured}"):
            if os.path.isdir(path):
                # Folders of frames have no size.
                size = 0
                problem = None
            else:
                size, problem = examine(Path(path))
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

    def retry(self, names: Iterable[str]) -> None:
        """Note that these rejects of the dataset are new again, where they can be used now."""
        usable = "SELECT 1 FROM items WHERE items.source = stored.source AND problem IS NULL"
        is_reject = f"source = ? AND segment = ? AND size = {REJECTED}"
        query = f"DELETE FROM stored WHERE {is_reject} AND EXISTS ({usable})"
        for name in names:
            self._table.run(query, *split_name(name))

    def find_change(self) -> str | None:
        """Say how many stored samples differ from the input, and how the first does."""
        # A size of 0 is not known.
        sizes_differ = "items.size != 0 AND stored.size != 0 AND stored.size != items.size"
        for column, differs, what in (
            ("labels", "stored.labels IS NOT items.labels", "with another label now"),
            ("size", sizes_differ, "of another size than when stored"),
        ):
            # Of several stored rows, a lone max() makes SQLite take the values of the last.
            rows = self._table.run(f"""
                SELECT items.source, items.segment, stored.{column}, items.{column},
                max(stored.rowid) FROM items JOIN stored
                ON stored.source = items.source AND stored.segment = items.segment
                WHERE problem IS NULL AND stored.size != {REJECTED} AND {differs}
                GROUP BY 1, 2 ORDER BY 1, 2""")
            changes = list(rows)
            if changes:
                source, segment, before, now, _ = changes[0]
                values = f"{_format_value(before)} there and {_format_value(now)} in the input"
                first = f"{join_name(source, segment)}, {values}"
                return f"{format_count(len(changes), 'video')} {what} (the first: {first})"
        return None


def _follow(links: Mapping[str, str], name: str) -> str:
    """Return where a chain of links ends."""
    while name in links:
        name = links[name]
    return name


def shuffle_key(name: str, seed: int = 0) -> bytes:
    """Return the key that a shuffled list of names is sorted by: the same on every machine."""
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="replace")).digest()


def _describe_held_out(held_out: set[str], label_counts: dict[str, Counter[str]], kind: str) -> str:
    """Say how many groups are held out, and which labels none of them has."""
    note = f"held out: {len(held_out)} of {len(label_counts)} {kind}"
    missing = set().union(*label_counts.values())
    for group in held_out:
        missing.difference_update(label_counts[group])
    if missing:
        note += f"; no video of {', '.join(map(printable, sorted(missing)))}"
    return note


def _by_value(label: str) -> tuple[int, str]:
    """Return the key by which 2 comes before 10, and names come by their letters."""
    return (len(label), label) if is_id(label) else (0, label)


def normalize_label(label: str) -> str:
    """Return what labels have in common that are probably meant to be one.

    It is "big dog" for "Big Dog" and "big_dog", and 7 for 07 and 7. Single letters stay: in a sign
    alphabet, a and A may be classes.
    """
    if label.isdecimal():
        return label.lstrip("0") or "0"
    if len(label) > 1:
        return re.sub(r"[\s_]+", " ", label).casefold()
    return label


def _format_value(value: str | int | None) -> str:
    """Return a size, or stored labels, as a message gives them: a label alone as itself."""
    if isinstance(value, int):
        return f"{value} bytes"
    labels = json.loads(value) if value else None
    return repr(labels[0] if labels and len(labels) == 1 else labels)
