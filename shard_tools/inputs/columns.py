"""Which column of a list is what: as the options say, as its format says, or else as names and contents show."""

import math
import re
from collections.abc import Collection, Iterable
from functools import cached_property

from adamae.common.errors import InputError
from adamae.common.logging import printable
from adamae.shard_tools.inputs import cells, formats
from adamae.shard_tools.inputs.cells import Row, Times, get_cell, parse_time, to_path, to_text
from adamae.shard_tools.inputs.files import Finder
from adamae.shard_tools.inputs.folders import GROUPS
from adamae.shard_tools.inputs.formats import Format, get_unit, to_key
from adamae.shard_tools.inputs.item import FOLDER, NONE, ListOptions
from adamae.shard_tools.inputs.location import ParquetCell
from adamae.shard_tools.inputs.table_reader import Table

GIVE_LABEL = "give --label-column (a name, or a number from 1), or --unlabeled"
GIVE_TIMES = "give --start-column and --end-column, or --start-column none"
PATTERNS = {
    "path": ".*",
    "youtubeid": r"[\w-]{11}",
    "thumos": r"video_(validation|test)_\d{7}",
}  # of names of videos
LIST = re.compile(r"\[.*\]|\{.*\}", re.DOTALL)


class Column:
    """What the sampled rows have in one column, but cells that are missing."""

    def __init__(self, number: int, name: str, role: str, sample: list[Row]) -> None:
        self.number, self.name = number, name
        self.role = role  # its name by the vocabulary
        self.cells = [cell for row in sample if not cells.is_missing(cell := get_cell(row, number))]
        self.texts = [to_text(cell) for cell in self.cells]
        self.is_number = bool(self.cells) and all(
            parse_time(cell) is not None for cell in self.cells
        )

    @cached_property
    def whole(self) -> list[float]:
        """Its numbers, if all are whole."""
        return [*map(float, self.texts)] if all(map(cells.WHOLE.fullmatch, self.texts)) else []


