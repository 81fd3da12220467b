"""Which column of a list is what: as the options say, as its format says, or else as names and contents show."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from common.errors import InputError
from common.logging import printable
from shard_tools.inputs import formats
from shard_tools.inputs.cells import (
    WHOLE,
    Row,
    Times,
    are_starts_and_ends,
    find_separator,
    get_cell,
    is_missing,
    is_pair,
    parse_list,
    parse_nested,
    parse_time,
    to_path,
    to_text,
)
from shard_tools.inputs.files import Finder
from shard_tools.inputs.folders import GROUPS
from shard_tools.inputs.formats import AS_GIVEN, BY_NAME, FORMATS, KINDS, WITHOUT_HEADER, Format, get_unit, to_key
from shard_tools.inputs.item import ParquetCell
from shard_tools.inputs.options import FOLDER, NONE, ListOptions
from shard_tools.inputs.records import holds_segments
from shard_tools.inputs.table_reader import NUM_SCORED, Table

ONLY = "write a list of the videos, or of segments in seconds, with their labels (path,start,end,label)"
GIVE_LABEL = "give --label-column (a name, or a number from 1), or --unlabeled"
GIVE_TIMES = "give --start-column and --end-column, or --start-column none"
PATTERNS = {"path": "", "youtubeid": r"[\w-]{11}", "thumos": r"video_(validation|test)_\d{7}"}  # of names of videos
LIST = re.compile(r"\[.*\]|\{.*\}", re.DOTALL)
MIN_FRACTIONS = 4  # in a row of a list without names: the corners of a box


@dataclass
class Columns:
    """Which column holds what; numbers of columns from 0."""

    path: int
    times: Times | None
    format: Format
    label: int | None = None
    separator: str | None = None  # of several labels a cell; "": lists; None: one label
    constant_label: str | None = None
    label_is_folder: bool = False
    subset: int | None = None
    sign: int | None = None  # which rows are left out

    @property
    def is_multiple(self) -> bool:
        return self.separator is not None


class ColumnDetector:
    """Finds the columns of a list; raises InputError with the first row where they are not clear."""

    def __init__(self, table: Table, sample: list[Row], options: ListOptions, finder: Finder) -> None:
        self.table, self.sample, self.options, self.finder = table, sample, options, finder
        width = len(table.columns) if table.columns else max(map(len, sample))
        if not width:
            raise InputError(f"{table.where} has no columns")
        self.names = [*map(str, table.columns)] if table.columns else [f"column {n}" for n in range(1, width + 1)]
        self.roles = [to_key(name) for name in table.columns] if table.columns else [""] * width
        self.format = AS_GIVEN
        if table.columns:
            self.format = next((entry for entry in FORMATS if entry.matches(self.roles)), BY_NAME)
            roles = dict(self.format.list_columns())
            self.roles = [roles.get(role, role) for role in self.roles]

    def error(self, what: str, fix: str) -> InputError:
        columns = ", ".join(map(printable, self.names[:30]))
        example = f" (the first row: {printable(', '.join(map(to_text, self.sample[0])))})"
        return InputError(f"{self.table.where}: {what}; its columns are {columns}{example}: {fix}")

    def list_names(self, columns: Iterable[int]) -> str:
        return ", ".join(self.names[n] for n in columns)

    def cells(self, column: int) -> list[Any]:
        return [row[column] for row in self.sample if column < len(row) and not is_missing(row[column])]

    def texts(self, column: int) -> list[str]:
        return [to_text(cell) for cell in self.cells(column)]

    def is_whole(self, column: int) -> bool:
        return bool(self.cells(column)) and all(map(WHOLE.fullmatch, self.texts(column)))

    def is_number(self, column: int) -> bool:
        return bool(self.cells(column)) and all(parse_time(cell) is not None for cell in self.cells(column))

    def detect(self) -> Columns:
        """Take the columns that options name, then those that are called by the vocabulary, or by the format."""
        if self.format.error:
            raise self.error(self.format.error, ONLY)
        columns = Columns(self._find_path(), self._resolve_times(), self.format)
        columns.label_is_folder = self.options.label == FOLDER and FOLDER not in self.names
        label = None if columns.label_is_folder else self.resolve("label")
        free = [n for n in range(len(self.names)) if n not in (columns.path, label, *(columns.times or ())[:2])]
        if not self.table.columns:
            columns.format = self.format = self._find_layout(columns.path, free)
        if not (self.options.start or self.options.end):
            columns.times = self._find_times(columns.path, free) or self._find_pairs(free)
        columns.subset = next((n for n in free if self.roles[n] in formats.SUBSETS), None)
        columns.sign = self.roles.index("sign") if self.format.left_out else None
        free = [n for n in free if n not in (columns.subset, columns.sign, *(columns.times or ())[:2])]
        match = re.fullmatch(self.format.list_name, self.table.where)
        columns.constant_label = match[1] if match and match.re.groups else None
        if label is None and not (columns.label_is_folder or self.options.unlabeled):
            label = self._find_label(free)
        if label is not None:
            columns.label, columns.separator = label, self._find_separator(label, columns.path)
        if self.options.start is None:
            self._require_no_segments([n for n in free if n != label], columns.times)
        return columns

    def resolve(self, role: str) -> int | None:
        """Return the column that an option names, by its name or its number from 1; None if it is not given."""
        given = getattr(self.options, role)
        if given is None:
            return None
        for name, names in ((given, self.names), (to_key(given), self.roles)):
            if name and name in names:
                return names.index(name)
        if given.isdecimal() and 1 <= int(given) <= len(self.names):
            return int(given) - 1
        raise self.error(f"there is no column {given}", f"give --{role}-column one of them, or a number from 1")

    def _resolve_times(self) -> Times | None:
        if NONE in (self.options.start, self.options.end):
            return None
        start, end = self.resolve("start"), self.resolve("end")
        if (start is None) != (end is None):
            raise self.error("a segment has a start and an end", "give both --start-column and --end-column")
        if start is None or end is None:
            return None
        return Times(start, end, *get_unit(self.roles[start]), is_length=self.roles[end] in formats.LENGTHS)

    def _find_path(self) -> int:
        """Find the column of paths: of those that may be by their names, the one whose cells are files."""
        given = self.resolve("path")
        if given is not None or not self.table.columns:
            return self.table.score.column if given is None else given
        videos = [n for n, cell in enumerate(self.sample[0]) if isinstance(cell, ParquetCell)]
        if len(videos) == 1:
            return videos[0]
        named = [self.roles.index(key) for key in formats.PATHS if key in self.roles]
        if not named and not self.table.score.num_found:
            looked = "looked for path, video, file_name, video_id, id, …"
            raise self.error(f"no column names videos ({looked})", "give --path-column, --root or --suffix")
        return max(named, key=self._count_files) if named else self.table.score.column

    def _count_files(self, column: int) -> int:
        cells = self.cells(column)
        return sum(self.finder.has(to_path(cell)) for cell in cells[:: max(1, len(cells) // NUM_SCORED)])

    def _find_times(self, path: int, free: list[int]) -> Times | None:
        """Find a start with its end, or length, or a column of both; in seconds rather than in frames."""
        starts, ends = (self._choose_times(names, path, free) for names in (formats.STARTS, formats.ENDS))
        if both := sorted(starts.keys() & ends.keys()):
            return Times(starts[both[0]], ends[both[0]], *both[0])
        for unit, start in starts.items():
            length = next((n for n in free if self.roles[n] in formats.LENGTHS), None)
            if ends or (length is None and self.format.seconds == math.inf):
                raise self.error(f"{self.names[start]} has no end", GIVE_TIMES)
            folders = self._list_frame_folders(path) if self.format.is_numbered else []
            first = int(bool(folders) and all(parse_time(get_cell(row, start)) for row, _ in folders))
            return Times(start, length, *unit, is_length=True, length=self.format.seconds, first=first)
        if ends:
            raise self.error("there is an end without a start", GIVE_TIMES)
        return None

    def _choose_times(self, names: str, path: int, free: list[int]) -> dict[tuple[float, bool], int]:
        """Return the column of each unit. Of video_start and clip_start, times of video_id are the former."""
        found: dict[tuple[float, bool], list[int]] = {}
        for n in free:
            if re.fullmatch(names, self.roles[n]):
                found.setdefault(get_unit(self.roles[n]), []).append(n)
        for unit, columns in found.items():
            of_path = [n for n in columns if self.roles[n][:4] == self.roles[path][:4]]
            found[unit] = columns = of_path or columns
            if len(columns) > 1:
                raise self.error(f"{self.list_names(columns)} may each be the start or the end", GIVE_TIMES)
        return {unit: columns[0] for unit, columns in found.items()}

    def _find_pairs(self, free: list[int]) -> Times | None:
        pairs = [n for n in free if self.roles[n] in formats.PAIRS and self.cells(n)]
        return next((Times(n, n) for n in pairs if all(map(is_pair, self.cells(n)))), None)

    def _require_no_segments(self, free: list[int], times: Times | None) -> None:
        """Raise InputError where a video would be stored as a whole, and a cell of its row has its segments."""
        for n in free:
            name = "" if times else self.roles[n]
            if any(holds_segments(name, cell) for cell in self.cells(n)):
                what = f"{self.names[n]} holds segments in a form that is not known"
                fix = "write a row for each, with its start and end, or give --start-column none to take whole videos"
                raise self.error(what, fix)

    def _find_label(self, free: list[int]) -> int | None:
        named = [n for n in free if self.roles[n] in formats.LABELS and self.cells(n)]
        named = [n for n in named if not self.roles[n].endswith(formats.NUMBERS)] or named
        if len(named) > 1:
            raise self.error(f"{self.list_names(named)} may each be the label", GIVE_LABEL)
        if not named and self.format is BY_NAME and (unknown := [n for n in free if self._may_be_label(n)]):
            looked = "looked for label, class, class_name, category, action, target, verb, …"
            what = f"no column is known as the label ({looked}), and {self.list_names(unknown)} may be"
            raise self.error(what, GIVE_LABEL)
        return named[0] if named else None

    def _may_be_label(self, column: int) -> bool:
        texts, role = self.texts(column), self.roles[column]
        if not texts or formats.NO_LABEL.search(role) or role in (*formats.PATHS, ""):
            return False
        is_scalar = all(isinstance(cell, (str, int)) and not isinstance(cell, bool) for cell in self.cells(column))
        repeats = len(set(texts)) < len(texts) or len(texts) < 10
        return is_scalar and repeats and (self.is_whole(column) or not self.is_number(column))

    def _find_separator(self, column: int, path: int) -> str | None:
        """Return what stands between the labels of a cell: "" if they are lists, None if there is one label."""
        name, cells, texts = self.names[column], self.cells(column), self.texts(column)
        if any(isinstance(parse_nested(cell), dict) for cell in cells):
            raise self.error(f"{name} holds objects, not labels", GIVE_LABEL)
        if self.options.label is None and self.is_number(column) and not self.is_whole(column):
            raise self.error(f"{name} holds fractions, not classes", GIVE_LABEL)
        lists = [parse_list(cell) for cell in cells]
        if any(found is None and LIST.fullmatch(text) for found, text in zip(lists, texts, strict=True)):
            raise self.error(f"{name} holds lists that cannot be read", "write them as [0, 2]")
        if found := [labels for labels in lists if labels is not None]:
            are_flags = all(len(labels) == len(found[0]) and all(flag in (0, 1) for flag in labels) for labels in found)
            if are_flags and any(labels.count(labels[0]) > 1 for labels in found if labels):
                raise self.error(f"{name} holds a 0 or a 1 per class", "write the numbers of the classes: [0, 2]")
            return ""
        separator = find_separator(texts, self.roles[column] in formats.MULTIPLE)
        if separator == " " and not self.table.columns:  # mmaction2's
            if self._list_frame_folders(path):
                raise self.error("its folders have several labels behind the number of frames", "give CSV or JSON")
            if self.options.label is None and all(map(are_starts_and_ends, texts)):
                raise self.error(f"{name} may be starts and ends of segments", f"write a row for each, or {GIVE_LABEL}")
        return separator

    def _find_layout(self, path: int, free: list[int]) -> Format:
        """Find the format of a list without a header by what its columns hold, which then are called by their roles."""
        free = [n for n in free if self.cells(n)]
        subset = next((n for n in free if {text.lower() for text in self.texts(n)} <= GROUPS.keys()), None)
        left = sorted({path, *free} - {subset})
        for entry in WITHOUT_HEADER:
            kinds, roles = zip(*entry.list_columns(), strict=True)
            is_named = re.fullmatch(entry.list_name, self.table.where)
            pairs = zip(kinds, left, strict=False)
            if len(kinds) == len(left) and is_named and all(self.matches_kind(kind, n, path) for kind, n in pairs):
                for n, role in [*zip(left, roles, strict=True), *[(n, "split") for n in free if n == subset]]:
                    self.roles[n] = role
                return entry
        if not (self.options.unlabeled or self.options.label):
            self._explain_unclear([n for n in left if n != path])
        return AS_GIVEN

    def matches_kind(self, kind: str, column: int, path: int) -> bool:
        """Whether a column of a list without a header may be what a format says of it."""
        if kind in PATTERNS:
            pattern = PATTERNS[kind]
            return column == path and all(re.fullmatch(pattern, text) for text in self.texts(column) if pattern)
        if kind == "time":
            return self.is_number(column)
        if kind in ("label", "name") or not self.is_whole(column):
            return kind == "label" or (kind == "name" and not self.is_number(column))
        if kind in KINDS:
            return KINDS[kind]([int(float(text)) for text in self.texts(column)])
        rows = [(get_cell(row, column - 1), get_cell(row, column), n) for row, n in self._list_frame_folders(path)]
        found = [(parse_time(start) or 0, parse_time(number) or 0, n) for start, number, n in rows]
        if kind == "num_frames":
            return bool(found) and all(abs(number - num_frames) <= 1 for _, number, num_frames in found)
        return bool(found) and all(start + number <= num_frames + 1 for start, number, num_frames in found)

    def _list_frame_folders(self, path: int) -> list[tuple[Row, int]]:
        """Return the rows of folders of frames, with the number of these."""
        rows = [(row, self.finder.count_frames(to_path(row[path]))) for row in self.sample if len(row) > path]
        return [(row, count) for row, count in rows if count]

    def _explain_unclear(self, columns: list[int]) -> NoReturn:
        numbers = [n for n in columns if self.is_number(n)]
        if len(columns) == len(numbers) and sum(not self.is_whole(n) for n in numbers) >= MIN_FRACTIONS:
            raise self.error("it names boxes of persons at moments, as AVA's lists do", ONLY)
        for first, second in pairwise(numbers):
            rows = [row for row in self.sample if len(row) > second]
            times = [(parse_time(row[first]) or 0, parse_time(row[second]) or 0) for row in rows]
            if second == first + 1 and all(start < end for start, end in times):
                fix = f"give --start-column {first + 1} --end-column {second + 1}, or --label-column"
                raise self.error(f"columns {first + 1} and {second + 1} may be the start and the end of segments", fix)
        what = f"it has no header, and which of {self.list_names(columns)} is the label is not clear"
        raise self.error(what, GIVE_LABEL)
