"""Decide what each column of a list holds.

The options decide first, then the list's format, then the column's name and cells.
"""

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from adamae.common.errors import InputError
from adamae.common.logging import printable
from adamae.shard_tools.inputs import cells, formats, vocabulary
from adamae.shard_tools.inputs.cells import Row, Times, parse_time, to_path, to_text
from adamae.shard_tools.inputs.class_folders import GROUPS
from adamae.shard_tools.inputs.column import Column
from adamae.shard_tools.inputs.files import Finder
from adamae.shard_tools.inputs.formats import Format
from adamae.shard_tools.inputs.item import NONE, ListOptions
from adamae.shard_tools.inputs.location import ParquetCell
from adamae.shard_tools.inputs.table_reader import Table
from adamae.shard_tools.inputs.vocabulary import get_unit, to_key

GIVE_LABEL = "give --label-column (a name, or a number from 1), or --unlabeled"
GIVE_TIMES = "give --start-column and --end-column, or --start-column none"
# The text of a list or an object, as JSON or Python write it.
NESTED = re.compile(r"\[.*\]|\{.*\}", re.DOTALL)
# The most columns that a message names.
NUM_NAMED = 30


@dataclass(frozen=True)
class Columns:
    """What the columns of a list hold: column numbers from 0; None if there is no such column."""

    names: list[str]
    format: Format
    path: int
    label: int | None
    times: Times | None
    subset: int | None
    # The column whose value Format.left_out marks a row to skip.
    exclusion: int | None
    # The other columns with a name, the subset among them; their cells are kept with each sample.
    # Columns of a list without a header are named too: "column 3".
    fields: list[int]
    # How a cell holds labels:
    # - None: it is one label.
    # - "": it is a list of labels.
    # - Other text: it is labels with this text between them.
    separator: str | None
    # The label of all rows, which the name of the list gives.
    constant_label: str | None


def find_columns(table: Table, options: ListOptions, finder: Finder) -> Columns:
    """Decide what the columns of a list hold.

    Columns that options name come first, then those that the format of the list names, then those
    whose names are in the vocabulary. Raise InputError, with the list's first row, where two
    columns fit, or if no column can be the path.
    """
    return _Search(table, options, finder).find()


