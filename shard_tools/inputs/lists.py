"""Lists of videos as items: which column is what is said before any work begins, and every row is accounted for."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import av

from common.errors import InputError
from common.logging import printable
from pipeline.reading.storage import is_remote
from shard_tools.encoding.picture import UnusableError
from shard_tools.encoding.source import open_source
from shard_tools.inputs.cells import Row, dump_fields, read_label, read_labels, read_segment, to_path, to_text
from shard_tools.inputs.classes import is_id
from shard_tools.inputs.columns import Choices, Judgement, RoleChooser, judge_rows
from shard_tools.inputs.files import Finder
from shard_tools.inputs.folders import GROUPS
from shard_tools.inputs.item import Item, ParquetCell, Segment
from shard_tools.inputs.sniff import Table, read_table

FEW_CAPTIONS, MIN_CAPTIONS = 5, 20  # rows: with fewer, labels that are all different are believed
CAPTION_WORDS = 3
YOUTUBE = re.compile(r"youtu(?:be\.com/watch\?v=|\.be/)([\w-]{11})")
HALF_A_PAIR = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # which JSON can name, and no file
MAX_KINDS = 100_000  # different labels, above which at least half of the rows must repeat one
NUM_PROBED = 24  # files whose length is looked at
SLACK_S = 1.0  # by which a trimmed file may be longer than its segment: it is cut at key frames
BRACKETS = str.maketrans("", "", "[]")
Ending = Callable[[float, float], str]  # of the names of trimmed files, behind the id of the whole video
SEGMENT_ENDINGS: tuple[Ending, ...] = (
    lambda start, end: f"_{_whole(start):06d}_{_whole(end):06d}",
    lambda start, end: f"_{start:g}_{end:g}",
    lambda start, end: f"_{_whole(start * 1000)}_{_whole(end * 1000)}",
)
START_ENDINGS: tuple[Ending, ...] = (  # which may be numbers of whole videos too
    lambda start, end: f"_{_whole(start):06d}",
    lambda start, end: f"_{start:g}",
)


class ListReader:
    """Reads one list; `describe` is complete once all items were taken."""

    def __init__(self, path: Path, where: str, choices: Choices, folder: Path) -> None:
        self.where, self.choices = where, choices
        if choices.root and not Path(choices.root).is_dir():
            raise InputError(f"--root {choices.root} is no folder: give the one that the list's paths are relative to")
        roots = [Path(choices.root)] if choices.root else [folder, *dict.fromkeys([folder.parent, Path()])]
        self.finder, self.table = self._find_root(path, where, roots)
        self.sample = self.table.sample()
        if not self.sample:
            raise InputError(f"{where} has no rows but its header")
        self.roles = RoleChooser(self.table, self.sample, choices, self.finder).choose()
        self.has_segments = bool(self.roles.times) or self.roles.pair is not None
        self.names = self.table.columns or []
        self.subset = choices.subset
        if choices.is_split and self.subset not in {self._to_group(row) for row in self.sample}:
            self.subset = None  # it is only what the split is called
        self.labels: Counter[tuple[str, ...] | None] = Counter()
        self.groups: Counter[str] = Counter()
        self.num_rows = self.num_skipped = self.num_trimmed = 0
        self.endings = [*SEGMENT_ENDINGS, *START_ENDINGS]
        self.parse_labels = lru_cache(maxsize=MAX_KINDS)(read_labels)  # 10 million rows have some hundred labels
        self.are_trimmed = self._are_trimmed()

    def _find_root(self, path: Path, where: str, roots: list[Path]) -> tuple[Finder, Table]:
        """Return a finder below the first root where most of the sampled rows are files; index it if need be."""
        tried = []
        for finder in (Finder(root, self.choices.suffix) for root in roots):
            table, judgement = self._sniff(path, where, finder)
            if judgement.num_found >= 0.9 * judgement.num_rows or table.holds_videos:
                return finder, table
            tried.append((judgement.num_found, finder, table))
        num_found, finder, table = max(tried, key=lambda entry: entry[0])
        finder.index()
        indexed, judgement = self._sniff(path, where, finder)
        return finder, indexed if judgement.num_found > num_found else table

    def _sniff(self, path: Path, where: str, finder: Finder) -> tuple[Table, Judgement]:
        judgements: list[Judgement] = []

        def judge(rows: list[list[str]]) -> tuple[tuple[int, ...], bool]:
            judgement = judge_rows(rows, finder.has)
            judgements.append(judgement)
            return (judgement.num_found, judgement.num_known, judgement.num_looks), judgement.has_header

        table = read_table(path, where, judge)
        if not judgements and (sample := table.sample()):
            paths = [[to_path(cell) if isinstance(cell, (str, int)) else "" for cell in row] for row in sample]
            judgements.append(judge_rows([[""] * len(sample[0]), *paths], finder.has))
        return table, max(judgements, default=Judgement(0, 0, 0, 1, False, 0))

    def _are_trimmed(self) -> bool:
        """Whether the files are what was cut out of videos already: some end before their segment, none is longer."""
        if not self.roles.times or self.roles.times[0].in_frames:
            return False
        segments: dict[str, Segment] = {}
        ends_before = False
        for row in self.sample[:: max(1, len(self.sample) // NUM_PROBED)]:
            segment, _ = read_segment(row, self.roles)
            found = segment and self.finder.find(self._read_name(row))
            if segment and found and (seconds := probe_seconds(self.finder.root / found)):
                if seconds > segment.end - segment.start + SLACK_S or segments.setdefault(found, segment) != segment:
                    return False
                ends_before |= segment.end > seconds + SLACK_S
        return ends_before

    def read(self) -> Iterator[Item]:
        """Yield an item a row. Raise InputError where rows together show that the columns are not what they seem."""
        roles, width = self.roles, len(self.names)
        used = {roles.path, roles.label, *(column for times in roles.times for column in times[:2])}
        kept = [n for n in range(width) if n not in used and self.names[n]]
        skip, skipped_value, _ = roles.skip or (None, "", "")
        for number, row in enumerate(self.table.read_rows(), 1):
            self.num_rows = number
            if width and len(row) > width:
                problem = f"its row has {len(row)} cells under {width} columns: quote the one that holds a separator"
                yield Item(self._name_row(row), "", problem=problem)
                continue
            if skip is not None and len(row) > skip and read_label(row[skip]) == skipped_value:
                self.num_skipped += 1
                continue
            if roles.subset is not None:
                group = self._to_group(row)
                self.groups[group] += 1
                if self.subset not in (None, "all", group):
                    continue
            yield self._make_item(row, kept)
        self._check_groups()
        self._check_labels()

    def _to_group(self, row: Row) -> str:
        """Return the subset of a row: train, val, test, or what it says."""
        column = self.roles.subset
        text = (read_label(row[column]) if column is not None and column < len(row) else None) or "no subset"
        return self.roles.subset_codes.get(text) or GROUPS.get(text.lower(), text)

    def _name_row(self, row: Row) -> str:
        return f"{self.where}, row {self.num_rows}: {','.join(map(to_text, row))[:100]}"

    def _read_name(self, row: Row) -> str:
        name = to_path(row[self.roles.path]) if len(row) > self.roles.path else ""
        if "youtu" in name and (page := YOUTUBE.search(name)):  # whose video was downloaded under its id
            name = page[1]
        return name and name + self.choices.suffix

    def _make_item(self, row: Row, kept: list[int]) -> Item:
        roles, finder = self.roles, self.finder
        name = self._read_name(row)
        if not name:
            return Item(self._name_row(row), "", problem="this row names no video")
        labels = self._read_labels(row)
        fields = dump_fields(self.names, row, kept) if kept else ""
        segment, problem = read_segment(row, roles) if self.has_segments else (None, None)
        if self.table.holds_videos and isinstance(cell := row[roles.path], ParquetCell):
            return Item(f"{Path(cell.archive).name}/{cell.name}", cell, labels, 0, problem, segment, fields)
        if segment and (found := self._find_trimmed(name, row, segment)):
            segment = None
            self.num_trimmed += 1
        elif is_remote(name):
            if not name.isascii() and HALF_A_PAIR.search(name):
                problem = "no file can have its name"
            return Item(name, name, labels, 0, problem, segment, fields)
        else:
            found = finder.find(name)
        source, location = finder.locate(name if found is None else found)
        if found is None:
            return Item(source, location, labels, 0, finder.explain(name), None, fields)
        if segment and len(roles.times) > 1 and found in finder.frame_folders:
            segment, problem = read_segment(row, roles, in_frames=True)
        if roles.label_is_folder:
            labels = (source.split("/")[-2],) if "/" in source else None
            self.labels[labels] += 1
        return Item(source, location, labels, 0, problem, segment, fields)

    def _read_labels(self, row: Row) -> tuple[str, ...] | None:
        roles = self.roles
        if roles.label_of_all is not None:
            labels: tuple[str, ...] | None = (roles.label_of_all,)
        elif roles.label is None or roles.label >= len(row):
            return None
        else:
            cell = row[roles.label]
            labels = (self.parse_labels if isinstance(cell, str) else read_labels)(cell, roles.is_multiple)
            if labels and self.names and self.names[roles.label] == "template":  # whose label map has no brackets
                labels = tuple(label.translate(BRACKETS) for label in labels)
        self.labels[labels] += 1
        if len(self.labels) > MAX_KINDS and 2 * len(self.labels) > self.num_rows:
            self._check_labels()
        return labels

    def _find_trimmed(self, name: str, row: Row, segment: Segment) -> str | None:
        """Find a file that is the segment already: all are, or its name says so, in the folder of its class or not."""
        if self.are_trimmed:
            return self.finder.find(name)
        stem = os.path.splitext(name)[0]
        label = row[self.roles.label] if self.roles.label is not None and self.roles.label < len(row) else None
        folders = ["", f"{label}/", f"{label.replace(' ', '_')}/"] if isinstance(label, str) else [""]
        for place, ending in enumerate(self.endings):
            text = ending(segment.start, segment.end)
            names = [f"{folder}{name}{text}" for folder in folders] if "/" not in name else []
            if stem.endswith(text):
                names = [name] if ending in SEGMENT_ENDINGS else []
            for candidate in names:
                if found := self.finder.find(candidate):
                    self.endings.insert(0, self.endings.pop(place))
                    return found
        return None

    def _check_groups(self) -> None:
        wanted = self.subset
        rows = ", ".join(f"{printable(group)} ({count})" for group, count in sorted(self.groups.items()))
        if len(self.groups) > 1 and wanted is None and not self.choices.unlabeled:
            raise InputError(f"{self.where} has rows of several subsets, {rows}: give --subset NAME, or --subset all")
        if self.groups and wanted not in (None, "all") and wanted not in self.groups:
            raise InputError(f"{self.where} has no rows of the subset {wanted}, only of {rows}: choose one of them")

    def _check_labels(self) -> None:
        """Refuse captions, and numbers beside names, unless they were asked for."""
        counts = Counter({labels[0]: count for labels, count in self.labels.items() if labels})
        if self.choices.label is not None or self.roles.is_multiple or not counts or self.roles.label is None:
            return
        column = self.names[self.roles.label] if self.names else f"column {self.roles.label + 1}"
        total, words = counts.total(), sum(len(label.split()) for label in counts) / len(counts)
        few = total >= FEW_CAPTIONS and len(counts) == total and words >= CAPTION_WORDS + 2
        if few or (total >= MIN_CAPTIONS and 2 * len(counts) > total and words >= CAPTION_WORDS):
            raise InputError(
                f"{self.where}: {column} has {len(counts)} different values in {total} rows, such as"
                f" {printable(next(iter(counts)))!r}, which look like captions, not classes: give --label-column, or"
                " --unlabeled (other columns are kept with each sample)"
            )
        numbers = Counter({label: count for label, count in counts.items() if is_id(label)})
        names = counts - numbers
        if numbers and names and not self.choices.has_label_map:
            raise InputError(
                f"{self.where}: {column} is a number in {numbers.total()} rows ({printable(next(iter(numbers)))}) and a"
                f" name in {names.total()} ({printable(next(iter(names)))}): write all labels alike, or give"
                " --label-map or --label-column"
            )

    def describe(self) -> str:
        """Say in a sentence how the list was read."""
        roles = self.roles
        names = self.names or [f"column {n}" for n in range(1, max(map(len, self.sample)) + 1)]
        names = [printable(name) for name in names]
        label = "no label"
        if roles.label_of_all is not None:
            label = f"label = {printable(roles.label_of_all)}, as the list is called"
        elif roles.label_is_folder:
            label = "label = the name of the folder"
        elif roles.label is not None:
            label = f"{'labels' if roles.is_multiple else 'label'} = {names[roles.label]}"
        parts = [f"path = {names[roles.path]}", label]
        for times in roles.times[:1]:
            end = f"{times.length:g} s" if times.end is None else names[times.end]
            unit = "frames" if times.in_frames else "seconds"
            parts.append(f"segments = {names[times.start]} to {end} ({unit})")
        parts += [f"segments = {names[roles.pair]}"] if roles.pair is not None else []
        if self.groups:
            counts = ", ".join(f"{printable(group)} {count}" for group, count in sorted(self.groups.items()))
            parts.append(f"subsets: {counts}; taken: {self.subset or 'all'}")
        parts += [f"not used: {', '.join(names[n] for n in roles.unused)}"] * bool(roles.unused)
        why = " (none is longer than its segment)" * self.are_trimmed
        parts += [f"{self.num_trimmed} files are segments already{why}"] * bool(self.num_trimmed)
        parts += [f"{self.num_skipped} rows {roles.skip[2]} left out"] if roles.skip and self.num_skipped else []
        return f"{self.num_rows} rows in {self.where} ({self.table.form}): {', '.join(parts)}; below {self.finder.root}"


def _whole(value: float) -> int:
    return int(max(-1, min(value, 1e12)))


def probe_seconds(path: Path) -> float:
    """Return how long a video is by its header; 0 if it does not say."""
    try:
        with open_source(path) as (container, _):
            return (container.duration or 0) / av.time_base
    except (UnusableError, OSError):
        return 0.0
