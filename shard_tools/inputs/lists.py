"""Read lists of videos: a row becomes an item, and `describe` says how a list was read."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.common.logging import printable
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs import cells
from adamae.shard_tools.inputs.cells import Row, get_cell
from adamae.shard_tools.inputs.class_folders import GROUPS, choose_subset, get_folder_label
from adamae.shard_tools.inputs.classes import is_id
from adamae.shard_tools.inputs.columns import find_columns
from adamae.shard_tools.inputs.files import Finder
from adamae.shard_tools.inputs.folders import KINDS, classify_name, has_video_extension
from adamae.shard_tools.inputs.item import Item, ListOptions
from adamae.shard_tools.inputs.location import ParquetCell
from adamae.shard_tools.inputs.table_reader import Table, choose_table, list_tables

# Labels are taken for captions in two cases:
# - At least MIN_CAPTIONS rows have more than half as many different labels, of CAPTION_WORDS words
#   or more on average.
# - At least FEW_CAPTIONS rows all have different labels, of CAPTION_WORDS + 2 words or more.
FEW_CAPTIONS = 5
MIN_CAPTIONS = 20
CAPTION_WORDS = 3
# A folder is taken for the root of a list's paths if this fraction of the sampled rows is there.
MIN_FOUND = 0.9
# The number of characters of a row that a report quotes.
MAX_NAME = 100


class ListReader:
    """Reads one list; call `describe` after all items of `read` were taken."""

    def __init__(self, path: Path, options: ListOptions, where: str) -> None:
        self.where = where
        self.options = options
        if options.root:
            if not Path(options.root).is_dir():
                fix = "give the one that the list's paths are relative to"
                raise InputError(f"--root {options.root} is no folder: {fix}")
            roots = [Path(options.root)]
        else:
            roots = list(dict.fromkeys([path.parent, path.parent.parent, Path()]))
        self.finder, self.table = self._find_root(list_tables(path, where), roots)
        if not self.table.sample:
            raise InputError(f"{where} has no rows but its header")
        self.columns = find_columns(self.table, options, self.finder)
        self.subset = options.subset
        if options.is_split:
            subsets = {self._read_subset(row) for row in self.table.sample}
            if self.subset not in subsets:
                self.subset = None
        # The number of rows by label, if a cell is one label, and by subset.
        self.num_labels = Counter[str]()
        self.num_subsets = Counter[str]()
        self.num_rows = 0
        self.num_left_out = 0
        # Parsed cells are cached: 10 million rows have a few hundred different labels.
        self._parse_labels = lru_cache(maxsize=100_000)(cells.read_labels)
        names = {self._read_name(row) for row in self.table.sample}
        urls = {name for name in names if is_remote(name)}
        # A URL stands for a downloaded file of its last part only if no two URLs end in the same
        # part, as …/1/video.mp4 and …/2/video.mp4 do.
        self.finder.finds_urls = len({url.rpartition("/")[2] for url in urls}) == len(urls)

    def _find_root(self, tables: list[Table], roots: list[Path]) -> tuple[Finder, Table]:
        """Return a finder below the first root where most of the sampled rows are files.

        If there is no such root, take the one with the most files, and index it: this walks through
        all of its folders.
        """
        best: tuple[Finder, Table] | None = None
        for root in roots:
            finder = Finder(root, self.options.suffix)
            table = choose_table(tables, finder.has)
            if table.num_found >= MIN_FOUND * table.num_scored:
                return finder, table
            if best is None or table.num_found > best[1].num_found:
                best = (finder, table)
        assert best is not None
        finder, table = best
        finder.index()
        indexed_table = choose_table(tables, finder.has)
        if indexed_table.num_found > table.num_found:
            table = indexed_table
        return finder, table

    def read(self) -> Iterator[Item]:
        """Yield an item for each row that is in the subset and not left out.

        Raise InputError at the end if it is not clear which subset to take, or if the labels do not
        look like classes.
        """
        for row in self.table.read_rows():
            self.num_rows += 1
            if self.table.columns and len(row) > len(self.columns.names):
                width = f"{len(row)} cells under {len(self.columns.names)} columns"
                fix = "quote the one that holds a separator"
                yield self._reject(row, f"its row has {width}: {fix}")
            elif self._is_left_out(row):
                self.num_left_out += 1
            elif self._is_in_subset(row):
                yield self._make_item(row)
        subset = self.subset
        if subset is None and self.options.unlabeled:
            # Subsets are made for training with labels. Without labels, features or figures may be
            # made of all rows.
            subset = "all"
        groups = dict(zip(self._list_subsets(), sorted(self.num_subsets), strict=True))
        choose_subset(groups, subset, self.where)
        self._require_classes()

    def _is_left_out(self, row: Row) -> bool:
        left_out = self.columns.format.left_out
        if left_out is None:
            return False
        mark, _ = left_out
        return cells.read_label(get_cell(row, self.columns.exclusion)) == mark

    def _is_in_subset(self, row: Row) -> bool:
        """Return whether a row is of the subset to take, and count it."""
        if self.columns.subset is None:
            return True
        subset = self._read_subset(row)
        self.num_subsets[subset] += 1
        return self.subset in (None, "all", subset)

    def _read_subset(self, row: Row) -> str:
        """Return the subset of a row: train, val or test, or else the text of its cell."""
        text = cells.read_label(get_cell(row, self.columns.subset)) or "no subset"
        names = dict(self.columns.format.subsets)
        return names.get(text) or GROUPS.get(text.lower(), text)

    def _reject(self, row: Row, problem: str) -> Item:
        text = ",".join(map(cells.to_text, row))[:MAX_NAME]
        return Item(f"{self.where}, row {self.num_rows}: {text}", "", problem=problem)

    def _read_name(self, row: Row) -> str:
        """Return the name of a row's video, with the suffix; "" if the row has no name."""
        name = cells.to_path(get_cell(row, self.columns.path))
        return name and name + self.options.suffix

    def _make_item(self, row: Row) -> Item:
        columns = self.columns
        name = self._read_name(row)
        if not name:
            return self._reject(row, "this row names no video")
        labels = self._read_labels(row)
        fields = cells.dump_fields(columns.names, row, columns.fields)
        segment = None
        problem = None
        if columns.times:
            segment, problem = cells.read_segment(row, columns.times)
        cell = get_cell(row, columns.path)
        if isinstance(cell, ParquetCell):
            return Item(cell.name, cell, labels, 0, problem, str(segment or ""), fields)
        path = None
        if segment:
            path = self._find_trimmed(name, segment)
        if path is not None:
            segment = None
        else:
            path = self.finder.find(name)
        if path is None and is_remote(name):
            if cells.HALF_A_PAIR.search(name):
                problem = "no file can have its name"
            return Item(name, name, labels, 0, problem, str(segment or ""), fields)
        source, location = self.finder.locate(path or name)
        if path is None:
            segment = None
            problem = self.finder.explain(name)
        else:
            problem = problem or _explain_kind(path)
        if self.options.label_folder:
            labels = get_folder_label(source.rpartition("/")[0], self.options.label_folder)
        return Item(source, location, labels, 0, problem, str(segment or ""), fields)

    def _read_labels(self, row: Row) -> tuple[str, ...] | None:
        columns = self.columns
        if columns.constant_label is not None:
            return (columns.constant_label,)
        cell = get_cell(row, columns.label)
        # Lists of JSON are not hashable.
        read_labels = self._parse_labels if isinstance(cell, str) else cells.read_labels
        labels = read_labels(cell, columns.separator)
        if labels and columns.format.removed:
            labels = tuple(re.sub(columns.format.removed, "", label) for label in labels)
        if labels and columns.separator is None:
            self.num_labels[labels[0]] += 1
        return labels

    def _find_trimmed(self, name: str, segment: Segment) -> str | None:
        """Return the path of a file whose name says that it is already cut to the segment, or None.

        Kinetics' files are <id>_000010_000020.mp4, VGGSound's <id>_000010.mp4, and those of other
        datasets <id>_10_20.mp4.
        """
        padded_start = f"_{segment.start:06.0f}"
        endings = (
            f"{padded_start}_{segment.end:06.0f}",
            f"_{segment.start:g}_{segment.end:g}",
        )
        if os.path.splitext(name)[0].endswith(endings):
            return self.finder.find(name)
        for ending in (*endings, padded_start):
            path = self.finder.find(name + ending)
            if path is not None:
                return path
        return None

    def _require_classes(self) -> None:
        """Raise InputError if labels look like captions, or some are numbers and others names.

        --label-column turns both checks off, and a label map the second one.
        """
        counts = self.num_labels
        column = self.columns.label
        if self.options.label is not None or not counts or column is None:
            return
        where = f"{self.where}: {self.columns.names[column]}"
        if _are_captions(counts):
            example = printable(next(iter(counts)))
            what = f"{len(counts)} different values in {counts.total()} rows, such as {example!r}"
            fix = "give --label-column, or --unlabeled (other columns are kept with each sample)"
            raise InputError(f"{where} has {what}, which look like captions, not classes: {fix}")
        numbers = Counter({label: count for label, count in counts.items() if is_id(label)})
        names = counts - numbers
        if numbers and names and not self.options.has_label_map:
            what = (
                f"{where} is a number in {_count_rows(numbers)} and a name in {_count_rows(names)}"
            )
            fix = "write all labels alike, or give --label-map or --label-column"
            raise InputError(f"{what}: {fix}")

    def _list_subsets(self) -> list[str]:
        return [f"{printable(name)} ({count})" for name, count in sorted(self.num_subsets.items())]

    def describe(self) -> str:
        """Return a sentence that says how the list was read, and which format it has."""
        columns = self.columns
        names = [printable(name) for name in columns.names]
        label = columns.constant_label or "none"
        if self.options.label_folder:
            label = f"folder {self.options.label_folder} of the path"
        elif columns.label is not None:
            label = names[columns.label]
        parts = [f"path = {names[columns.path]}", f"label = {label}"]
        times = columns.times
        if times:
            end = f" and {times.length:g} s" if times.end is None else f" to {names[times.end]}"
            unit = "frames" if times.in_frames else "seconds"
            parts.append(f"segments = {names[times.start]}{end} ({unit})")
        if self.num_subsets:
            subsets = ", ".join(self._list_subsets())
            parts.append(f"subsets: {subsets}; taken: {self.subset or 'all'}")
        if columns.format.left_out:
            parts.append(f"{self.num_left_out} rows of {columns.format.left_out[1]} left out")
        parts.append(f"format: {columns.format.name}; below {self.finder.root}")
        return f"{self.num_rows} rows in {self.where} ({self.table.form}): {', '.join(parts)}"


def _explain_kind(path: str) -> str | None:
    """Return why the name of a file shows that it is not a video; None if it may be one."""
    if has_video_extension(path):
        return None
    kind = classify_name(path.rpartition("/")[2])
    # A file with another name is examined later, by its first bytes.
    return f"by its name it is one of the {kind}" if kind in KINDS else None


def _are_captions(counts: Counter[str]) -> bool:
    """Return whether labels look like captions; `counts` is the number of rows by label."""
    num_rows = counts.total()
    num_words = sum(len(label.split()) for label in counts)
    words_per_label = num_words / len(counts)
    if num_rows >= MIN_CAPTIONS and len(counts) > num_rows / 2:
        return words_per_label >= CAPTION_WORDS
    if num_rows >= FEW_CAPTIONS and len(counts) == num_rows:
        return words_per_label >= CAPTION_WORDS + 2
    return False


def _count_rows(counts: Counter[str]) -> str:
    return f"{counts.total()} rows ({printable(next(iter(counts)))})"