class Columns:
    """The columns of a list, by their numbers from 0: those that options name, then those that are called by the
    vocabulary, or by the format. Raises InputError with the first row where they are not clear."""

    def __init__(self, table: Table, options: ListOptions, finder: Finder) -> None:
        self.table, self.options, self.finder = table, options, finder
        width = len(table.columns) if table.columns else max(map(len, table.sample))
        if not width:
            raise InputError(f"{table.where} ({table.form}) has no columns")
        self.names = (
            [*map(str, table.columns)]
            if table.columns
            else [f"column {n}" for n in range(1, width + 1)]
        )
        keys = [to_key(name) if table.columns else "" for name in self.names]
        self.format = next(
            (entry for entry in formats.FORMATS if entry.matches(keys)), formats.BY_NAME
        )
        roles = dict(self.format.list_columns())
        self.columns = [
            Column(n, name, roles.get(key, key), table.sample)
            for n, (name, key) in enumerate(zip(self.names, keys, strict=True))
        ]
        self.label_is_folder = options.label == FOLDER and FOLDER not in self.names
        self.path_column = self._find_path()
        self.path = self.path_column.number
        label = None if self.label_is_folder else self._resolve("label")
        self.times = self._resolve_times()
        self._used = {self.path, label and label.number, *(self.times or ())[:2]}
        if not table.columns:
            self.format = self._find_layout()
        if self.format.error:
            raise self.error(self.format.error, self.format.fix)
        if not (options.start or options.end):
            self.times = self._find_times()
            self._used.update((self.times or ())[:2])
        self.subset = self._take(formats.SUBSETS)
        self.sign = self._take(["sign"] if self.format.left_out else [])  # which rows are left out
        if label is None and not (self.label_is_folder or options.unlabeled):
            label = self._find_label()
        self.label = label.number if label else None
        used = {self.path, self.label, *(self.times or ())[:2]}
        self.fields = [
            n for n, name in enumerate(self.names) if name and n not in used
        ]  # kept as they are
        if options.start is None:
            self._require_no_segments()
        # Of several labels a cell; "": lists; None: one label.
        self.separator = self._find_separator(label) if label else None
        match = re.fullmatch(self.format.list_name, table.where)
        self.constant_label = match[1] if match and match.re.groups else None

    def error(self, what: str, fix: str) -> InputError:
        columns = ", ".join(map(printable, self.names[:30]))
        example = f" (the first row: {printable(', '.join(map(to_text, self.table.sample[0])))})"
        return InputError(
            f"{self.table.where} ({self.table.form}): {what}; its columns are {columns}{example}: {fix}"
        )

    @property
    def free(self) -> list[Column]:
        return [column for column in self.columns if column.number not in self._used]

    def _take(self, roles: Collection[str]) -> int | None:
        """Use up a column that is called so."""
        number = next((column.number for column in self.free if column.role in roles), None)
        self._used.add(number)
        return number

    def _resolve(self, role: str) -> Column | None:
        """Return the column that an option names, by its name or its number from 1; None if it is not given."""
        option = getattr(self.options, role)
        if option is None:
            return None
        for name in filter(None, (option, to_key(option))):
            for column in self.columns:
                if column.name == name:
                    return column
            for column in self.columns:
                if column.role == name:
                    return column
            for column in self.columns:
                if str(column.number + 1) == name:
                    return column
        raise self.error(
            f"there is no column {option}", f"give --{role}-column one of them, or a number from 1"
        )

    def _resolve_times(self) -> Times | None:
        if NONE in (self.options.start, self.options.end):
            return None
        start, end = self._resolve("start"), self._resolve("end")
        if start and end:
            return Times(
                start.number,
                end.number,
                *get_unit(start.role),
                is_length=end.role in formats.LENGTHS,
            )
        if start or end:
            raise self.error(
                "a segment has a start and an end", "give both --start-column and --end-column"
            )
        return None

    def _find_path(self) -> Column:
        """Find the column of paths: the one whose cells are files, or videos, or that is called so."""
        videos = [
            self.columns[n]
            for n, cell in enumerate(self.table.sample[0])
            if isinstance(cell, ParquetCell)
        ]
        if len(videos) > 1 and not self.options.path:
            raise self.error(f"{list_names(videos)} may each be the video", "give --path-column")
        if self.options.path or not self.table.columns or self.table.num_found:
            return self._resolve("path") or self.columns[self.table.column]
        if named := [
            column for role in formats.PATHS for column in self.columns if column.role == role
        ]:
            return named[0]
        what = "no column names videos (looked for path, video, file_name, video_id, id, …)"
        raise self.error(what, "give --path-column, --root or --suffix")

    def _find_times(self) -> Times | None:
        """Find a start with its end, or length, or a column of both; in seconds rather than in frames."""
        starts, ends = self._choose_times(formats.STARTS), self._choose_times(formats.ENDS)
        if both := sorted(starts.keys() & ends.keys()):
            return Times(starts[both[0]].number, ends[both[0]].number, *both[0])
        if not (starts or ends):
            pairs = (
                column for column in self.free if column.role in formats.PAIRS and column.cells
            )
            return next(
                (
                    Times(it.number, it.number)
                    for it in pairs
                    if all(map(cells.parse_pair, it.cells))
                ),
                None,
            )
        length = next(
            (column.number for column in self.free if column.role in formats.LENGTHS), None
        )
        if ends or (length is None and self.format.seconds == math.inf):
            found = [*starts.values(), *ends.values()][0]
            raise self.error(f"{found.name} has no {'end' if starts else 'start'}", GIVE_TIMES)
        (unit, start), *_ = starts.items()
        folders = self._list_frame_folders() if self.format.is_numbered else []
        first = int(bool(folders) and all(parse_time(row[start.number]) for row, _ in folders))
        return Times(
            start.number, length, *unit, is_length=True, length=self.format.seconds, first=first
        )

    def _choose_times(self, names: str) -> dict[tuple[float, bool], Column]:
        """Return the column of each unit. Of video_start and clip_start, times of video_id are the former."""
        found: dict[tuple[float, bool], list[Column]] = {}
        for column in self.free:
            if re.fullmatch(names, column.role):
                found.setdefault(get_unit(column.role), []).append(column)
        for unit, columns in found.items():
            found[unit] = columns = [
                it for it in columns if it.role[:4] == self.path_column.role[:4]
            ] or columns
            if len(columns) > 1:
                raise self.error(
                    f"{list_names(columns)} may each be the start or the end", GIVE_TIMES
                )
        return {unit: columns[0] for unit, columns in found.items()}

    def _require_no_segments(self) -> None:
        """Raise InputError where a video would be stored as a whole, and a cell of its row has its segments."""
        for column in self.free:
            if any(
                cells.holds_segments("" if self.times else column.role, cell)
                for cell in column.cells
            ):
                what = f"{column.name} holds segments in a form that is not known"
                fix = "write a row for each, with its start and end, or give --start-column none to take whole videos"
                raise self.error(what, fix)

    def _find_label(self) -> Column | None:
        named = [column for column in self.free if column.role in formats.LABELS and column.cells]
        named = [column for column in named if not column.role.endswith(formats.NUMBERS)] or named
        if len(named) > 1:
            raise self.error(f"{list_names(named)} may each be the label", GIVE_LABEL)
        if (
            not named
            and self.format is formats.BY_NAME
            and (unknown := list_names(filter(may_be_label, self.free)))
        ):
            looked = "looked for label, class, class_name, category, action, target, verb, …"
            raise self.error(
                f"no column is known as the label ({looked}), and {unknown} may be", GIVE_LABEL
            )
        self._used.update(column.number for column in named)
        return named[0] if named else None

    def _find_separator(self, label: Column) -> str | None:
        """Return what stands between the labels of a cell: "" if they are lists, None if there is one label."""
        lists = [cells.parse_nested(cell) for cell in label.cells]
        if any(isinstance(cell, dict) for cell in lists):
            raise self.error(f"{label.name} holds objects, not labels", GIVE_LABEL)
        if self.options.label is None and label.is_number and not label.whole:
            raise self.error(f"{label.name} holds fractions, not classes", GIVE_LABEL)
        if any(isinstance(cell, str) and LIST.fullmatch(cell.strip()) for cell in lists):
            raise self.error(
                f"{label.name} holds lists that cannot be read", "write them as [0, 2]"
            )
        if found := [labels for labels in lists if isinstance(labels, list)]:
            are_flags = all(
                len(labels) == len(found[0]) and all(flag in (0, 1) for flag in labels)
                for labels in found
            )
            if are_flags and any(labels.count(labels[0]) > 1 for labels in found if labels):
                raise self.error(
                    f"{label.name} holds a 0 or a 1 per class",
                    "write the numbers of the classes: [0, 2]",
                )
            return ""
        separator = cells.find_separator(label.texts, label.role in formats.MULTIPLE)
        if separator == " " and not self.table.columns:  # mmaction2's
            if self._list_frame_folders():
                raise self.error(
                    "its folders have several labels behind the number of frames",
                    "give CSV or JSON",
                )
            numbers = [[*map(int, text.split())] for text in label.texts]
            if self.options.label is None and all(
                len(row) % 2 == 0 and row == sorted({*row}) for row in numbers
            ):
                what = f"{label.name} may be starts and ends of segments"
                raise self.error(what, f"write a row for each, or {GIVE_LABEL}")
        return separator

    def _find_layout(self) -> Format:
        """Find the format of a list without a header by what its columns hold, which then are called by their roles."""
        free = [column for column in self.free if column.cells]
        subset = next(
            (column for column in free if {text.lower() for text in column.texts} <= GROUPS.keys()),
            None,
        )
        if subset:
            subset.role = "split"
            free.remove(subset)
        left = [column for column in self.columns if column in (self.path_column, *free)]
        is_asked = self.options.unlabeled or self.options.label
        for entry in formats.WITHOUT_HEADER:
            kinds, roles = zip(*entry.list_columns(), strict=True)
            is_called = len(kinds) == len(left) and re.fullmatch(entry.list_name, self.table.where)
            if is_called and not (entry.error and is_asked) and all(map(self._fits, kinds, left)):
                for column, role in zip(left, roles, strict=True):
                    column.role = role
                return entry
        if not is_asked:
            names = list_names(column for column in left if column is not self.path_column)
            raise self.error(
                f"it has no header, and which of {names} is the label is not clear", GIVE_LABEL
            )
        return formats.AS_GIVEN

    def _fits(self, kind: str, column: Column) -> bool:
        """Whether a column of a list without a header may be what a format says of it."""
        if (column is self.path_column) != (kind in PATTERNS):
            return False
        if kind in PATTERNS:
            return all(re.fullmatch(PATTERNS[kind], text, re.DOTALL) for text in column.texts)
        if kind in formats.KINDS:
            return formats.KINDS[kind](column)
        rows = [
            (row, count) for row, count in self._list_frame_folders() if len(row) > column.number
        ]
        numbers = [
            (parse_time(row[column.number - 1]) or 0, parse_time(row[column.number]) or 0, n)
            for row, n in rows
        ]
        fits = (
            abs(number - count) <= 1 if kind == "num_frames" else start + number <= count + 1
            for start, number, count in numbers
        )
        return bool(rows) and all(fits)

    def _list_frame_folders(self) -> list[tuple[Row, int]]:
        """Return the rows of folders of frames, with the number of these."""
        rows = (row for row in self.table.sample if len(row) > self.path)
        counts = ((row, self.finder.count_frames(to_path(row[self.path]))) for row in rows)
        return [(row, count) for row, count in counts if count]


def list_names(columns: Iterable[Column]) -> str:
    return ", ".join(column.name for column in columns)


def may_be_label(column: Column) -> bool:
    if (
        not column.cells
        or formats.NO_LABEL.search(column.role)
        or column.role in (*formats.PATHS, "")
    ):
        return False
    is_scalar = all(
        isinstance(cell, (str, int)) and not isinstance(cell, bool) for cell in column.cells
    )
    repeats = len({*column.texts}) < len(column.texts) or len(column.texts) < 10
    return is_scalar and repeats and (bool(column.whole) or not column.is_number)
