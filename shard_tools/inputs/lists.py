"""Lists of videos as items: which column is what is said before any work begins, and every row is accounted for."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import av

from common.errors import InputError
from common.logging import printable
from pipeline.reading.storage import is_remote
from shard_tools.encoding.picture import UnusableError
from shard_tools.encoding.source import open_source
from shard_tools.inputs import cells
from shard_tools.inputs.cells import Row, get_cell, read_segment, to_text
from shard_tools.inputs.classes import is_id
from shard_tools.inputs.columns import ColumnDetector
from shard_tools.inputs.files import Finder
from shard_tools.inputs.folders import GROUPS, KINDS, classify_name, has_video_extension
from shard_tools.inputs.item import Item, ParquetCell, Segment
from shard_tools.inputs.options import ListOptions
from shard_tools.inputs.table_reader import Table, read_table

FEW_CAPTIONS, MIN_CAPTIONS = 5, 20  # rows: with fewer, labels that are all different are believed
CAPTION_WORDS = 3
YOUTUBE = re.compile(r"youtu(?:be\.com/watch\?v=|\.be/)([\w-]{11})")
MAX_KINDS = 100_000  # different labels, above which at least half of the rows must repeat one
NUM_PROBED = 24  # files whose length is looked at
SLACK_S = 1.0  # by which a trimmed file may be longer than its segment: it is cut at key frames


class ListReader:
    """Reads one list; `describe` is complete once all items were taken."""

    def __init__(self, path: Path, where: str, options: ListOptions, folder: Path) -> None:
        self.where, self.options = where, options
        if options.root and not Path(options.root).is_dir():
            raise InputError(f"--root {options.root} is no folder: give the one that the list's paths are relative to")
        roots = [Path(options.root)] if options.root else [folder, *dict.fromkeys([folder.parent, Path()])]
        self.finder, self.table = self._find_root(path, roots)
        self.sample = self.table.sample()
        if not self.sample:
            raise InputError(f"{where} has no rows but its header")
        detector = ColumnDetector(self.table, self.sample, options, self.finder)
        self.columns, self.names = detector.detect(), detector.names
        self.subset = options.subset
        if options.is_split and self.subset not in {self._read_subset(row) for row in self.sample}:
            self.subset = None  # it is only what the split is called
        self.labels: Counter[tuple[str, ...] | None] = Counter()
        self.subsets: Counter[str] = Counter()
        self.num_rows = self.num_left_out = self.num_trimmed = self.num_downloaded = 0
        self.parse_labels = lru_cache(maxsize=MAX_KINDS)(cells.read_labels)  # 10 million rows have some hundred labels
        self.are_trimmed = self._are_trimmed()
        urls = {name for row in self.sample if is_remote(name := self._read_name(row))}
        self.finder.finds_urls = len({url.rpartition("/")[2] for url in urls}) == len(urls)

    def _find_root(self, path: Path, roots: list[Path]) -> tuple[Finder, Table]:
        """Return a finder below the first root where most of the sampled rows are files; index it if need be."""
        tried: list[tuple[Finder, Table]] = []
        for root in roots:
            finder = Finder(root, self.options.suffix)
            table = read_table(path, self.where, finder.has)
            if table.score.num_found >= 0.9 * table.score.num_rows or table.holds_videos:
                return finder, table
            tried.append((finder, table))
        finder, table = max(tried, key=lambda entry: entry[1].score.num_found)
        finder.index()
        indexed = read_table(path, self.where, finder.has)
        return finder, indexed if indexed.score.num_found > table.score.num_found else table

    def _are_trimmed(self) -> bool:
        """Whether the files are what was cut out of videos already: some end before their segment, none is longer."""
        times = self.columns.times
        if not times or times.in_frames or times.start == times.end:
            return False
        segments: dict[str, Segment] = {}
        ends_before = False
        for row in self.sample[:: max(1, len(self.sample) // NUM_PROBED)]:
            segment, _ = read_segment(row, times)
            found = segment and self.finder.find(self._read_name(row))
            if segment and found and (seconds := probe_seconds(self.finder.root / found)):
                if seconds > segment.end - segment.start + SLACK_S or segments.setdefault(found, segment) != segment:
                    return False
                ends_before |= segment.end > seconds + SLACK_S
        return ends_before

    def read(self) -> Iterator[Item]:
        """Yield an item a row. Raise InputError where rows together show that the columns are not what they seem."""
        columns, width, left_out = self.columns, len(self.table.columns or ()), self.columns.format.left_out
        used = {columns.path, columns.label, *(columns.times or ())[:2]}
        kept = [n for n, name in enumerate(self.names) if n not in used and name]
        for number, row in enumerate(self.table.read_rows(), 1):
            self.num_rows = number
            if width and len(row) > width:
                problem = f"its row has {len(row)} cells under {width} columns: quote the one that holds a separator"
                yield Item(self._name_row(row), "", problem=problem)
                continue
            if left_out and cells.read_label(get_cell(row, columns.sign)) == left_out[0]:
                self.num_left_out += 1
                continue
            if columns.subset is not None:
                subset = self._read_subset(row)
                self.subsets[subset] += 1
                if self.subset not in (None, "all", subset):
                    continue
            yield self._make_item(row, kept)
        self._check_subsets()
        self._check_labels()

    def _read_subset(self, row: Row) -> str:
        """Return the subset of a row: train, val, test, or what it says."""
        text = cells.read_label(get_cell(row, self.columns.subset)) or "no subset"
        return dict(self.columns.format.subsets).get(text) or GROUPS.get(text.lower(), text)

    def _name_row(self, row: Row) -> str:
        return f"{self.where}, row {self.num_rows}: {','.join(map(to_text, row))[:100]}"

    def _read_name(self, row: Row) -> str:
        name = cells.to_path(get_cell(row, self.columns.path))
        if "youtu" in name and (page := YOUTUBE.search(name)):  # whose video was downloaded under its id
            name = page[1]
        return name and name + self.options.suffix

    def _make_item(self, row: Row, kept: list[int]) -> Item:
        columns, finder = self.columns, self.finder
        name = self._read_name(row)
        if not name:
            return Item(self._name_row(row), "", problem="this row names no video")
        labels = self._read_labels(row)
        fields = cells.dump_fields(self.names, row, kept) if kept else ""
        segment, problem = read_segment(row, columns.times) if columns.times else (None, None)
        if self.table.holds_videos and isinstance(cell := row[columns.path], ParquetCell):
            return Item(f"{Path(cell.archive).name}/{cell.name}", cell, labels, 0, problem, segment, fields)
        if segment and (found := self._find_trimmed(name, row, segment)):
            segment = None
            self.num_trimmed += 1
        elif (found := finder.find(name)) is None and is_remote(name):
            if not name.isascii() and cells.HALF_A_PAIR.search(name):
                problem = "no file can have its name"
            return Item(name, name, labels, 0, problem, segment, fields)
        self.num_downloaded += is_remote(name) and found is not None
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

    def _find_trimmed(self, name: str, row: Row, segment: Segment) -> str | None:
        """Find a file that is the segment already: all are, or its name says so, in the folder of its class or not."""
        if self.are_trimmed:
            return self.finder.find(name)
        endings = list_endings(segment)
        if os.path.splitext(name)[0].endswith(tuple(endings[:NUM_FULL_ENDINGS])):
            return self.finder.find(name)
        if "/" in name:
            return None
        label = get_cell(row, self.columns.label)
        folders = ["", f"{label}/", f"{label.replace(' ', '_')}/"] if isinstance(label, str) else [""]
        names = (f"{folder}{name}{ending}" for ending in endings for folder in folders)
        return next(filter(None, map(self.finder.find, names)), None)

    def _check_subsets(self) -> None:
        wanted, rows = self.subset, _format_counts(self.subsets)
        if len(self.subsets) > 1 and wanted is None and not self.options.unlabeled:
            raise InputError(f"{self.where} has rows of several subsets, {rows}: give --subset NAME, or --subset all")
        if self.subsets and wanted not in (None, "all") and wanted not in self.subsets:
            raise InputError(f"{self.where} has no rows of the subset {wanted}, only of {rows}: choose one of them")

    def _check_labels(self) -> None:
        """Refuse captions, and numbers beside names, unless they were asked for."""
        counts = Counter({labels[0]: count for labels, count in self.labels.items() if labels})
        if self.options.label is not None or self.columns.is_multiple or not counts or self.columns.label is None:
            return
        where = f"{self.where}: {self.names[self.columns.label]}"
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
        names = [printable(name) for name in self.names]
        label = "no label" if columns.label is None else f"label{'s' * columns.is_multiple} = {names[columns.label]}"
        if columns.constant_label is not None:
            label = f"label = {printable(columns.constant_label)}, as the list is called"
        parts = [f"path = {names[columns.path]}", "label = the folder" if columns.label_is_folder else label]
        if times:
            end = f" and {times.length:g} s" if times.end is None else f" to {names[times.end]}"
            unit = "frames" if times.in_frames else "seconds"
            parts.append(f"segments = {names[times.start]}{end if times.start != times.end else ''} ({unit})")
        if self.subsets:
            parts.append(f"subsets: {_format_counts(self.subsets)}; taken: {self.subset or 'all'}")
        if self.num_trimmed:
            why = " (none is longer than its segment)" * self.are_trimmed
            parts.append(f"{self.num_trimmed} files are segments already{why}")
        if self.num_downloaded:
            parts.append(f"{self.num_downloaded} URLs are files here")
        if columns.format.left_out:
            parts.append(f"{self.num_left_out} rows of {columns.format.left_out[1]} left out")
        parts.append(f"format: {columns.format.name}; below {self.finder.root}")
        return f"{self.num_rows} rows in {self.where} ({self.table.form}): {', '.join(parts)}"


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{printable(name)} ({count})" for name, count in sorted(counts.items()))


NUM_FULL_ENDINGS = 3  # the others may be numbers of whole videos too


def list_endings(segment: Segment) -> list[str]:
    """Return what names of trimmed files may have behind the id of the whole video."""
    start, end, start_ms, end_ms = (
        int(max(-1, min(time * scale, 1e12))) for scale in (1, 1000) for time in segment[:2]
    )
    full = [f"_{start:06d}_{end:06d}", f"_{segment.start:g}_{segment.end:g}", f"_{start_ms}_{end_ms}"]
    return [*full, f"_{start:06d}", f"_{segment.start:g}"]


def probe_seconds(path: Path) -> float:
    """Return how long a video is by its header; 0 if it does not say."""
    try:
        with open_source(path) as (container, _):
            return (container.duration or 0) / av.time_base
    except (UnusableError, OSError):
        return 0.0
