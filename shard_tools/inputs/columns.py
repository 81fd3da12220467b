"""Which column of a list is what: as the options say, as its format says, or else as names and contents show."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from common.errors import InputError
from common.logging import printable
from shard_tools.inputs import formats
from shard_tools.inputs.cells import (
    NUMBERS,
    TIMED,
    WHOLE,
    Row,
    Times,
    is_missing,
    is_pair,
    parse_list,
    parse_time,
    to_path,
    to_text,
)
from shard_tools.inputs.files import Finder
from shard_tools.inputs.folders import GROUPS
from shard_tools.inputs.formats import BY_NAME, FORMATS, LAYOUTS, Layout, get_unit, to_key
from shard_tools.inputs.item import ParquetCell
from shard_tools.inputs.table_reader import NUM_SCORED, Table

FOLDER = "folder"  # --label-column folder: the name of the folder that the file lies in
NONE = "none"  # --start-column none: numbers that look like times are none
GIVE_LABEL = "give --label-column (a name, or a number from 1), or --unlabeled"
GIVE_TIMES = "give --start-column and --end-column, or --start-column none"
YOUTUBE_ID = re.compile(r"[\w-]{11}")
MIN_FRACTIONS = 4  # in a row of a list without names: the corners of a box


@dataclass(frozen=True)
class ListOptions:
    """What the user says about a list."""

    root: str | None = None
    suffix: str = ""
    path: str | None = None
    label: str | None = None
    start: str | None = None
    end: str | None = None
    subset: str | None = None
    is_split: bool = False  # the subset is only how the split is called: an input without subsets is taken whole
    unlabeled: bool = False
    has_label_map: bool = False


@dataclass
class Columns:
    """Which column holds what; numbers of columns from 0."""

    path: int
    times: Times | None = None
    label: int | None = None
    is_multiple: bool = False
    removed: str = ""  # characters that are removed from labels
    constant_label: str | None = None
    label_is_folder: bool = False
    subset: int | None = None
    subset_names: dict[str, str] = field(default_factory=dict)
    left_out: tuple[int, str, str] | None = None  # rows that are no samples: column, value, and what they are
    unused: list[int] = field(default_factory=list)
    format: str = "paths"


class ColumnDetector:
    """Finds the columns of a list; raises InputError with the first row where they are not clear."""

    def __init__(self, table: Table, sample: list[Row], options: ListOptions, finder: Finder) -> None:
        self.table, self.sample, self.options, self.finder = table, sample, options, finder
        width = len(table.columns) if table.columns else max(map(len, sample))
        if not width:
            raise InputError(f"{table.where} has no columns")
        self.names = [*map(str, table.columns)] if table.columns else [f"column {n}" for n in range(1, width + 1)]
        self.keys = [to_key(name) for name in table.columns] if table.columns else [""] * width
        self.format = next((entry for entry in FORMATS if entry.matches(self.keys)), BY_NAME)

    def error(self, what: str, fix: str) -> InputError:
        columns = ", ".join(map(printable, self.names[:30]))
        example = f" (the first row: {printable(', '.join(map(to_text, self.sample[0])))})"
        return InputError(f"{self.table.where}: {what}; its columns are {columns}{example}: {fix}")

    def list_names(self, columns: Sequence[int], separator: str = ", ") -> str:
        return separator.join(self.names[n] for n in columns)

    def cells(self, column: int) -> list[Any]:
        return [row[column] for row in self.sample if column < len(row) and not is_missing(row[column])]

    def texts(self, column: int) -> list[str]:
        return [to_text(cell) for cell in self.cells(column)]

    def is_whole(self, column: int) -> bool:
        return bool(self.cells(column)) and all(map(WHOLE.fullmatch, self.texts(column)))

    def is_number(self, column: int) -> bool:
        return bool(self.cells(column)) and all(parse_time(cell) is not None for cell in self.cells(column))

    def detect(self) -> Columns:
        columns = Columns(self._find_path(), self._resolve_times())
        free = [n for n in range(len(self.names)) if n != columns.path and n not in (columns.times or ())[:2]]
        if self.table.columns:
            self._use_names(columns, free)
        else:
            self._use_contents(columns, [n for n in free if self.cells(n)])
        return columns

    def resolve(self, role: str) -> int | None:
        """Return the column that an option names, by its name or its number from 1; None if it is not given."""
        given = getattr(self.options, role)
        if given is None:
            return None
        for name, names in ((given, self.names), (to_key(given), self.keys)):
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
        return Times(start, end, *get_unit(self.keys[start]), is_length=self.keys[end] in formats.LENGTHS)

    def _find_path(self) -> int:
        """Find the column of paths: of those that may be by their names, the one whose cells are files."""
        given = self.resolve("path")
        if given is not None or not self.table.columns:
            return self.table.score.column if given is None else given
        if self.table.holds_videos:
            return next(n for n in range(len(self.names)) if isinstance(self.sample[0][n], ParquetCell))
        named = [self.keys.index(key) for key in self.format.path.split() if key in self.keys]
        if not named and not self.table.score.num_found:
            looked = "looked for path, video, file_name, video_id, id, …"
            raise self.error(f"no column names videos ({looked})", "give --path-column, --root or --suffix")
        return max(named, key=self._count_files) if named else self.table.score.column

    def _count_files(self, column: int) -> int:
        cells = self.cells(column)
        return sum(self.finder.has(to_path(cell)) for cell in cells[:: max(1, len(cells) // NUM_SCORED)])

    def _use_names(self, columns: Columns, free: list[int]) -> None:
        """Fill in what the format, or the vocabulary, says of columns with names."""
        entry = self.format
        if entry.error:
            raise self.error(entry.error, "only labels of videos and segments are read, not detections")
        columns.format, columns.removed = entry.name, entry.removed
        if not (self.options.start or self.options.end):
            columns.times = self._find_times(free)
        columns.subset = next((n for n in free if self.keys[n] in (entry.subset or BY_NAME.subset).split()), None)
        free = [n for n in free if n not in (columns.subset, *(columns.times or ())[:2])]
        if entry.left_out:
            columns.left_out = self.keys.index(entry.left_out[0]), *entry.left_out[1:]
        if self._use_label_option(columns):
            return
        named = [n for n in free if self.keys[n] in entry.label.split() and self.cells(n)]
        named = [n for n in named if not self.keys[n].endswith(formats.NUMBERS)] or named
        if len(named) > 1:
            raise self.error(f"{self.list_names(named)} may each be the label", GIVE_LABEL)
        if named:
            self._set_label(columns, named[0])
        elif entry is BY_NAME and (unknown := [n for n in free if self._may_be_label(n)]):
            looked = "looked for label, class, class_name, category, action, target, verb, …"
            what = f"no column is known as the label ({looked}), and {self.list_names(unknown)} may be"
            raise self.error(what, GIVE_LABEL)

    def _find_times(self, free: list[int]) -> Times | None:
        """Find a start with its end, or length, or a column of both; in seconds rather than in frames."""
        starts, ends = (
            {get_unit(self.keys[n]): n for n in reversed(free) if re.fullmatch(names, self.keys[n])}
            for names in (formats.STARTS, formats.ENDS)
        )
        if both := sorted(starts.keys() & ends.keys()):
            return Times(starts[both[0]], ends[both[0]], *both[0])
        for unit, start in starts.items():
            lengths = [n for n in free if self.keys[n] in formats.LENGTHS]
            if ends or not lengths:
                raise self.error(f"{self.names[start]} has no end", GIVE_TIMES)
            return Times(start, lengths[0], *unit, is_length=True)
        if ends:
            raise self.error("there is an end without a start", GIVE_TIMES)
        pairs = [n for n in free if self.keys[n] in formats.PAIRS and self.cells(n)]
        return next((Times(n, n) for n in pairs if all(map(is_pair, self.cells(n)))), None)

    def _use_label_option(self, columns: Columns) -> bool:
        columns.label_is_folder = self.options.label == FOLDER and FOLDER not in self.names
        if not columns.label_is_folder and (given := self.resolve("label")) is not None:
            self._set_label(columns, given)
        return self.options.unlabeled or self.options.label is not None

    def _set_label(self, columns: Columns, column: int) -> None:
        """Take a column of labels: of several a cell if there are lists, or separators and it is called labels."""
        cells, texts = self.cells(column), self.texts(column)
        if any(isinstance(cell, dict) for cell in cells):
            raise self.error(f"{self.names[column]} holds objects, not labels", GIVE_LABEL)
        if self.options.label is None and self.is_number(column) and not self.is_whole(column):
            raise self.error(f"{self.names[column]} holds fractions, not classes", GIVE_LABEL)
        has_numbers = all(map(NUMBERS.fullmatch, texts)) and any(" " in text for text in texts)  # mmaction2's
        if has_numbers and any(self.finder.count_frames(to_path(cell)) for cell in self.cells(columns.path)):
            raise self.error("its folders have several labels behind the number of frames", "give CSV or JSON")
        lists = [parse_list(cell) is not None for cell in cells]
        has_lists = any(lists) if self.keys[column] else all(lists) or has_numbers
        marked = any(TIMED.match(text) or re.search("[|;,]", text) for text in texts)
        columns.label, columns.is_multiple = column, has_lists or (self.keys[column] in formats.MULTIPLE and marked)

    def _may_be_label(self, column: int) -> bool:
        texts, key = self.texts(column), self.keys[column]
        if not texts or formats.NO_LABEL.search(key) or key in (*formats.PATHS.split(), ""):
            return False
        is_scalar = all(isinstance(cell, (str, int)) and not isinstance(cell, bool) for cell in self.cells(column))
        repeats = len(set(texts)) < len(texts) or len(texts) < 10
        return is_scalar and repeats and (self.is_whole(column) or not self.is_number(column))

    def _use_contents(self, columns: Columns, free: list[int]) -> None:
        """Fill in what columns without names hold: a known layout, or a label, when all else has been explained."""
        groups = [n for n in free if {text.lower() for text in self.texts(n)} <= GROUPS.keys()]
        columns.subset = groups[0] if groups else None
        free = [n for n in free if n not in groups]
        if self._use_label_option(columns):
            columns.unused = [n for n in free if n != columns.label]
            return
        texts, numbers = [n for n in free if not self.is_number(n)], [n for n in free if self.is_number(n)]
        whole = [n for n in numbers if self.is_whole(n)]
        if len(numbers) - len(whole) >= MIN_FRACTIONS and not texts:
            fix = "only labels of videos and segments are read"
            raise self.error("it names boxes of persons at moments, as AVA's lists do", fix)
        if layout := next((entry for entry in LAYOUTS if self.matches(entry, [columns.path, *free])), None):
            self._use_layout(columns, layout, [columns.path, *free])
            return
        for first, second in pairwise(numbers):
            if not self.options.start and second == first + 1 and self._is_later(second):
                fix = f"give --start-column {first + 1} --end-column {second + 1}, or --start-column none"
                raise self.error(f"columns {first + 1} and {second + 1} may be the start and the end of segments", fix)
        if len(free) > 1 or (free and not texts and not whole):
            what = f"it has no header, and which of {self.list_names(free)} is the label is not clear"
            raise self.error(what, GIVE_LABEL)
        if free:
            columns.format = "paths and labels"
            self._set_label(columns, free[0])

    def matches(self, layout: Layout, columns: list[int]) -> bool:
        kinds = layout.columns.split()
        if len(kinds) != len(columns) or not re.fullmatch(layout.list_name, self.table.where):
            return False
        pairs = zip(kinds, columns, strict=True)
        return columns == sorted(columns) and all(self.matches_kind(kind, n, columns[0]) for kind, n in pairs)

    def matches_kind(self, kind: str, column: int, path: int) -> bool:
        """Whether a column may be what a layout says of it."""
        if kind in ("path", "youtube_id"):
            return kind == "path" or all(map(YOUTUBE_ID.fullmatch, self.texts(column) or [""]))
        if kind == "name" or not self.is_whole(column):
            return kind == "name" and not self.is_number(column)
        if kind in ("num_frames", "frames_from_start"):
            frames = self._compare_frames(path, column)
            differences = [count - number for _, number, count in frames]
            ends = [start + number <= count + 1 for start, number, count in frames]
            return bool(frames) and (all(ends) if kind != "num_frames" else all(abs(n) <= 1 for n in differences))
        return kind not in formats.KINDS or formats.KINDS[kind]([int(float(text)) for text in self.texts(column)])

    def _compare_frames(self, path: int, column: int) -> list[tuple[float, float, int]]:
        """Return of folders of frames what a column and the one before it say, and how many frames there are."""
        rows = [row for row in self.sample if len(row) > column]
        cells = [(row[column - 1], row[column], self.finder.count_frames(to_path(row[path]))) for row in rows]
        return [(parse_time(one) or 0.0, parse_time(other) or 0.0, count) for one, other, count in cells if count]

    def _use_layout(self, columns: Columns, layout: Layout, held: Sequence[int]) -> None:
        kinds = layout.columns.split()
        found = dict(zip(kinds, held, strict=True))
        columns.format = layout.name
        columns.label = found.get("label", found.get("name"))
        columns.unused = [n for kind, n in zip(kinds, held, strict=True) if kind in ("num_frames", "number")]
        if "start" in found:
            # VideoMAEv2's starts are numbers of pictures, from 1, and 0 for whole videos; mmaction2's are offsets.
            starts = {start for start, *_ in self._compare_frames(columns.path, held[2])}
            is_numbered = "frames_from_start" in found and 0 not in starts
            columns.times = Times(found["start"], held[2], in_frames=True, is_length=True, first=int(is_numbered))
        elif "second" in found:
            columns.times = Times(found["second"], None, length=layout.seconds)
        if match := layout.subsets and re.fullmatch(layout.list_name, self.table.where):
            columns.subset, columns.subset_names = found["split_code"], dict(layout.subsets)
            columns.constant_label = match[1]

    def _is_later(self, column: int) -> bool:
        """Whether a column is always larger than the one before it, as ends of segments are."""
        rows = [row for row in self.sample if len(row) > column]
        pairs = [(parse_time(row[column - 1]), parse_time(row[column])) for row in rows]
        return all(one is not None and other is not None and one < other for one, other in pairs)
