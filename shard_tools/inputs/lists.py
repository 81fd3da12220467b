"""Lists of videos as items: which column is what is said before any work begins, and every row is accounted for."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from adamae.common.errors import InputError
from adamae.common.logging import printable
from adamae.pipeline.reading.storage import is_remote
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs import cells
from adamae.shard_tools.inputs.cells import Row, get_cell
from adamae.shard_tools.inputs.classes import is_id
from adamae.shard_tools.inputs.columns import Columns
from adamae.shard_tools.inputs.files import Finder
from adamae.shard_tools.inputs.folders import (
    GROUPS,
    KINDS,
    choose_subset,
    classify_name,
    has_video_extension,
)
from adamae.shard_tools.inputs.item import Item, ListOptions
from adamae.shard_tools.inputs.location import ParquetCell
from adamae.shard_tools.inputs.table_reader import Table, choose_table, list_tables

FEW_CAPTIONS, MIN_CAPTIONS, CAPTION_WORDS = (
    5,
    20,
    3,
)  # with fewer rows, labels that are all different are believed


class ListReader:
    """Reads one list; `describe` is complete once all items were taken."""

    def __init__(self, path: Path, options: ListOptions, where: str) -> None:
        self.where, self.options = where, options
        if options.root and not Path(options.root).is_dir():
            raise InputError(
                f"--root {options.root} is no folder: give the one that the list's paths are relative to"
            )
        roots = (
            [Path(options.root)]
            if options.root
            else [*dict.fromkeys([path.parent, path.parent.parent, Path()])]
        )
        self.finder, self.table = self._find_root(list_tables(path, self.where), roots)
        sample = self.table.sample
        if not sample:
            raise InputError(f"{self.where} has no rows but its header")
        self.columns = Columns(self.table, options, self.finder)
        self.subset = options.subset
        if options.is_split and self.subset not in {self._read_subset(row) for row in sample}:
            self.subset = None  # it is only what the split is called
        self.labels, self.subsets = (
            Counter[str](),
            Counter[str](),
        )  # of rows; labels where a row has one
        self.num_rows = self.num_left_out = 0
        self.parse_labels = lru_cache(maxsize=100_000)(
            cells.read_labels
        )  # 10 million rows have some hundred labels
        urls = {name for row in sample if is_remote(name := self._read_name(row))}
        self.finder.finds_urls = len({url.rpartition("/")[2] for url in urls}) == len(urls)

    def _find_root(self, tables: list[Table], roots: list[Path]) -> tuple[Finder, Table]:
        """Return a finder below the first root where most of the sampled rows are files; index it if need be."""
        tried: list[tuple[Finder, Table]] = []
        for root in roots:
            finder = Finder(root, self.options.suffix)
            table = choose_table(tables, finder.has)
            if table.num_found >= 0.9 * table.num_scored:
                return finder, table
            tried.append((finder, table))
        finder, table = max(tried, key=lambda entry: entry[1].num_found)
        finder.index()
        return finder, max(
            table, choose_table(tables, finder.has), key=lambda table: table.num_found
        )

    def read(self) -> Iterator[Item]:
        """Yield an item a row. Raise InputError where rows together show that the columns are not what they seem."""
        columns, left_out = self.columns, self.columns.format.left_out
        for number, row in enumerate(self.table.read_rows(), 1):
            self.num_rows = number
            if self.table.columns and len(row) > len(columns.names):
                width = f"{len(row)} cells under {len(columns.names)} columns"
                yield self._reject(
                    row, f"its row has {width}: quote the one that holds a separator"
                )
                continue
            if left_out and cells.read_label(get_cell(row, columns.sign)) == left_out[0]:
                self.num_left_out += 1
                continue
            if columns.subset is not None:
                self.subsets[subset := self._read_subset(row)] += 1
                if self.subset not in (None, "all", subset):
                    continue
            yield self._make_item(row)
        wanted = self.subset or ("all" if self.options.unlabeled else None)
        choose_subset(
            dict(zip(self._list_subsets(), sorted(self.subsets), strict=True)), wanted, self.where
        )
        self._check_labels()

    def _read_subset(self, row: Row) -> str:
        """Return the subset of a row: train, val, test, or what it says."""
        text = cells.read_label(get_cell(row, self.columns.subset)) or "no subset"
        return dict(self.columns.format.subsets).get(text) or GROUPS.get(text.lower(), text)

    def _reject(self, row: Row, problem: str) -> Item:
        text = ",".join(map(cells.to_text, row))[:100]
        return Item(f"{self.where}, row {self.num_rows}: {text}", "", problem=problem)

    def _read_name(self, row: Row) -> str:
        name = cells.to_path(get_cell(row, self.columns.path))
        return name and name + self.options.suffix

    def _make_item(self, row: Row) -> Item:
        columns, finder = self.columns, self.finder
        name = self._read_name(row)
        if not name:
            return self._reject(row, "this row names no video")
        labels, fields = (
            self._read_labels(row),
            cells.dump_fields(columns.names, row, columns.fields),
        )
        segment, problem = cells.read_segment(row, columns.times) if columns.times else (None, None)
        if isinstance(cell := get_cell(row, columns.path), ParquetCell):
            return Item(cell.name, cell, labels, 0, problem, str(segment or ""), fields)
        found = finder.find(name)
        if segment and (trimmed := self._find_trimmed(name, segment)):
            found, segment = trimmed, None
        if found is None and is_remote(name):
            problem = "no file can have its name" if cells.HALF_A_PAIR.search(name) else problem
            return Item(name, name, labels, 0, problem, str(segment or ""), fields)
        source, location = finder.locate(found or name)
        if found is None:
            segment, problem = None, finder.explain(name)
        elif (
            not has_video_extension(found)
            and (kind := classify_name(found.rpartition("/")[2])) in KINDS
        ):
            problem = problem or f"by its name it is one of the {kind}"
        if columns.label_is_folder:
            labels = (source.split("/")[-2],) if "/" in source else None
        return Item(source, location, labels, 0, problem, str(segment or ""), fields)

    def _read_labels(self, row: Row) -> tuple[str, ...] | None:
        columns = self.columns
        if columns.constant_label is not None:
            return (columns.constant_label,)
        cell = get_cell(row, columns.label)
        labels = (self.parse_labels if isinstance(cell, str) else cells.read_labels)(
            cell, columns.separator
        )
        if labels and (removed := columns.format.removed):
            labels = tuple(re.sub(removed, "", label) for label in labels)
        if labels and columns.separator is None:
            self.labels[labels[0]] += 1
        return labels

    def _find_trimmed(self, name: str, segment: Segment) -> str | None:
        """Find a file that is the segment already, by its name: <id>_000010_000020.mp4."""
        start, end = segment[:2]
        full = f"_{start:06.0f}_{end:06.0f}", f"_{start:g}_{end:g}"
        if os.path.splitext(name)[0].endswith(full):
            return self.finder.find(name)
        return next(
            filter(None, (self.finder.find(name + ending) for ending in (*full, full[0][:7]))), None
        )

    def _check_labels(self) -> None:
        """Refuse captions, and numbers beside names, unless they were asked for."""
        counts, total = self.labels, self.labels.total()
        if self.options.label is not None or not counts or self.columns.label is None:
            return
        where = f"{self.where}: {self.columns.names[self.columns.label]}"
        num_words = sum(len(label.split()) for label in counts)
        are_few = (
            total >= FEW_CAPTIONS
            and len(counts) == total
            and num_words >= (CAPTION_WORDS + 2) * total
        )
        if are_few or (
            total >= MIN_CAPTIONS
            and 2 * len(counts) > total
            and num_words >= CAPTION_WORDS * len(counts)
        ):
            what = f"{len(counts)} different values in {total} rows, such as {printable(next(iter(counts)))!r}"
            fix = "give --label-column, or --unlabeled (other columns are kept with each sample)"
            raise InputError(f"{where} has {what}, which look like captions, not classes: {fix}")
        numbers = Counter({label: count for label, count in counts.items() if is_id(label)})
        names = counts - numbers
        if numbers and names and not self.options.has_label_map:
            one, other = (
                f"{found.total()} rows ({printable(next(iter(found)))})"
                for found in (numbers, names)
            )
            fix = "write all labels alike, or give --label-map or --label-column"
            raise InputError(f"{where} is a number in {one} and a name in {other}: {fix}")

    def _list_subsets(self) -> list[str]:
        return [f"{printable(name)} ({count})" for name, count in sorted(self.subsets.items())]

    def describe(self) -> str:
        """Say in a sentence how the list was read, and as which format."""
        columns, times = self.columns, self.columns.times
        names = [printable(name) for name in columns.names]
        label = (
            names[columns.label] if columns.label is not None else columns.constant_label or "none"
        )
        parts = [
            f"path = {names[columns.path]}",
            f"label = {'the folder' if columns.label_is_folder else label}",
        ]
        if times:
            end = f" and {times.length:g} s" if times.end is None else f" to {names[times.end]}"
            parts.append(
                f"segments = {names[times.start]}{end} ({'frames' if times.in_frames else 'seconds'})"
            )
        if self.subsets:
            parts.append(
                f"subsets: {', '.join(self._list_subsets())}; taken: {self.subset or 'all'}"
            )
        if columns.format.left_out:
            parts.append(f"{self.num_left_out} rows of {columns.format.left_out[1]} left out")
        parts.append(f"format: {columns.format.name}; below {self.finder.root}")
        return f"{self.num_rows} rows in {self.where} ({self.table.form}): {', '.join(parts)}"
