"""Lists of videos as items: which column is what is said before any work begins, and every row is accounted for."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import InputError
from common.logging import printable
from pipeline.reading.storage import is_remote
from shard_tools.inputs.classes import is_id
from shard_tools.inputs.columns import (
    BRACKETS,
    Choices,
    Judgement,
    RoleChooser,
    dump_fields,
    judge_rows,
    parse_pair,
    read_label,
    read_labels,
    read_segment,
    to_path,
)
from shard_tools.inputs.files import File, Finder, relative_to_root, require_folder
from shard_tools.inputs.folders import GROUPS, count_frames, make_item
from shard_tools.inputs.item import Item, Segment
from shard_tools.inputs.sniff import Row, Table, read_table, to_text

MIN_CAPTIONS = 20  # rows: with fewer, labels that are all different are believed
CAPTION_WORDS = 3
YOUTUBE = re.compile(r"youtu(?:be\.com/watch\?v=|\.be/)([\w-]{11})")
MAX_KINDS = 100_000  # different labels, above which at least half of the rows must repeat one


class ListReader:
    """Reads one list; `notes` say what was found in it, and are complete once all items were taken."""

    def __init__(self, path: Path, where: str, choices: Choices, folder: Path) -> None:
        self.where, self.choices = where, choices
        if choices.root:
            require_folder(Path(choices.root))
        roots = [Path(choices.root)] if choices.root else [folder, *dict.fromkeys([folder.parent, Path()])]
        self.finder, self.table = self._find_root(path, where, roots)
        self.sample = self.table.sample()
        if not self.sample:
            raise InputError(f"{where} has no rows but its header")
        self.roles = RoleChooser(self.table, self.sample, self._is_file, choices, self._count_frames).choose()
        self.names = self.table.columns or []
        self.subset = choices.subset
        if choices.is_split and self.subset not in {self._to_group(row) for row in self.sample}:
            self.subset = None  # it is only what the split is called
        self.labels: Counter[str] = Counter()
        self.parsed: dict[str, tuple[str, ...] | None] = {}  # by cell
        self.groups: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.num_rows = self.num_trimmed = 0
        self.templates: list[Callable[[str, float, float], str]] = [*TEMPLATES]

    def _find_root(self, path: Path, where: str, roots: list[Path]) -> tuple[Finder, Table]:
        """Return a finder below the first root where most of the sampled rows are files; index it if need be."""
        best: tuple[int, Finder, Table] | None = None
        for root in roots:
            finder = Finder(root)
            table, judgement = self._sniff(path, where, finder)
            if best is None or judgement.num_found > best[0]:
                best = judgement.num_found, finder, table
            if judgement.num_found >= 0.9 * judgement.num_rows:
                return finder, table
        assert best is not None
        num_found, finder, table = best
        finder.index()
        indexed, judgement = self._sniff(path, where, finder)
        return finder, indexed if judgement.num_found > num_found else table

    def _sniff(self, path: Path, where: str, finder: Finder) -> tuple[Table, Judgement]:
        best: list[Judgement] = []
        known: dict[str, bool] = {}

        def is_file(name: str) -> bool:
            if name not in known:
                known[name] = bool(name) and finder.find(name + self.choices.suffix) is not None
            return known[name]

        def judge(rows: list[list[str]]) -> tuple[tuple[int, ...], bool]:
            judgement = judge_rows(rows, is_file)
            best.append(judgement)
            return (judgement.num_found, judgement.num_known, judgement.num_looks), judgement.has_header

        table = read_table(path, where, judge)
        if not best and (sample := table.sample()):
            width = len(sample[0])
            paths = [[to_path(cell) if isinstance(cell, (str, int)) else "" for cell in row] for row in sample]
            best.append(judge_rows([[""] * width, *paths], is_file))
        return table, max(best, default=Judgement(0, 0, 0, 1, False, 0))

    def _is_file(self, name: str) -> bool:
        return bool(name) and self.finder.find(name + self.choices.suffix) is not None

    def _count_frames(self, name: str) -> int:
        found = self.finder.find(name)
        return count_frames(self.finder.root / found.path) if found and found.is_folder else 0

    def read(self) -> Iterator[Item]:
        """Yield an item a row. Raise InputError where rows together show that the columns are not what they seem."""
        roles, width = self.roles, len(self.names)
        used = {roles.path, roles.label, *(column for times in roles.times for column in times[:2])}
        kept = [n for n in range(width) if n not in used and self.names[n]]
        for number, row in enumerate(self.table.read_rows(), 1):
            self.num_rows = number
            if width and len(row) > width:
                problem = f"its row has {len(row)} cells under {width} columns: quote the one that holds a separator"
                yield Item(self._name_row(number, row), "", problem=problem)
                continue
            if roles.skip and len(row) > roles.skip[0] and read_label(row[roles.skip[0]]) == roles.skip[1]:
                self.skipped[roles.skip[2]] += 1
                continue
            if roles.subset is not None:
                group = self._to_group(row)
                self.groups[group] += 1
                if self.subset not in (None, "all", group):
                    continue
            yield self._make_item(number, row, kept)
        self._check_groups()
        self._check_labels()

    def _to_group(self, row: Row) -> str:
        """Return the subset of a row: train, val, test, or what it says."""
        column = self.roles.subset
        text = (read_label(row[column]) if column is not None and column < len(row) else None) or "no subset"
        return self.roles.subset_codes.get(text) or GROUPS.get(text.lower(), text)

    def _name_row(self, number: int, row: Row) -> str:
        return f"{self.where}, row {number}: {','.join(map(to_text, row))[:100]}"

    def _make_item(self, number: int, row: Row, kept: list[int]) -> Item:
        roles = self.roles
        name = to_path(row[roles.path]) if len(row) > roles.path else ""
        if not name:
            return Item(self._name_row(number, row), "", problem="this row names no video")
        name += self.choices.suffix
        labels = self._read_labels(row)
        segment: Segment | str | None = None
        times = next(iter(roles.times), None)
        if times is not None:
            row = [*row, *[None] * (max(column or 0 for column in times[:2]) + 1 - len(row))]
            segment = read_segment(row, times)
        elif roles.pair is not None and len(row) > roles.pair and (pair := parse_pair(row[roles.pair])):
            segment = Segment(*pair)
        fields = dump_fields(self.names, row, kept) if kept else ""
        found = None
        if isinstance(segment, Segment):
            found = self._find_trimmed(name, row, segment)
            segment = None if found else segment
        if found is None and is_remote(name):
            if match := YOUTUBE.search(name):  # a page, whose video was downloaded under its id
                name = match[1] + self.choices.suffix
            else:
                is_half_a_pair = re.search("[\ud800-\udc7f\udd00-\udfff]", name)  # which JSON can name
                problem = "no file can have its name" if is_half_a_pair else None
                return _finish(Item(name, name, labels, problem=problem, fields=fields), segment)
        found = found or self.finder.find(name)
        if found is None:
            item = make_item(relative_to_root(name, self.finder.root), self.finder.root / name, None)
            problem = self.finder.explain(name) or item.problem or "it is a folder, not a video file"
            return Item(item.source, item.location, labels, problem=problem, fields=fields)
        source = relative_to_root(found.path, self.finder.root)
        if found.is_folder and len(roles.times) > 1 and isinstance(segment, Segment):
            other = read_segment(row, next((times for times in roles.times if times.in_frames), roles.times[0]))
            segment = other
        if roles.label_is_folder:
            labels = self._count((source.split("/")[-2],)) if "/" in source else None
        location = os.path.join(self.finder.absolute, found.path)
        problem = None if found.is_folder or os.access(location, os.R_OK) else "no permission to read it"
        return _finish(Item(source, location, labels, found.size, problem, fields=fields), segment)

    def _read_labels(self, row: Row) -> tuple[str, ...] | None:
        roles = self.roles
        if roles.label_of_all is not None:
            return self._count((roles.label_of_all,))
        if roles.label is None or roles.label >= len(row) or self.choices.unlabeled:
            return None
        cell = row[roles.label]
        if isinstance(cell, str) and cell in self.parsed:  # 10 million rows have some hundred labels
            return self._count(self.parsed[cell])
        labels = read_labels(cell, roles.is_multiple)
        if labels and self.names and self.names[roles.label] == "template":  # whose label map has no brackets
            labels = tuple(label.translate(BRACKETS) for label in labels)
        if isinstance(cell, str) and len(self.parsed) < MAX_KINDS:
            self.parsed[cell] = labels
        return self._count(labels)

    def _count(self, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for label in labels or ():
            self.labels[label] += 1
        if len(self.labels) > MAX_KINDS and 2 * len(self.labels) > self.num_rows:
            self._check_labels()
        return labels

    def _find_trimmed(self, name: str, row: Row, segment: Segment) -> File | None:
        """Find a file that is the segment already, as downloaders name it: Kinetics' <id>_000010_000020.mp4, …"""
        if "/" not in name and not is_remote(name):
            folders = [""]
            if self.roles.label is not None and isinstance(row[self.roles.label], str):
                folders += [f"{row[self.roles.label]}/", f"{row[self.roles.label].replace(' ', '_')}/"]
            for place, template in enumerate(self.templates):
                for folder in folders:
                    if found := self.finder.find(folder + template(name, segment.start, segment.end)):
                        self.templates.insert(0, self.templates.pop(place))
                        self.num_trimmed += 1
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
        total = self.labels.total()
        if self.choices.label is not None or self.roles.is_multiple or not self.labels or self.roles.label is None:
            return
        column = self.names[self.roles.label] if self.names else f"column {self.roles.label + 1}"
        fix = "give --label-column, or --unlabeled (other columns are kept with each sample)"
        words = sum(len(label.split()) for label in self.labels) / len(self.labels)
        if total >= MIN_CAPTIONS and 2 * len(self.labels) > total and words >= CAPTION_WORDS:
            example = printable(next(iter(self.labels)))
            raise InputError(
                f"{self.where}: {column} has {len(self.labels)} different values in {total} rows, such as {example!r},"
                f" which look like captions, not classes: {fix}"
            )
        numbers = [label for label in self.labels if is_id(label)]
        names = [label for label in self.labels if not is_id(label)]
        if numbers and names and not self.choices.has_label_map:
            counts = sum(self.labels[label] for label in numbers), sum(self.labels[label] for label in names)
            raise InputError(
                f"{self.where}: {column} is a number in {counts[0]} rows ({printable(numbers[0])}) and a name in"
                f" {counts[1]} ({printable(names[0])}): write all labels alike, or give --label-map or --label-column"
            )

    def describe(self) -> str:
        """Say in a sentence how the list was read."""
        roles = self.roles
        names = self.names or [f"column {n}" for n in range(1, max(map(len, self.sample)) + 1)]
        parts = [f"path = {printable(names[roles.path])}"]
        if roles.label_of_all is not None:
            parts.append(f"label = {printable(roles.label_of_all)}, as the list is called")
        elif roles.label_is_folder:
            parts.append("label = the name of the folder")
        elif roles.label is not None and not self.choices.unlabeled:
            parts.append(f"{'labels' if roles.is_multiple else 'label'} = {printable(names[roles.label])}")
        else:
            parts.append("no label")
        for times in roles.times[:1]:
            unit = "frames" if times.in_frames else "seconds"
            end = f"{times.length:g} s" if times.end is None else printable(names[times.end])
            parts.append(f"segments = {printable(names[times.start])} to {end} ({unit})")
        if roles.pair is not None:
            parts.append(f"segments = {printable(names[roles.pair])}")
        if self.groups:
            counts = ", ".join(f"{printable(group)} {count}" for group, count in sorted(self.groups.items()))
            parts.append(f"subsets: {counts}; taken: {self.subset or 'all'}")
        parts += [f"not used: {', '.join(names[n] for n in roles.unused)}"] * bool(roles.unused)
        parts += [f"{self.num_trimmed} files are segments already"] * bool(self.num_trimmed)
        parts += [f"{count} rows {kind} left out" for kind, count in self.skipped.items()]
        return f"{self.num_rows} rows in {self.where} ({self.table.form}): {', '.join(parts)}; below {self.finder.root}"


TEMPLATES: tuple[Callable[[str, float, float], str], ...] = (
    lambda name, start, end: f"{name}_{_whole(start):06d}_{_whole(end):06d}",
    lambda name, start, end: f"{name}_{_whole(start):06d}",
    lambda name, start, end: f"{name}_{start:g}_{end:g}",
    lambda name, start, end: f"{name}_{_whole(start * 1000)}_{_whole(end * 1000)}",
    lambda name, start, end: f"{name}_{start:g}",
    lambda name, start, end: f"v_{name}_{_whole(start):06d}_{_whole(end):06d}",
)


def _whole(value: float) -> int:
    return int(max(-1, min(value, 1e12)))


def _finish(item: Item, segment: Segment | str | None) -> Item:
    if segment is None:
        return item
    problem = item.problem or (segment if isinstance(segment, str) else None)
    part = segment if isinstance(segment, Segment) else None
    return Item(item.source, item.location, item.labels, item.size, problem, part, item.fields)
