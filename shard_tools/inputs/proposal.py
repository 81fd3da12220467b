"""Propose what the columns of a list hold, for a user to decide.

A proposal may be wrong: it is shown with what it would make of the first rows, and nothing is read
before a command names the columns.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from adamae.shard_tools.inputs.cells import (
    WHOLE,
    may_be_spans,
    parse_pair,
    parse_time,
    to_text,
)
from adamae.shard_tools.inputs.class_folders import GROUPS
from adamae.shard_tools.inputs.classes import is_id
from adamae.shard_tools.inputs.reading import FIELDS, MARKS, NUM_NAMED, UNITS, Reading
from adamae.shard_tools.inputs.table_reader import IsFile, Table, is_like_path

# What columns are called, in lower case.
PATH = re.compile(r"(?i)path|file|video|vid|clip|name|url|^id$|^key$")
START = re.compile(r"start|begin|onset|first|(?<![a-z])(from|in|t0|tmin)(?![a-z])")
END = re.compile(r"end(?![a-z])|(?<![a-z])(end|to|out|t1|tmax)|stop|finish|offset|last")
LENGTH = re.compile(r"length|duration|num_?frames|n_?frames")
SEGMENT = re.compile("segment|time|span|window|moment|interval|range|^ts$")
LABEL = re.compile(
    "label|class|categor|action|activit|verb|noun|gloss|gesture|emotion|event|target|tag"
    "|behaviou?r|phase|annotation$|choice|species"
)
SPLIT = re.compile("^(split|subset|partition|set)$|split")
GROUP = re.compile("subject|person|participant|signer|speaker|actor|patient|^group$")
CAPTION = re.compile("caption|sentence|narrat|descri|transl|query|title|text|prompt|script")
# What names of columns of times say of their units; the first that matches decides.
UNIT_NAMES = {
    # The ranges of Label Studio's timelines are frames.
    "frames": re.compile(r"fra?me?|idx|index|(?<![a-z])ranges\."),
    "us": re.compile(r"micro|(?<![a-z])us(?![a-z])"),
    # ss.msec and hh:mm:ss.ms are seconds with decimals.
    "ms": re.compile(r"milli|(?<!ss\.)(?<![a-z])ms(ec)?(?![a-z])"),
}
BOX = re.compile("^(x1|xmin|bbox|box|bounding_?box)")
# Times with a number of frames: hh:mm:ss:ff, or hh:mm:ss;ff where frames are dropped.
TIMECODE = re.compile(r"\d+:\d\d:\d\d[:;]\d+")
# What marks a row at which a segment begins or ends.
MARKERS = {"start", "stop", "begin", "end", "onset", "offset", "point"}
FLAGS = {"0", "1"}
# Labels are taken for captions in two cases:
# - At least MIN_CAPTIONS cells have more than half as many different labels, of CAPTION_WORDS words
#   or more on average.
# - At least FEW_CAPTIONS cells all have different labels, of CAPTION_WORDS + 2 words or more.
FEW_CAPTIONS = 5
MIN_CAPTIONS = 20
CAPTION_WORDS = 3
# With fewer rows, labels that are all different are believed.
MIN_REPEATING = 10
# From so many on, they are none: names, hashes or numbers of frames.
MIN_DIFFERENT = 100
# The most commands that are proposed, and the most columns that may each be the label.
MAX_READINGS = 4
# The most numbers of a row without a header that are tried as times and labels.
MAX_NUMBERS = 3


# (name, unit) of columns by role; the unit is "" if there is none.
Columns = dict[str, tuple[str, str]]


class Doubt(NamedTuple):
    """A reason why a column is hardly one of labels, and what it may be all the same."""

    reason: str
    # (role, unit) of the column, the best first.
    answers: tuple[tuple[str, str], ...] = ()


def find_doubt(cells: Sequence[Any], is_file: IsFile) -> Doubt | None:
    """Return a reason why the cells of a column may not be a label each; None if there is none."""
    lists = [cell for cell in cells if isinstance(cell, list)]
    texts = [to_text(cell) for cell in cells]
    if not cells:
        return None
    if any(isinstance(cell, dict) for cell in cells):
        return Doubt("holds objects, not labels")
    if any(re.fullmatch(r"\[.*\]", cell) for cell in cells if isinstance(cell, str)):
        return Doubt("holds lists that cannot be read: write them as [0, 2]")
    if lists:
        return _find_doubt_of_lists(lists)
    # FaceForensics lists pairs of videos by ids. Class ids are numbers, too, and so are the names
    # of many files.
    if all(map(is_like_path, texts)) or (not all(map(is_id, texts)) and all(map(is_file, texts))):
        return Doubt("names files, too")
    numbers = [text for text in texts if parse_time(text) is not None]
    fractions = [text for text in numbers if not WHOLE.fullmatch(text)]
    if fractions and all("," in text for text in fractions):
        return Doubt("holds fractions, or several labels if :commas is added to its name")
    if fractions:
        return Doubt("holds fractions, not classes")
    if are_captions(texts):
        return Doubt("looks like captions", (("caption", ""), ("label", "")))
    if len(texts) >= MIN_DIFFERENT and len(set(texts)) == len(texts):
        return Doubt("is different in each row")
    return _find_separator(texts)


def _find_doubt_of_lists(lists: Sequence[list[Any]]) -> Doubt | None:
    parts = [part for cell in lists for part in cell]
    if any(isinstance(part, (list, tuple, dict)) for part in parts):
        return Doubt("holds lists of lists")
    are_numbers = [isinstance(part, (int, float)) for part in parts]
    if any(are_numbers) and not all(are_numbers):
        return Doubt("holds names and numbers, such as a class and its times")
    if not all(are_numbers):
        return None
    if any(not float(part).is_integer() for part in parts):
        return Doubt("holds a number per class")
    lengths = {len(cell) for cell in lists}
    has_repeated = any(len(set(cell)) < len(cell) for cell in lists)
    # No list has an id twice, as flags do, and three numbers each may be a class and its times.
    if has_repeated or (len(lengths) == 1 and min(lengths) > 2):
        return Doubt("holds a 0 or a 1 per class, or as many numbers in each row")
    return None


def _find_separator(texts: Sequence[str]) -> Doubt | None:
    """Return a doubt if some cells seem to hold several labels with a mark between them.

    A comma with a space behind it is a part of a name, unless the parts are labels of other rows.
    """
    for name, mark in MARKS.items():
        several = [text for text in texts if mark in text]
        parts = {part.strip() for text in several for part in text.split(mark)}
        if not several:
            continue
        if any(parse_time(part) is None for part in parts):
            is_part_of_names = mark == " " or (
                mark == "," and all(", " in text for text in several)
            )
            if is_part_of_names and not (mark == "," and parts <= set(texts)):
                continue
        elif not all(map(is_id, parts)):
            return Doubt("holds several numbers, not classes")
        elif all(may_be_spans(list(map(int, text.split(mark)))) for text in texts):
            return Doubt("may hold starts and ends of segments: write a row for each")
        what = f"may hold several labels with {name} between them"
        return Doubt(what, (("label", name), ("label", "")))
    return None


def are_captions(labels: Sequence[str]) -> bool:
    """Return whether labels look like captions."""
    different = set(labels)
    words_per_label = sum(len(label.split()) for label in different) / max(1, len(different))
    if len(labels) >= MIN_CAPTIONS and len(different) > len(labels) / 2:
        return words_per_label >= CAPTION_WORDS
    if len(labels) >= FEW_CAPTIONS and len(different) == len(labels):
        return words_per_label >= CAPTION_WORDS + 2
    return False


class Column:
    """The sampled cells of a column that are not missing."""

    def __init__(
        self, name: str, lists: Sequence[str], cells: Sequence[Any], is_file: IsFile
    ) -> None:
        self.name = name
        # The innermost list of objects that the column lies in, "" for none.
        self.outer = lists[-1] if lists else ""
        # The name in it, in lower case.
        self.key = name.removeprefix(f"{self.outer}.").lower()
        self.cells = cells
        self.texts = list(map(to_text, cells))
        self.doubt = find_doubt(cells, is_file)
        # A cell may be a list of times or labels.
        self.parts: list[Any] = []
        for cell in cells:
            self.parts += cell if isinstance(cell, list) else [cell]

    @property
    def answers(self) -> tuple[tuple[str, str], ...]:
        """The (role, unit) that the column may have if it holds labels; () if it holds none."""
        if self.doubt is None:
            return (("label", ""),) if self.parts else ()
        return self.doubt.answers

    @cached_property
    def is_number(self) -> bool:
        return all(parse_time(part) is not None for part in self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether all cells are whole numbers, or pairs of them."""
        return all(re.fullmatch(r"-?\d+|\[\d+, \d+\]", to_text(part)) for part in self.parts)

    @property
    def is_timecode(self) -> bool:
        return all(map(TIMECODE.fullmatch, self.texts))

    @property
    def is_id(self) -> bool:
        return all(map(is_id, self.texts))

    @property
    def is_flag(self) -> bool:
        return len(self.texts) > 1 and set(self.texts) <= FLAGS

    @property
    def is_split(self) -> bool:
        """Return whether all cells are called like subsets, or the column is."""
        return all(text.lower() in GROUPS for text in self.texts) or bool(SPLIT.search(self.key))

    @property
    def is_segment(self) -> bool:
        """Return whether the column is called like segments and holds [start, end], or lists."""
        if not SEGMENT.search(self.key):
            return False
        if all(map(parse_pair, self.cells)):
            return True
        return bool(self.parts) and all(map(parse_pair, self.parts))

    @property
    def unit(self) -> str:
        """What the name says of the unit of times."""
        for unit, pattern in UNIT_NAMES.items():
            if pattern.search(self.name.lower()):
                return unit
        return "s"

    @property
    def repeats(self) -> bool:
        """Whether cells are several different texts, but fewer than rows."""
        if self.outer or not all(isinstance(part, str) for part in self.parts):
            return False
        if any(parse_time(part) is not None for part in self.parts):
            return False
        num_different = len(set(self.parts))
        if num_different == 1 and len(self.parts) > 1:
            return False
        return num_different < len(self.parts) or len(self.parts) < MIN_REPEATING

    def is_time(self, pattern: re.Pattern[str]) -> bool:
        """Return whether the column is called like a time and holds numbers or times, or lists."""
        return bool(pattern.search(self.key)) and bool(self.parts) and self.is_number

    def list_remarks(self) -> Iterator[str]:
        """Yield sentences that no proposal can say."""
        if self.doubt and LABEL.search(self.key):
            yield f"{self.name} {self.doubt.reason}"
        if BOX.search(self.key):
            yield f"{self.name} holds boxes: a class of a box is not one of the video"
        if self.is_timecode:
            yield f"{self.name} holds times with frames, such as {self.texts[0]}: write seconds"
        if set(map(str.lower, self.texts)) <= MARKERS:
            what = f"{self.name} says where segments begin or end"
            yield f"{what}: write a row for each, with its start and its end"