class _Search:
    """The search for the columns of one list.

    The first step that claims a column keeps it, since later steps look only at `_unclaimed`.
    Options are the exception: they may name a column that is claimed already.
    """

    def __init__(self, table: Table, options: ListOptions, finder: Finder) -> None:
        self.table = table
        self.options = options
        self.finder = finder
        width = len(table.columns) if table.columns else max(map(len, table.sample))
        if not width:
            raise InputError(f"{table.where} ({table.form}) has no columns")
        if table.columns:
            self.names = [str(name) for name in table.columns]
            keys = [to_key(name) for name in self.names]
        else:
            self.names = [f"column {number}" for number in range(1, width + 1)]
            keys = [""] * width
        self.format = formats.BY_NAME
        for entry in formats.FORMATS:
            if entry.matches(keys):
                self.format = entry
                break
        roles = dict(self.format.list_columns())
        self.columns = [
            Column(number, name, roles.get(key, key), table.sample)
            for number, (name, key) in enumerate(zip(self.names, keys, strict=True))
        ]
        # The numbers of the columns that a step has claimed.
        self._claimed: set[int] = set()
        self.path = self._find_path()
        self._claim(self.path)

    def find(self) -> Columns:
        """Claim each column. The order matters: a claimed column is not offered again."""
        options = self.options
        label = self._resolve("label", options.label)
        self._claim(label)
        times = self._resolve_times()
        self._claim_times(times)
        # The format of a list without a header follows from the columns that no option names.
        if not self.table.columns:
            self.format = self._find_layout()
        if self.format.error:
            raise self.error(self.format.error, self.format.fix)
        # Either option (even `none`) turns the search off.
        if options.start is None and options.end is None:
            times = self._find_times()
            self._claim_times(times)
        subset = self._claim_first(vocabulary.SUBSETS)
        exclusion = self._claim_first(["exclusion"]) if self.format.left_out else None
        if label is None and not options.label_folder and not options.unlabeled:
            label = self._find_label()
            self._claim(label)
        # This check comes last: a label or a subset, which may be nested too, is claimed by now.
        # Only --start-column turns it off; `--end-column none` does not.
        if options.start is None:
            self._require_no_segments(times)
        label_number = label.number if label else None
        assigned = {self.path.number, label_number}
        if times:
            assigned.update((times.start, times.end))
        fields = [n for n, name in enumerate(self.names) if name and n not in assigned]
        match = re.fullmatch(self.format.list_name, self.table.where)
        return Columns(
            names=self.names,
            format=self.format,
            path=self.path.number,
            label=label_number,
            times=times,
            subset=subset,
            exclusion=exclusion,
            fields=fields,
            separator=self._find_separator(label) if label else None,
            constant_label=match[1] if match and match.re.groups else None,
        )

    def error(self, what: str, fix: str) -> InputError:
        """Return an error about the list, with its columns and its first row."""
        table = self.table
        names = ", ".join(map(printable, self.names[:NUM_NAMED]))
        first_row = printable(", ".join(map(to_text, table.sample[0])))
        return InputError(
            f"{table.where} ({table.form}): {what}; its columns are {names}"
            f" (the first row: {first_row}): {fix}"
        )

    def _claim(self, column: Column | None) -> None:
        if column is not None:
            self._claimed.add(column.number)

    def _claim_times(self, times: Times | None) -> None:
        if times is not None:
            self._claimed.add(times.start)
            if times.end is not None:
                self._claimed.add(times.end)

    @property
    def _unclaimed(self) -> list[Column]:
        """The columns that no step has claimed yet."""
        return [column for column in self.columns if column.number not in self._claimed]

    def _find_unclaimed(self, roles: Collection[str]) -> Column | None:
        """Return the first unclaimed column whose role is one of `roles`, or None."""
        for column in self._unclaimed:
            if column.role in roles:
                return column
        return None

    def _claim_first(self, roles: Collection[str]) -> int | None:
        """Claim the column that `_find_unclaimed` returns; return its number, or None."""
        column = self._find_unclaimed(roles)
        self._claim(column)
        return column.number if column else None

    def _resolve(self, role: str, option: str | None) -> Column | None:
        """Return the column that an option names, by its name or its number from 1.

        Return None if the option is not given. Raise InputError if there is no such column.
        """
        if option is None:
            return None
        # The option is first compared as it is written: two names may differ only in case.
        for name in filter(None, (option, to_key(option))):
            for attribute in ("name", "role", "option_number"):
                for column in self.columns:
                    if getattr(column, attribute) == name:
                        return column
        fix = f"give --{role}-column one of them, or a number from 1"
        raise self.error(f"there is no column {option}", fix)

    def _resolve_times(self) -> Times | None:
        options = self.options
        if NONE in (options.start, options.end):
            return None
        start = self._resolve("start", options.start)
        end = self._resolve("end", options.end)
        if start is None and end is None:
            return None
        if start is None or end is None:
            fix = "give both --start-column and --end-column"
            raise self.error("a segment has a start and an end", fix)
        scale, in_frames = get_unit(start.role)
        is_length = end.role in vocabulary.LENGTHS
        return Times(start.number, end.number, scale, in_frames, is_length)

    def _find_path(self) -> Column:
        """Find the column of paths: by its option, its cells (files or videos), or its name."""
        pairs = zip(self.columns, self.table.sample[0], strict=False)
        videos = [column for column, cell in pairs if isinstance(cell, ParquetCell)]
        if len(videos) > 1 and not self.options.path:
            raise self.error(f"{_list_names(videos)} may each be the video", "give --path-column")
        if self.options.path or not self.table.columns or self.table.num_found:
            return self._resolve("path", self.options.path) or self.columns[self.table.column]
        for role in vocabulary.PATHS:
            for column in self.columns:
                if column.role == role:
                    return column
        what = "no column names videos (looked for path, video, file_name, video_id, id, …)"
        raise self.error(what, "give --path-column, --root or --suffix")

    def _find_times(self) -> Times | None:
        """Find the start and the end of segments, or start and length, or one column of pairs.

        A list often has both seconds and frames: seconds are taken. Raise InputError if there is a
        start without an end, or an end without a start.
        """
        starts = self._choose_times(vocabulary.STARTS)
        ends = self._choose_times(vocabulary.ENDS)
        if not starts and not ends:
            return self._find_pairs()
        units = sorted(starts.keys() & ends.keys())
        if units:
            scale, in_frames = units[0]
            return Times(starts[units[0]].number, ends[units[0]].number, scale, in_frames)
        length = self._find_unclaimed(vocabulary.LENGTHS)
        if ends or (length is None and self.format.seconds == math.inf):
            column = next(iter([*starts.values(), *ends.values()]))
            missing = "end" if starts else "start"
            raise self.error(f"{column.name} has no {missing}", GIVE_TIMES)
        (scale, in_frames), start = next(iter(starts.items()))
        return Times(
            start.number,
            length.number if length else None,
            scale,
            in_frames,
            is_length=True,
            length=self.format.seconds,
            first=self._find_first_frame(start),
        )

    def _find_pairs(self) -> Times | None:
        """Find a column whose cells hold the start and the end of a segment."""
        for column in self._unclaimed:
            is_named = column.role in vocabulary.PAIRS
            if is_named and column.cells and all(map(cells.parse_pair, column.cells)):
                return Times(column.number, column.number)
        return None

    def _find_first_frame(self, start: Column) -> int:
        """Return 1 if the list counts the frames of a folder from 1, else 0."""
        if not self.format.is_numbered or not self._frame_folders:
            return 0
        for row, _ in self._frame_folders:
            if not parse_time(row[start.number]):
                return 0
        return 1

    def _choose_times(self, pattern: str) -> dict[tuple[float, bool], Column]:
        """Return, by unit, the unclaimed columns whose role matches; get_unit defines the units.

        If several have one unit, the column that is named like the path is taken: beside video_id,
        video_start rather than clip_start. Raise InputError if this leaves several.
        """
        columns_by_unit: dict[tuple[float, bool], list[Column]] = {}
        for column in self._unclaimed:
            if re.fullmatch(pattern, column.role):
                columns_by_unit.setdefault(get_unit(column.role), []).append(column)
        chosen = {}
        for unit, columns in columns_by_unit.items():
            # "vide" is enough to tell a video from a clip.
            prefix = self.path.role[:4]
            columns = [column for column in columns if column.role[:4] == prefix] or columns
            if len(columns) > 1:
                what = f"{_list_names(columns)} may each be the start or the end"
                raise self.error(what, GIVE_TIMES)
            chosen[unit] = columns[0]
        return chosen

    def _require_no_segments(self, times: Times | None) -> None:
        """Raise InputError if an unclaimed column holds segments, which would be ignored."""
        for column in self._unclaimed:
            # If the times are known, a pair of numbers in another column is not a segment, whatever
            # the name of the column.
            name = "" if times else column.role
            if any(cells.holds_segments(name, cell) for cell in column.cells):
                raise self.error(
                    f"{column.name} holds segments in a form that is not known",
                    "write a row for each, with its start and end,"
                    " or give --start-column none to take whole videos",
                )

    def _find_label(self) -> Column | None:
        """Find the column of labels; class names are preferred to class ids.

        Raise InputError if several columns are named like labels. Raise it also if none is, the
        list has no published format, and the cells of some column look like labels.
        """
        labels = [it for it in self._unclaimed if it.role in vocabulary.LABELS and it.cells]
        columns = [it for it in labels if not it.role.endswith(vocabulary.NUMBERS)] or labels
        if len(columns) > 1:
            raise self.error(f"{_list_names(columns)} may each be the label", GIVE_LABEL)
        if columns:
            return columns[0]
        candidates = _list_names(column for column in self._unclaimed if column.may_be_label)
        if candidates and self.format is formats.BY_NAME:
            looked = "looked for label, class, class_name, category, action, target, verb, …"
            what = f"no column is known as the label ({looked}), and {candidates} may be"
            raise self.error(what, GIVE_LABEL)
        return None

    def _find_separator(self, label: Column) -> str | None:
        """Return the text between the labels of a cell, as Columns.separator defines it.

        Raise InputError if the cells hold no labels.
        """
        is_given = self.options.label is not None
        if label.is_number and not label.whole_numbers and not is_given:
            raise self.error(f"{label.name} holds fractions, not classes", GIVE_LABEL)
        if self._holds_lists(label):
            return ""
        separator = cells.find_separator(label.texts, label.role in vocabulary.MULTIPLE)
        # mmaction2 separates the labels of a video by spaces; lists of UCF-Crime have the times of
        # segments in their place.
        if separator == " " and not self.table.columns:
            if self._frame_folders:
                what = "its folders have several labels behind the number of frames"
                raise self.error(what, "give CSV or JSON")
            if not is_given and all(map(_may_be_spans, label.texts)):
                what = f"{label.name} may be starts and ends of segments"
                raise self.error(what, f"write a row for each, or {GIVE_LABEL}")
        return separator

    def _holds_lists(self, label: Column) -> bool:
        """Return whether cells are lists of labels.

        Raise InputError if they are objects, lists that cannot be read, or a 0 or 1 per class.
        """
        values = [cells.parse_nested(cell) for cell in label.cells]
        if any(isinstance(value, dict) for value in values):
            raise self.error(f"{label.name} holds objects, not labels", GIVE_LABEL)
        if any(isinstance(value, str) and NESTED.fullmatch(value.strip()) for value in values):
            what = f"{label.name} holds lists that cannot be read"
            raise self.error(what, "write them as [0, 2]")
        lists = [value for value in values if isinstance(value, list)]
        if _are_flags(lists):
            what = f"{label.name} holds a 0 or a 1 per class"
            raise self.error(what, "write the numbers of the classes: [0, 2]")
        return bool(lists)

    def _find_layout(self) -> Format:
        """Find the format of a list without a header by what its columns hold.

        Set the roles of the columns to those of the format. Raise InputError if no format fits and
        the options do not say which column is the label.
        """
        unnamed = [column for column in self._unclaimed if column.cells]
        for column in unnamed:
            if all(text.lower() in GROUPS for text in column.texts):
                column.role = "split"
                unnamed.remove(column)
                break
        unnamed = [it for it in self.columns if it is self.path or it in unnamed]
        label_is_given = bool(
            self.options.unlabeled or self.options.label or self.options.label_folder
        )
        for entry in formats.WITHOUT_HEADER:
            if entry.error and label_is_given:
                continue
            if self._has_layout(entry, unnamed):
                for column, (_, role) in zip(unnamed, entry.list_columns(), strict=True):
                    column.role = role
                return entry
        if not label_is_given:
            names = _list_names(column for column in unnamed if column is not self.path)
            what = f"it has no header, and which of {names} is the label is not clear"
            raise self.error(what, GIVE_LABEL)
        return formats.AS_GIVEN

    def _has_layout(self, entry: Format, columns: list[Column]) -> bool:
        """Return whether `columns`, in their order, fit the columns of a format."""
        names = entry.list_columns()
        if len(names) != len(columns):
            return False
        if not re.fullmatch(entry.list_name, self.table.where):
            return False
        kinds = [formats.KINDS[name] for name, _ in names]
        return all(map(self._fits, kinds, columns))

    def _fits(self, kind: formats.Kind, column: Column) -> bool:
        """Return whether a column of a list without a header holds what `kind` requires."""
        if (column is self.path) != kind.is_path or not kind.fits(column):
            return False
        if kind.fits_frames is None:
            return True
        rows = [(row, count) for row, count in self._frame_folders if len(row) > column.number]
        for row, num_frames in rows:
            previous = parse_time(row[column.number - 1]) or 0
            number = parse_time(row[column.number]) or 0
            if not kind.fits_frames(previous, number, num_frames):
                return False
        return bool(rows)

    @cached_property
    def _frame_folders(self) -> list[tuple[Row, int]]:
        """The sampled rows whose path is a folder of frames, each with its number of frames."""
        rows = []
        for row in self.table.sample:
            if len(row) > self.path.number:
                num_frames = self.finder.count_frames(to_path(row[self.path.number]))
                if num_frames:
                    rows.append((row, num_frames))
        return rows


def _list_names(columns: Iterable[Column]) -> str:
    return ", ".join(column.name for column in columns)


def _are_flags(lists: list[list[object]]) -> bool:
    """Return whether lists hold a 0 or a 1 per class, as [0, 0, 1] and [1, 0, 0] do.

    Lists such as [0], [1] and [0, 1] may be class ids. [0, 0, 1] is not: no list has an id twice.
    """
    if not lists:
        return False
    for labels in lists:
        if len(labels) != len(lists[0]) or not all(label in (0, 1) for label in labels):
            return False
    return any(labels.count(labels[0]) > 1 for labels in lists if labels)


def _may_be_spans(text: str) -> bool:
    """Return whether numbers may be starts and ends: an even count, increasing, as 16 24 30 60."""
    numbers = [int(word) for word in text.split()]
    return len(numbers) % 2 == 0 and numbers == sorted(set(numbers))
