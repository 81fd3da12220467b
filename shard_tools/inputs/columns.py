"""Which column of a list is what: as the options say, as its format says, or else as names and contents show."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.errors import InputError
from common.logging import printable
from shard_tools.inputs import cells, formats
from shard_tools.inputs.cells import Row, Times, get_cell, parse_time, to_path, to_text
from shard_tools.inputs.files import Finder
from shard_tools.inputs.folders import GROUPS
from shard_tools.inputs.formats import Format, get_unit, to_key
from shard_tools.inputs.options import FOLDER, NONE, ListOptions
from shard_tools.inputs.records import holds_segments
from shard_tools.inputs.table_reader import Table

GIVE_LABEL = "give --label-column (a name, or a number from 1), or --unlabeled"
GIVE_TIMES = "give --start-column and --end-column, or --start-column none"
PATTERNS = {"path": "", "youtubeid": r"[\w-]{11}", "thumos": r"video_(validation|test)_\d{7}"}  # of names of videos
LIST = re.compile(r"\[.*\]|\{.*\}", re.DOTALL)


@dataclass
class Columns:
    """Which column holds what; numbers of columns from 0."""

    names: list[str]
    path: int
    format: Format
    times: Times | None
    label: int | None = None
    separator: str | None = None  # of several labels a cell; "": lists; None: one label
    constant_label: str | None = None
    label_is_folder: bool = False
    subset: int | None = None
    sign: int | None = None  # which rows are left out

    @cached_property
    def fields(self) -> list[int]:
        """The columns that are kept as they are."""
        used = {self.path, self.label, *(self.times or ())[:2]}
        return [n for n, name in enumerate(self.names) if n not in used and name]


@dataclass(eq=False)
class Column:
    """What the sampled rows have in one column."""

    number: int
    name: str
    role: str  # its name by the vocabulary
    cells: list[Any]  # but those that are missing

    def __post_init__(self) -> None:
        self.cells = [cell for cell in self.cells if not cells.is_missing(cell)]

    @cached_property
    def texts(self) -> list[str]:
        return [to_text(cell) for cell in self.cells]

    @cached_property
    def is_whole(self) -> bool:
        return bool(self.cells) and all(map(cells.WHOLE.fullmatch, self.texts))

    @cached_property
    def is_number(self) -> bool:
        return bool(self.cells) and all(parse_time(cell) is not None for cell in self.cells)


class ColumnDetector:
    """Finds the columns of a list; raises InputError with the first row where they are not clear."""

    def __init__(self, table: Table, sample: list[Row], options: ListOptions, finder: Finder) -> None:
        self.table, self.sample, self.options, self.finder = table, sample, options, finder
        width = len(table.columns) if table.columns else max(map(len, sample))
        if not width:
            raise InputError(f"{table.where} has no columns")
        self.names = [*map(str, table.columns)] if table.columns else [f"column {n}" for n in range(1, width + 1)]
        keys = [to_key(name) if table.columns else "" for name in self.names]
        self.format = next((entry for entry in formats.FORMATS if entry.matches(keys)), formats.BY_NAME)
        roles = dict(self.format.list_columns())
        self.columns = [
            Column(n, name, roles.get(key, key), [get_cell(row, n) for row in sample])
            for n, (name, key) in enumerate(zip(self.names, keys, strict=True))
        ]

    def error(self, what: str, fix: str) -> InputError:
        columns = ", ".join(map(printable, self.names[:30]))
        example = f" (the first row: {printable(', '.join(map(to_text, self.sample[0])))})"
        return InputError(f"{self.table.where}: {what}; its columns are {columns}{example}: {fix}")

    def detect(self) -> Columns:
        """Take the columns that options name, then those that are called by the vocabulary, or by the format."""
        label_is_folder = self.options.label == FOLDER and FOLDER not in self.names
        path, label = self._find_path(), None if label_is_folder else self.resolve("label")
        times = self._resolve_times()
        used = {path.number, label.number if label else None, *(times or ())[:2]}
        free = [column for column in self.columns if column.number not in used]
        if not self.table.columns:
            self.format = self._find_layout(path, free)
        if self.format.error:
            raise self.error(self.format.error, self.format.fix)
        if not (self.options.start or self.options.end):
            times = self._find_times(path, free) or self._find_pairs(free)
        subset = next((column for column in free if column.role in formats.SUBSETS), None)
        sign = next((column for column in free if column.role == "sign"), None) if self.format.left_out else None
        free = [column for column in free if column not in (subset, sign) and column.number not in (times or ())[:2]]
        match = re.fullmatch(self.format.list_name, self.table.where)
        if label is None and not (label_is_folder or self.options.unlabeled):
            label = self._find_label(free)
        if self.options.start is None:
            self._require_no_segments([column for column in free if column != label], times)
        return Columns(
            self.names,
            path.number,
            self.format,
            times,
            label.number if label else None,
            self._find_separator(label, path) if label else None,
            constant_label=match[1] if match and match.re.groups else None,
            label_is_folder=label_is_folder,
            subset=subset.number if subset else None,
            sign=sign.number if sign else None,
        )

    def resolve(self, role: str) -> Column | None:
        """Return the column that an option names, by its name or its number from 1; None if it is not given."""
        given = getattr(self.options, role)
        if given is None:
            return None
        for name, names in ((given, self.names), (to_key(given), [column.role for column in self.columns])):
            if name and name in names:
                return self.columns[names.index(name)]
        if given.isdecimal() and 1 <= int(given) <= len(self.names):
            return self.columns[int(given) - 1]
        raise self.error(f"there is no column {given}", f"give --{role}-column one of them, or a number from 1")

    def _resolve_times(self) -> Times | None:
        if NONE in (self.options.start, self.options.end):
            return None
        start, end = self.resolve("start"), self.resolve("end")
        if start and end:
            return Times(start.number, end.number, *get_unit(start.role), is_length=end.role in formats.LENGTHS)
        if start or end:
            raise self.error("a segment has a start and an end", "give both --start-column and --end-column")
        return None

    def _find_path(self) -> Column:
        """Find the column of paths: the one whose cells are files, or that is called so."""
        if self.options.path or not self.table.columns or self.table.score.num_found:
            return self.resolve("path") or self.columns[self.table.score.column]
        by_role = {column.role: column for column in reversed(self.columns)}
        for role in formats.PATHS:
            if role in by_role:
                return by_role[role]
        looked = "looked for path, video, file_name, video_id, id, …"
        raise self.error(f"no column names videos ({looked})", "give --path-column, --root or --suffix")

    def _find_times(self, path: Column, free: list[Column]) -> Times | None:
        """Find a start with its end, or length, or a column of both; in seconds rather than in frames."""
        starts, ends = (self._choose_times(names, path, free) for names in (formats.STARTS, formats.ENDS))
        if both := sorted(starts.keys() & ends.keys()):
            return Times(starts[both[0]].number, ends[both[0]].number, *both[0])
        if not (starts or ends):
            return None
        length = next((column.number for column in free if column.role in formats.LENGTHS), None)
        if ends or (length is None and not self.format.seconds):
            found = [*starts.values(), *ends.values()][0]
            raise self.error(f"{found.name} has no {'end' if starts else 'start'}", GIVE_TIMES)
        (unit, start), *_ = starts.items()
        folders = self._list_frame_folders(path) if self.format.is_numbered else []
        first = int(bool(folders) and all(parse_time(row[start.number]) for row, _ in folders))
        seconds = self.format.seconds
        return Times(start.number, length, *unit, is_length=True, length=seconds, first=first)

    def _choose_times(self, names: str, path: Column, free: list[Column]) -> dict[tuple[float, bool], Column]:
        """Return the column of each unit. Of video_start and clip_start, times of video_id are the former."""
        found: dict[tuple[float, bool], list[Column]] = {}
        for column in free:
            if re.fullmatch(names, column.role):
                found.setdefault(get_unit(column.role), []).append(column)
        for unit, columns in found.items():
            found[unit] = columns = [it for it in columns if it.role[:4] == path.role[:4]] or columns
            if len(columns) > 1:
                raise self.error(f"{list_names(columns)} may each be the start or the end", GIVE_TIMES)
        return {unit: columns[0] for unit, columns in found.items()}

    def _find_pairs(self, free: list[Column]) -> Times | None:
        pairs = (column for column in free if column.role in formats.PAIRS and column.cells)
        return next((Times(it.number, it.number) for it in pairs if all(map(cells.is_pair, it.cells))), None)

    def _require_no_segments(self, free: list[Column], times: Times | None) -> None:
        """Raise InputError where a video would be stored as a whole, and a cell of its row has its segments."""
        for column in free:
            if any(holds_segments("" if times else column.role, cell) for cell in column.cells):
                what = f"{column.name} holds segments in a form that is not known"
                fix = "write a row for each, with its start and end, or give --start-column none to take whole videos"
                raise self.error(what, fix)

    def _find_label(self, free: list[Column]) -> Column | None:
        named = [column for column in free if column.role in formats.LABELS and column.cells]
        named = [column for column in named if not column.role.endswith(formats.NUMBERS)] or named
        if len(named) > 1:
            raise self.error(f"{list_names(named)} may each be the label", GIVE_LABEL)
        if not named and self.format is formats.BY_NAME and (unknown := [it for it in free if may_be_label(it)]):
            looked = "looked for label, class, class_name, category, action, target, verb, …"
            what = f"no column is known as the label ({looked}), and {list_names(unknown)} may be"
            raise self.error(what, GIVE_LABEL)
        return named[0] if named else None

    def _find_separator(self, label: Column, path: Column) -> str | None:
        """Return what stands between the labels of a cell: "" if they are lists, None if there is one label."""
        if any(isinstance(cells.parse_nested(cell), dict) for cell in label.cells):
            raise self.error(f"{label.name} holds objects, not labels", GIVE_LABEL)
        if self.options.label is None and label.is_number and not label.is_whole:
            raise self.error(f"{label.name} holds fractions, not classes", GIVE_LABEL)
        lists = [cells.parse_list(cell) for cell in label.cells]
        if any(found is None and LIST.fullmatch(text) for found, text in zip(lists, label.texts, strict=True)):
            raise self.error(f"{label.name} holds lists that cannot be read", "write them as [0, 2]")
        if found := [labels for labels in lists if labels is not None]:
            are_flags = all(len(labels) == len(found[0]) and all(flag in (0, 1) for flag in labels) for labels in found)
            if are_flags and any(labels.count(labels[0]) > 1 for labels in found if labels):
                raise self.error(f"{label.name} holds a 0 or a 1 per class", "write the numbers of the classes: [0, 2]")
            return ""
        separator = cells.find_separator(label.texts, label.role in formats.MULTIPLE)
        if separator == " " and not self.table.columns:  # mmaction2's
            if self._list_frame_folders(path):
                raise self.error("its folders have several labels behind the number of frames", "give CSV or JSON")
            if self.options.label is None and all(map(cells.are_starts_and_ends, label.texts)):
                what = f"{label.name} may be starts and ends of segments"
                raise self.error(what, f"write a row for each, or {GIVE_LABEL}")
        return separator

    def _find_layout(self, path: Column, free: list[Column]) -> Format:
        """Find the format of a list without a header by what its columns hold, which then are called by their roles."""
        free = [column for column in free if column.cells]
        subset = next((column for column in free if {text.lower() for text in column.texts} <= GROUPS.keys()), None)
        if subset:
            subset.role = "split"
        left = [column for column in self.columns if column is path or (column in free and column is not subset)]
        for entry in formats.WITHOUT_HEADER:
            kinds, roles = zip(*entry.list_columns(), strict=True)
            if len(kinds) != len(left) or not re.fullmatch(entry.list_name, self.table.where):
                continue
            is_asked = self.options.unlabeled or self.options.label
            if all(map(self._matches_kind, kinds, left, [path] * len(left))) and not (entry.error and is_asked):
                for column, role in zip(left, roles, strict=True):
                    column.role = role
                return entry
        if not (self.options.unlabeled or self.options.label):
            names = list_names(column for column in left if column is not path)
            raise self.error(f"it has no header, and which of {names} is the label is not clear", GIVE_LABEL)
        return formats.AS_GIVEN

    def _matches_kind(self, kind: str, column: Column, path: Column) -> bool:
        """Whether a column of a list without a header may be what a format says of it."""
        if kind in PATTERNS:
            pattern = re.compile(PATTERNS[kind] or ".*", re.DOTALL)
            return column is path and all(map(pattern.fullmatch, column.texts))
        if kind == "label":
            return True
        if kind in ("name", "time"):
            return column.is_number == (kind == "time")
        if kind == "fraction" or not column.is_whole:
            return kind == "fraction" and column.is_number and not column.is_whole
        if kind in formats.KINDS:
            return formats.KINDS[kind]([int(float(text)) for text in column.texts])
        rows = [(row, count) for row, count in self._list_frame_folders(path) if len(row) > column.number]
        numbers = [(parse_time(row[column.number - 1]) or 0, parse_time(row[column.number]) or 0, n) for row, n in rows]
        if kind == "num_frames":
            return bool(rows) and all(abs(number - count) <= 1 for _, number, count in numbers)
        return bool(rows) and all(start + number <= count + 1 for start, number, count in numbers)

    def _list_frame_folders(self, path: Column) -> list[tuple[Row, int]]:
        """Return the rows of folders of frames, with the number of these."""
        rows = (row for row in self.sample if len(row) > path.number)
        counts = ((row, self.finder.count_frames(to_path(row[path.number]))) for row in rows)
        return [(row, count) for row, count in counts if count]


def list_names(columns: Iterable[Column]) -> str:
    return ", ".join(column.name for column in columns)


def may_be_label(column: Column) -> bool:
    if not column.cells or formats.NO_LABEL.search(column.role) or column.role in (*formats.PATHS, ""):
        return False
    is_scalar = all(isinstance(cell, (str, int)) and not isinstance(cell, bool) for cell in column.cells)
    repeats = len({*column.texts}) < len(column.texts) or len(column.texts) < 10
    return is_scalar and repeats and (column.is_whole or not column.is_number)
