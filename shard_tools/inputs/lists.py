"""Lists of videos as items: which column is what is said before any work begins, and every row is accounted for."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from common.errors import InputError
from common.logging import printable
from pipeline.reading.storage import is_remote
from shard_tools.inputs import cells
from shard_tools.inputs.cells import Row, get_cell
from shard_tools.inputs.classes import is_id
from shard_tools.inputs.columns import ColumnDetector
from shard_tools.inputs.files import Finder
from shard_tools.inputs.folders import GROUPS, KINDS, classify_name, has_video_extension
from shard_tools.inputs.item import Item, ParquetCell, Segment
from shard_tools.inputs.options import ListOptions
from shard_tools.inputs.table_reader import Table, read_table

FEW_CAPTIONS, MIN_CAPTIONS = 5, 20  # rows: with fewer, labels that are all different are believed
CAPTION_WORDS = 3
MAX_KINDS = 100_000  # different labels, above which at least half of the rows must repeat one


class ListReader:
    """Reads one list; `describe` is complete once all items were taken."""

    def __init__(self, path: Path, where: str, options: ListOptions, folder: Path) -> None:
        self.where, self.options = where, options
        if options.root and not Path(options.root).is_dir():
            raise InputError(f"--root {options.root} is no folder: give the one that the list's paths are relative to")
        roots = [Path(options.root)] if options.root else [folder, *dict.fromkeys([folder.parent, Path()])]
        self.finder, self.table = self._find_root(path, roots)
        sample = self.table.sample()
        if not sample:
            raise InputError(f"{where} has no rows but its header")
        self.columns = ColumnDetector(self.table, sample, options, self.finder).detect()
        self.subset = options.subset
        if options.is_split and self.subset not in {self._read_subset(row) for row in sample}:
            self.subset = None  # it is only what the split is called
        self.labels: Counter[tuple[str, ...] | None] = Counter()
        self.subsets: Counter[str] = Counter()
        self.num_rows = self.num_left_out = self.num_trimmed = 0
        self.parse_labels = lru_cache(maxsize=MAX_KINDS)(cells.read_labels)  # 10 million rows have some hundred labels
        urls = {name for row in sample if is_remote(name := self._read_name(row))}
        self.finder.finds_urls = len({url.rpartition("/")[2] for url in urls}) == len(urls)

    def _find_root(self, path: Path, roots: list[Path]) -> tuple[Finder, Table]:
        """Return a finder below the first root where most of the sampled rows are files; index it if need be."""
        tried: list[tuple[Finder, Table]] = []
        for root in roots:
            finder = Finder(root, self.options.suffix)
            table = read_table(path, self.where, finder.has)
            if table.score.num_found >= 0.9 * table.score.num_rows:
                return finder, table
            tried.append((finder, table))
        finder, table = max(tried, key=lambda entry: entry[1].score.num_found)
        finder.index()
        indexed = read_table(path, self.where, finder.has)
        return finder, max(table, indexed, key=lambda table: table.score.num_found)

    def read(self) -> Iterator[Item]:
        """Yield an item a row. Raise InputError where rows together show that the columns are not what they seem."""
        columns, left_out = self.columns, self.columns.format.left_out
        for number, row in enumerate(self.table.read_rows(), 1):
            self.num_rows = number
            if self.table.columns and len(row) > len(columns.names):
                width = f"{len(row)} cells under {len(columns.names)} columns"
                yield self._reject(row, f"its row has {width}: quote the one that holds a separator")
                continue
            if left_out and cells.read_label(get_cell(row, columns.sign)) == left_out[0]:
                self.num_left_out += 1
                continue
            if columns.subset is not None:
                self.subsets[subset := self._read_subset(row)] += 1
                if self.subset not in (None, "all", subset):
                    continue
            yield self._make_item(row)
        self._check_subsets()
        self._check_labels()

    def _read_subset(self, row: Row) -> str:
        """Return the subset of a row: train, val, test, or what it says."""
        text = cells.read_label(get_cell(row, self.columns.subset)) or "no subset"
        return dict(self.columns.format.subsets).get(text) or GROUPS.get(text.lower(), text)

    def _reject(self, row: Row, problem: str) -> Item:
        return Item(
            f"{self.where}, row {self.num_rows}: {','.join(map(cells.to_text, row))[:100]}", "", problem=problem
        )

    def _read_name(self, row: Row) -> str:
        name = cells.to_path(get_cell(row, self.columns.path))
        return name and name + self.options.suffix

    def _make_item(self, row: Row) -> Item:
        columns, finder = self.columns, self.finder
        cell, name = get_cell(row, columns.path), self._read_name(row)
        if not name:
            return self._reject(row, "this row names no video")
        labels, fields = self._read_labels(row), cells.dump_fields(columns.names, row, columns.fields)
        segment, problem = cells.read_segment(row, columns.times) if columns.times else (None, None)
        if isinstance(cell, ParquetCell):
            return Item(f"{Path(cell.archive).name}/{cell.name}", cell, labels, 0, problem, segment, fields)
        found = finder.find(name)
        if segment and (trimmed := self._find_trimmed(name, segment)):
            found, segment = trimmed, None
            self.num_trimmed += 1
        if found is None and is_remote(name):
            if cells.HALF_A_PAIR.search(name):
                problem = "no file can have its name"
            return Item(name, name, labels, 0, problem, segment, fields)
        source, location = finder.locate(name if found is None else found)
        if found is None:
            return Item(source, location, labels, 0, finder.explain(name), None, fields)
        if not has_video_extension(found) and (kind := classify_name(found.rpartition("/")[2])) in KINDS:
            problem = problem or f"by its name it is one of the {kind}"
        if columns.label_is_folder:
            labels = (source.split("/")[-2],) if "/" in source else None
        return Item(source, location, labels, 0, problem, segment, fields)

    def _read_labels(self, row: Row) -> tuple[str, ...] | None:
        columns = self.columns
        if columns.constant_label is not None:
            return (columns.constant_label,)
        cell = get_cell(row, columns.label)
        if cell is None:
            return None
        labels = (self.parse_labels if isinstance(cell, str) else cells.read_labels)(cell, columns.separator)
        if labels and (removed := columns.format.removed):
            labels = tuple(re.sub(f"[{re.escape(removed)}]", "", label) for label in labels)
        self.labels[labels] += 1
        if len(self.labels) > MAX_KINDS and 2 * len(self.labels) > self.num_rows:
            self._check_labels()
        return labels

    def _find_trimmed(self, name: str, segment: Segment) -> str | None:
        """Find a file that is the segment already, by its name: <id>_000010_000020.mp4."""
        start, end = segment[:2]
        full = f"_{start:06.0f}_{end:06.0f}", f"_{start:g}_{end:g}"
        if os.path.splitext(name)[0].endswith(full):
            return self.finder.find(name)
        return next(filter(None, (self.finder.find(name + ending) for ending in (*full, full[0][:7]))), None)

    def _check_subsets(self) -> None:
        wanted, rows = self.subset, _format_counts(self.subsets)
        if len(self.subsets) > 1 and wanted is None and not self.options.unlabeled:
            raise InputError(f"{self.where} has rows of several subsets, {rows}: give --subset NAME, or --subset all")
        if self.subsets and wanted not in (None, "all") and wanted not in self.subsets:
            raise InputError(f"{self.where} has no rows of the subset {wanted}, only of {rows}: choose one of them")

    def _check_labels(self) -> None:
        """Refuse captions, and numbers beside names, unless they were asked for."""
        columns, counts = self.columns, Counter({labels[0]: n for labels, n in self.labels.items() if labels})
        if self.options.label is not None or columns.separator is not None or not counts or columns.label is None:
            return
        where = f"{self.where}: {columns.names[columns.label]}"
        total, words = counts.total(), sum(len(label.split()) for label in counts) / len(counts)
        few = total >= FEW_CAPTIONS and len(counts) == total and words >= CAPTION_WORDS + 2
        if few or (total >= MIN_CAPTIONS and 2 * len(counts) > total and words >= CAPTION_WORDS):
            what = f"{len(counts)} different values in {total} rows, such as {printable(next(iter(counts)))!r}"
            fix = "give --label-column, or --unlabeled (other columns are kept with each sample)"
            raise InputError(f"{where} has {what}, which look like captions, not classes: {fix}")
        numbers = Counter({label: count for label, count in counts.items() if is_id(label)})
        names = counts - numbers
        if numbers and names and not self.options.has_label_map:
            one, other = (f"{found.total()} rows ({printable(next(iter(found)))})" for found in (numbers, names))
            fix = "write all labels alike, or give --label-map or --label-column"
            raise InputError(f"{where} is a number in {one} and a name in {other}: {fix}")

    def describe(self) -> str:
        """Say in a sentence how the list was read, and as which format."""
        columns, times = self.columns, self.columns.times
        names = [printable(name) for name in columns.names]
        label = "no label"
        if columns.label_is_folder:
            label = "label = the folder"
        elif columns.constant_label is not None:
            label = f"label = {printable(columns.constant_label)}, as the list is called"
        elif columns.label is not None:
            label = f"label{'s' * (columns.separator is not None)} = {names[columns.label]}"
        parts = [f"path = {names[columns.path]}", label]
        if times:
            end = f" and {times.length:g} s" if times.end is None else f" to {names[times.end]}"
            unit = "frames" if times.in_frames else "seconds"
            parts.append(f"segments = {names[times.start]}{end if times.start != times.end else ''} ({unit})")
        if self.subsets:
            parts.append(f"subsets: {_format_counts(self.subsets)}; taken: {self.subset or 'all'}")
        if self.num_trimmed:
            parts.append(f"{self.num_trimmed} files are segments already")
        if columns.format.left_out:
            parts.append(f"{self.num_left_out} rows of {columns.format.left_out[1]} left out")
        parts.append(f"format: {columns.format.name}; below {self.finder.root}")
        return f"{self.num_rows} rows in {self.where} ({self.table.form}): {', '.join(parts)}"


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{printable(name)} ({count})" for name, count in sorted(counts.items()))
