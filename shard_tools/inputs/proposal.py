"""Propose what the columns of a list hold, for a user to decide.

A proposal may be wrong: it is shown with what it would make of the first rows, and nothing is read
before a command names the columns.
"""

import re
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from adamae.shard_tools.inputs.cells import (
    WHOLE,
    list_object_lists,
    parse_pair,
    parse_time,
    to_text,
)
from adamae.shard_tools.inputs.class_folders import GROUPS
from adamae.shard_tools.inputs.classes import is_id
from adamae.shard_tools.inputs.reading import FIELDS, MARKS, NUM_NAMED, UNITS, Reading
from adamae.shard_tools.inputs.table_reader import Table

# What columns are called, in lower case.
PATH = re.compile(r"path|file|video|vid|clip|name|url|^id$|^key$")
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
    "frames": re.compile("fra?me?|idx|index"),
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
# The most commands that are proposed, and the most columns that may each be the label.
MAX_READINGS = 4
# The cells of a column that are tried as times.
NUM_TRIED = 100
# The most numbers of a row without a header that are tried as times and labels.
MAX_NUMBERS = 3


# (name, unit) of columns by role; the unit is "" if there is none.
Columns = dict[str, tuple[str, str]]


class Doubt(NamedTuple):
    """A reason to ask before a list is read, and what its column of labels may be instead."""

    reason: str
    # (role, unit) of the column; a list without any is stored without labels. None: it is not
    # about labels.
    answers: tuple[tuple[str, str], ...] | None = ()

    def list_answers(self, reading: Reading) -> list[Reading]:
        """Return the readings that a user may choose."""
        if self.answers is None:
            return [reading]
        if not self.answers:
            return [reading.drop("label")]
        return [reading.replace_label(role, unit) for role, unit in self.answers]


def find_doubt(cells: Sequence[Any]) -> Doubt | None:
    """Return a reason why the cells of a column may not be a label each; None if there is none."""
    lists = [cell for cell in cells if isinstance(cell, list)]
    texts = [to_text(cell) for cell in cells]
    if any(isinstance(cell, dict) for cell in cells):
        return Doubt("holds objects, not labels")
    if any(re.fullmatch(r"\[.*\]", cell) for cell in cells if isinstance(cell, str)):
        return Doubt("holds lists that cannot be read: write them as [0, 2]")
    if lists:
        return _find_doubt_of_lists(lists)
    numbers = [text for text in texts if parse_time(text) is not None]
    if any(not WHOLE.fullmatch(text) for text in numbers):
        return Doubt("holds fractions, not classes")
    if are_captions(texts):
        return Doubt("looks like captions", (("caption", ""), ("label", "")))
    return _find_separator(texts)


def _find_doubt_of_lists(lists: Sequence[list[Any]]) -> Doubt | None:
    parts = [part for cell in lists for part in cell]
    if any(isinstance(part, (list, dict)) for part in parts):
        return Doubt("holds lists of lists")
    if not all(isinstance(part, (int, float)) for part in parts):
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
        elif all(_may_be_spans(text.split(mark)) for text in texts):
            return Doubt("may hold starts and ends of segments: write a row for each")
        what = f"may hold several labels with {name} between them"
        return Doubt(what, (("label", name), ("label", "")))
    return None


def _may_be_spans(words: Sequence[str]) -> bool:
    """Return whether numbers may be starts and ends: an even count, increasing, as 16 24 30 60."""
    numbers = [parse_time(word) or 0 for word in words]
    return len(numbers) % 2 == 0 and numbers == sorted(set(numbers))


def are_captions(labels: Sequence[str]) -> bool:
    """Return whether labels look like captions."""
    different = set(labels)
    words_per_label = sum(len(label.split()) for label in different) / max(1, len(different))
    if len(labels) >= MIN_CAPTIONS and len(different) > len(labels) / 2:
        return words_per_label >= CAPTION_WORDS
    if len(labels) >= FEW_CAPTIONS and len(different) == len(labels):
        return words_per_label >= CAPTION_WORDS + 2
    return False