class Proposer:
    """Proposes what the columns of a list may hold."""

    def __init__(self, table: Table, is_file: IsFile) -> None:
        self.table = table
        self.path = table.path
        if not table.num_found and not table.num_similar:
            self.path = next(filter(PATH.search, table.names), table.path)
        self.columns = [
            Column(name, table.lists[name], cells, is_file)
            for name, cells in table.cells.items()
            if name != self.path and cells
        ]
        # One column of flags would be 0 or 1 by chance, several are a class each.
        self.flags = [column for column in self.columns if column.is_flag]
        if len(self.flags) == 1:
            self.flags = []

    def list_readings(self, has_labels: bool) -> list[Reading]:
        """Return what the columns may hold, the best proposal first."""
        facts = self._list_facts()
        if self.table.is_named:
            times = self._list_times() or [{}]
            used = {name for columns in (*times, facts) for name, _ in columns.values()}
            labels: list[Columns] = []
            # Without its times, the label of a segment would be that of a whole video.
            if has_labels and not self._has_unusable_times():
                labels = self._list_labels(used)
            options = [chosen | label for chosen, label in product(times, labels or [{}])]
            # What an inner object says is of a segment, and what an outer one says of the video.
            options.sort(key=_count_dots, reverse=True)
        else:
            options = self._list_layouts(has_labels, {name for name, _ in facts.values()})
        path = {"path": (self.path, "")}
        readings = [self._make_reading(path | option | facts) for option in options]
        return readings[:MAX_READINGS]

    def list_remarks(self) -> list[str]:
        """Return sentences about columns that no proposal can say."""
        remarks = []
        if self.flags:
            names = ", ".join(column.name for column in self.flags[:NUM_NAMED])
            what = f"{names} hold a 0 or a 1 each"
            remarks.append(f"{what}: write the names of the classes of a video into one column")
        for column in self.columns:
            remarks += column.list_remarks()
            if column.is_time(START) and not self._list_times():
                what = f"{column.name} has no end"
                remarks.append(f"{what}: write one, or the length of each segment")
        times = {name for columns in self._list_times() for name, unit in columns.values()}
        for column in self.columns:
            if column.name in times and column.unit == "s" and column.is_whole:
                what = f"{column.name} may count frames or milliseconds"
                remarks.append(f"{what}: then add :frames or :ms to its name")
        return remarks

    def _make_reading(self, columns: Columns) -> Reading:
        names = {role: name for role, (name, _) in columns.items()}
        units = {role: unit for role, (_, unit) in columns.items() if unit}
        rest = FIELDS if len(names) < len(self.table.names) else ""
        return Reading(names, units, rest)

    def _list_facts(self) -> Columns:
        """Return the columns of splits, groups and captions."""
        facts: Columns = {}
        for column in self.columns:
            if column.is_split:
                facts.setdefault("split", (column.name, ""))
            elif GROUP.search(column.key):
                facts.setdefault("group", (column.name, ""))
            elif CAPTION.search(column.key) and not column.is_id:
                facts.setdefault("caption", (column.name, ""))
        return facts

    def _has_unusable_times(self) -> bool:
        has_times = any(column.is_time(START) or column.is_timecode for column in self.columns)
        return has_times and not self._list_times()

    def _list_times(self) -> list[Columns]:
        """Return the columns of segments that have the finest unit, the innermost first."""
        options: dict[str, list[Columns]] = {unit: [] for unit in UNITS}
        for start in self.columns:
            end = self._find_end(start) if start.is_time(START) else None
            if end is not None:
                role = "end" if end.is_time(END) else "length"
                option = {"start": (start.name, start.unit), role: (end.name, end.unit)}
                options[start.unit].append(option)
        if not any(options.values()):
            for column in self.columns:
                if column.is_segment:
                    options[column.unit].append({"segment": (column.name, column.unit)})
        columns = next(filter(None, options.values()), [])
        return sorted(columns, key=_count_dots, reverse=True)[:2]

    def _find_end(self, start: Column) -> Column | None:
        """Return the column of ends, or else of lengths, that goes with a column of starts."""
        stem = START.sub("", start.key)
        length = None
        end = None
        for column in self.columns:
            if column.outer != start.outer:
                continue
            if column.is_time(END) and column.unit == start.unit:
                if END.sub("", column.key) == stem:
                    return column
                end = end or column
            elif column.is_time(LENGTH):
                length = length or column
        return end or length

    def _list_labels(self, used: set[str]) -> list[Columns]:
        """Return the columns that may be the label, names before numbers."""
        names: list[Column] = []
        for column in self.columns:
            is_time = column.is_time(START) or column.is_time(END)
            if column.name not in used and column not in self.flags and not is_time:
                names.append(column)
        called = [column for column in names if LABEL.search(column.key)]
        labels = called or [column for column in names if column.repeats]
        options: list[Columns] = []
        for column in sorted(labels, key=lambda column: column.is_id):
            options += [{role: (column.name, unit)} for role, unit in column.answers]
        return options[:MAX_NUMBERS]

    def _list_layouts(self, has_labels: bool, used: set[str]) -> list[Columns]:
        """Return what the columns of a list without a header may hold, by what their cells are."""
        numbers: list[Column] = []
        texts: list[Column] = []
        for column in self.columns:
            if column.name not in used and column not in self.flags:
                if column.is_number:
                    numbers.append(column)
                elif column.answers:
                    texts.append(column)
        labels: list[Columns] = [{}]
        if texts and has_labels:
            labels = [{role: (texts[0].name, unit)} for role, unit in texts[0].answers]
        options: list[Columns] = []
        num_rows = len(self.table.sample)
        # Each row has its times. Rows that differ in their width have other numbers.
        if all(len(column.cells) == num_rows for column in numbers):
            options = _list_number_roles(numbers, labels[0])
        return options or labels