class Proposer:
    """Looks at the sampled rows of a list."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.lists = {it for row in table.sample for it in list_object_lists(row)}
        self.cells = {name: table.list_values(name) for name in table.names}
        self.path = table.path
        if not table.num_found:
            named = [name for name in table.names if PATH.search(name.lower())]
            self.path = named[0] if named and not table.num_similar else table.path
        self.names = [name for name in table.names if name != self.path and self.cells[name]]
        # The columns of flags: one would be 0 or 1 by chance, several are a class each.
        self.flags = []
        for name in self.names:
            texts = list(map(to_text, self.cells[name]))
            if len(texts) > 1 and set(texts) <= FLAGS:
                self.flags.append(name)

    def list_readings(self, has_labels: bool) -> list[Reading]:
        """Return what the columns may hold, the best proposal first."""
        facts = self._list_facts()
        if self.table.is_named:
            times = self._list_times() or [{}]
            used = {name for columns in (*times, facts) for name, _ in columns.values()}
            labels = self._list_labels(used) if has_labels else []
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
        if len(self.flags) > 1:
            what = f"{', '.join(self.flags[:NUM_NAMED])} hold a 0 or a 1 each"
            remarks.append(f"{what}: write the names of the classes of a video into one column")
        for name in self.names:
            doubt = find_doubt(self.cells[name])
            if doubt and LABEL.search(self._get_key(name)):
                remarks.append(f"{name} {doubt.reason}")
            texts = [to_text(cell) for cell in self.cells[name]]
            if BOX.search(self._get_key(name)):
                remarks.append(f"{name} holds boxes: a class of a box is not one of the video")
            if all(map(TIMECODE.fullmatch, texts)):
                remarks.append(f"{name} holds times with frames, such as {texts[0]}: write seconds")
            if {text.lower() for text in texts} <= MARKERS:
                what = f"{name} says where segments begin or end"
                remarks.append(f"{what}: write a row for each, with its start and its end")
        starts = [name for name in self.names if self._is_time(name, START)]
        if starts and not self._list_times():
            remarks.append(f"{starts[0]} has no end: write one, or the length of each segment")
        return remarks

    def _get_key(self, name: str) -> str:
        """Return the name of a column in lower case, without the lists of objects around it."""
        outer = max((it for it in self.lists if name.startswith(f"{it}.")), key=len, default="")
        return name.removeprefix(f"{outer}.").lower()

    def _make_reading(self, columns: Columns) -> Reading:
        names = {role: name for role, (name, _) in columns.items()}
        units = {role: unit for role, (_, unit) in columns.items() if unit}
        rest = FIELDS if len(names) < len(self.table.names) else ""
        return Reading(names, units, rest)

    def _list_facts(self) -> Columns:
        """Return the columns of splits, groups and captions."""
        facts: Columns = {}
        for name in self.names:
            key = self._get_key(name)
            texts = set(map(to_text, self.cells[name]))
            if all(text.lower() in GROUPS for text in texts) or SPLIT.search(key):
                facts.setdefault("split", (name, ""))
            elif GROUP.search(key):
                facts.setdefault("group", (name, ""))
            elif CAPTION.search(key) and not all(map(is_id, texts)):
                facts.setdefault("caption", (name, ""))
        return facts

    def _list_times(self) -> list[Columns]:
        """Return the columns of segments that have the finest unit."""
        ends = [name for name in self.names if self._is_time(name, END)]
        lengths = [name for name in self.names if self._is_time(name, LENGTH)]
        options: dict[str, list[Columns]] = {unit: [] for unit in UNITS}
        for start in self.names:
            if not self._is_time(start, START):
                continue
            unit = _get_unit(start)
            stem = START.sub("", start.lower())
            same_unit = [name for name in ends if _get_unit(name) == unit]
            same_stem = [name for name in same_unit if END.sub("", name.lower()) == stem]
            if same_unit:
                end = (same_stem or same_unit)[0]
                options[unit].append({"start": (start, unit), "end": (end, unit)})
            elif lengths:
                length = (lengths[0], _get_unit(lengths[0]))
                options[unit].append({"start": (start, unit), "length": length})
        for columns in options.values():
            if columns:
                return columns[:2]
        return [{"segment": (name, "")} for name in self.names if self._is_segment(name)]

    def _is_time(self, name: str, pattern: re.Pattern[str]) -> bool:
        """Return whether a column is called like a time and holds numbers or times, or lists."""
        cells = [part for cell in self.cells[name] for part in _as_list(cell)]
        is_number = bool(cells) and all(parse_time(cell) is not None for cell in cells[:NUM_TRIED])
        return bool(pattern.search(self._get_key(name))) and is_number

    def _is_segment(self, name: str) -> bool:
        """Return whether a column is called like segments and holds [start, end], or lists."""
        return SEGMENT.search(self._get_key(name)) is not None and all(
            parse_pair(cell)
            or (isinstance(cell, list) and bool(cell) and all(map(parse_pair, cell)))
            for cell in self.cells[name]
        )

    def _list_labels(self, used: set[str]) -> list[Columns]:
        """Return the columns that may be the label, names before numbers."""
        names = [name for name in self.names if name not in used and not self._is_measured(name)]
        called = [name for name in names if LABEL.search(self._get_key(name))]
        labels = called or [name for name in names if self._repeats(name)]
        labels.sort(key=lambda name: all(map(is_id, map(to_text, self.cells[name]))))
        options: list[Columns] = []
        for name in labels:
            doubt = find_doubt(self.cells[name])
            answers = (doubt and doubt.answers) or (("label", ""),)
            options += [{role: (name, unit)} for role, unit in answers if role == "label"]
        return options[:MAX_NUMBERS]

    def _is_measured(self, name: str) -> bool:
        """Return whether a column can be no label, as fractions and objects can not."""
        doubt = find_doubt(self.cells[name])
        is_flag = name in self.flags and len(self.flags) > 1
        return is_flag or (doubt is not None and not doubt.answers)

    def _repeats(self, name: str) -> bool:
        """Return whether a column of texts has several different cells, but fewer than rows."""
        parts = [part for cell in self.cells[name] for part in _as_list(cell)]
        if not all(isinstance(part, str) and parse_time(part) is None for part in parts):
            return False
        is_inner = any(name.startswith(f"{outer}.") for outer in self.lists)
        num_different = len(set(parts))
        if is_inner or (num_different == 1 and len(parts) > 1):
            return False
        return num_different < len(parts) or len(parts) < MIN_REPEATING

    def _list_layouts(self, has_labels: bool, used: set[str]) -> list[Columns]:
        """Return what the columns of a list without a header may hold, by what their cells are."""
        names = [name for name in self.names if name not in used]
        if len(self.flags) > 1:
            names = [name for name in names if name not in self.flags]
        numbers = [it for it in names if all(parse_time(c) is not None for c in self.cells[it])]
        texts = [name for name in names if name not in numbers]
        label: Columns = {"label": (texts[0], "")} if texts and has_labels else {}
        if len(numbers) == 2:
            options = [span | label for span in self._list_spans(*numbers)]
            return options if label else [*options, {"label": (numbers[1], "")}]
        if len(numbers) != MAX_NUMBERS or label:
            return [label]
        # Class ids are small numbers, and frames large ones.
        first, second, third = numbers
        spans = [
            (self._find_largest(third), third, self._list_spans(first, second)),
            (self._find_largest(first), first, self._list_spans(second, third)),
        ]
        return [span | {"label": (it, "")} for _, it, options in sorted(spans) for span in options]

    def _find_largest(self, name: str) -> float:
        return max(parse_time(cell) or 0 for cell in self.cells[name])

    def _list_spans(self, first: str, second: str) -> list[Columns]:
        """Return two columns of numbers as start and end, if they can be these, and as a length."""
        pairs = list(zip(self.cells[first], self.cells[second], strict=False))
        # Numbers with decimals are seconds, others are frames.
        texts = [to_text(cell) for pair in pairs for cell in pair]
        unit = "frames" if all(re.fullmatch(r"-?\d+", text) for text in texts) else "s"
        length: Columns = {"start": (first, unit), "length": (second, unit)}
        numbers = [(parse_time(start) or 0, parse_time(end) or 0) for start, end in pairs]
        if not all(start < end or start == end == -1 for start, end in numbers):
            return [length]
        return [{"start": (first, unit), "end": (second, unit)}, length]


def _count_dots(columns: Columns) -> int:
    return sum(name.count(".") for name, _ in columns.values())


def _as_list(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [cell]


def _get_unit(name: str) -> str:
    """Return what the name of a column of times says of its unit."""
    for unit, pattern in UNIT_NAMES.items():
        if pattern.search(name.lower()):
            return unit
    return "s"