def _list_number_roles(numbers: Sequence[Column], label: Columns) -> list[Columns]:
    """Return what two or three columns of numbers may hold, beside a column of labels or none."""
    if len(numbers) == 2:
        options = [span | label for span in _list_spans(*numbers)]
        return options if label else [*options, {"label": (numbers[1].name, "")}]
    if len(numbers) != MAX_NUMBERS or label:
        return []
    first, second, third = numbers
    last = [span | {"label": (third.name, "")} for span in _list_spans(first, second)]
    begin = [span | {"label": (first.name, "")} for span in _list_spans(second, third)]
    # Class ids are small numbers, and frames large ones.
    if _find_largest(first) < _find_largest(third):
        return begin + last
    return last + begin


def _find_largest(column: Column) -> float:
    return max(parse_time(cell) or 0 for cell in column.cells)


def _list_spans(first: Column, second: Column) -> list[Columns]:
    """Return two columns of numbers as start and end, if they can be these, and as a length."""
    # Numbers with decimals are seconds, others are frames.
    unit = "frames" if first.is_whole and second.is_whole else "s"
    length: Columns = {"start": (first.name, unit), "length": (second.name, unit)}
    for start_cell, end_cell in zip(first.cells, second.cells, strict=False):
        start = parse_time(start_cell) or 0
        end = parse_time(end_cell) or 0
        if start >= end and (start, end) != (-1, -1):
            has_lengths = all(parse_time(cell) or 0 for cell in second.cells)
            return [length] if has_lengths else []
    return [{"start": (first.name, unit), "end": (second.name, unit)}, length]


def _count_dots(columns: Columns) -> int:
    return sum(name.count(".") for name, _ in columns.values())
