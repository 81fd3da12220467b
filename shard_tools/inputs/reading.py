"""What the columns of a list hold, as `--columns path=file,label=class,rest=fields` writes it."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from adamae.common.errors import InputError
from adamae.common.logging import printable
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs.cells import Row, is_missing, parse_pair, parse_time, to_text

# What a column may hold: segments are from `start` to `end`, or `length` long, or a `segment` is a
# cell with its start and its end. `split`, `group` and `caption` are kept with each sample.
ROLES = "path label start end length segment split group caption".split()
TIMES = ("start", "end", "length", "segment")
# Seconds, or frames, per unit of a time.
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "frames": 1.0}
UNIT_TEXTS = {"s": "seconds"}
# What may stand between the labels of a cell.
MARKS = {"semicolons": ";", "commas": ",", "bars": "|", "spaces": " "}
REST = "rest"
FIELDS = "fields"
IGNORED = "ignored"
# The most columns that a message names.
NUM_NAMED = 30


@dataclass(frozen=True)
class Reading:
    """What the columns of a list hold.

    `path=file,start=t0:ms,end=t1:ms,rest=fields` has the columns {"path": "file", "start": "t0",
    "end": "t1"} and the units {"start": "ms", "end": "ms"}.
    """

    # The names of columns by role.
    columns: Mapping[str, str]
    # By role: one of UNITS for a time (s if absent), one of MARKS for a label (none if absent).
    units: Mapping[str, str]
    # What becomes of the other columns: FIELDS are kept with each sample; "" if there are none.
    rest: str = ""

    @classmethod
    def parse(cls, text: str) -> "Reading":
        """Read what __str__ writes. Raise InputError if it is not like that."""
        columns: dict[str, str] = {}
        units: dict[str, str] = {}
        rest = ""
        for word in re.split(r",(?=\s*\w+=)", text):
            role, equals, name = word.strip().partition("=")
            if not equals or not name:
                raise InputError(f"--columns: {word!r} is not like path=NAME")
            if role in columns or (role == REST and rest):
                raise InputError(f"--columns: {role}= stands there twice")
            if role == REST:
                if name not in (FIELDS, IGNORED):
                    raise InputError(f"--columns: rest is {FIELDS} or {IGNORED}, not {name}")
                rest = name
                continue
            if role not in ROLES:
                nearest = difflib.get_close_matches(role, ROLES, 1) or ROLES
                what = f"--columns: {role!r} is nothing that a column may hold"
                raise InputError(f"{what}: did you mean {' or '.join(nearest)}?")
            column, _, unit = name.rpartition(":")
            if column and unit in (UNITS if role in TIMES else MARKS if role == "label" else ()):
                units[role] = unit
                name = column
            if name in columns.values():
                raise InputError(f"--columns: {name} stands there twice")
            columns[role] = name
        return cls(columns, units, rest)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        words = []
        for role, name in self.columns.items():
            unit = self.units.get(role, "s")
            words.append(f"{role}={name}:{unit}".removesuffix(":s"))
        if self.rest:
            words.append(f"{REST}={self.rest}")
        return ",".join(words)

    def describe(self, role: str) -> str:
        """Return a role with its unit: "start (seconds)", "label (several, commas between)"."""
        unit = self.units.get(role, "s" if role in TIMES else "")
        if not unit:
            return role
        if role in TIMES:
            return f"{role} ({UNIT_TEXTS.get(unit, unit)})"
        return f"{role} (several, {unit} between them)"

    def drop(self, *roles: str) -> "Reading":
        """Return the reading without some columns, which are left to the rest."""
        columns = {role: name for role, name in self.columns.items() if role not in roles}
        units = {role: unit for role, unit in self.units.items() if role not in roles}
        if len(columns) == len(self.columns):
            return self
        return Reading(columns, units, self.rest or FIELDS)

    def resolve(self, names: Sequence[str], where: str) -> "Reading":
        """Return the reading with the names of a list's columns for numbers from 1.

        Raise InputError if a column does not exist, or some are not accounted for.
        """
        if "path" not in self.columns:
            raise InputError("--columns: path=NAME is missing, the column of the videos")
        _require_times(self.columns)
        columns = {role: _resolve(name, names, where) for role, name in self.columns.items()}
        unnamed = [name for name in names if name not in columns.values()]
        if unnamed and not self.rest:
            what = f"{where} has other columns, too: {_join(unnamed)}"
            fix = "keep them with each sample (rest=fields) or leave them out (rest=ignored)"
            raise InputError(f"--columns: {what}: {fix}")
        return replace(self, columns=columns)

    @property
    def in_frames(self) -> bool:
        return any(self.units.get(role) == "frames" for role in TIMES)

    def choose_lists(self, lists: Mapping[str, Iterable[str]]) -> set[str]:
        """Return the lists of objects that hold a column; each of their objects is a row.

        `lists` are those by column. Raise InputError if one is not within the other: no object of
        one belongs to the other's.
        """
        chosen = set[str]().union(*(lists.get(name, ()) for name in self.columns.values()))
        for outer, inner in pairwise(sorted(chosen, key=len)):
            if not inner.startswith(f"{outer}."):
                raise InputError(f"--columns: {outer} and {inner} are two lists: choose one")
        return chosen

    def list_parts(self, row: Row) -> Iterator[Row]:
        """Yield a row for each segment, or each path, where a cell is a list of them.

        Lists of the same length hold a cell for each: of {"path": "a.mp4", "segment": [[0, 2],
        [3, 5]], "label": ["run", "sit"]}, the second row has the segment [3, 5] and the label sit.
        """
        columns = self.columns
        times = row.get(columns.get("segment") or columns.get("start", ""))
        paths = row.get(columns["path"])
        length = 0
        if isinstance(times, list) and not ("segment" in columns and parse_pair(times)):
            length = len(times)
        elif isinstance(paths, list):
            length = len(paths)
        if not length:
            yield row
            return
        for number in range(length):
            part = {}
            for name, cell in row.items():
                is_parallel = isinstance(cell, list) and len(cell) == length
                part[name] = cell[number] if is_parallel else cell
            yield part

    def get(self, role: str, row: Row) -> Any:
        """Return the cell of a role; None if there is none."""
        return row.get(self.columns.get(role, ""))

    def read_segment(
        self, row: Row, first: int, seconds: float
    ) -> tuple[Segment | None, str | None]:
        """Return the segment of a row (None: the whole video), and a problem (None: none).

        Frames count from `first`; a segment without an end is `seconds` long.
        """
        roles = ("start", "length" if "length" in self.columns else "end")
        cells = [self.get(role, row) for role in roles]
        if "segment" in self.columns:
            roles = ("segment", "segment")
            cell = self.get("segment", row)
            cells = parse_pair(cell) or [cell, None]
        if all(map(is_missing, cells)):
            return None, None
        start = 0.0 if is_missing(cells[0]) else parse_time(cells[0])
        end = math.inf if is_missing(cells[1]) else parse_time(cells[1])
        if start is None or end is None:
            texts = " to ".join(repr(to_text(cell)) for cell in cells if cell is not None)
            return None, f"its segment from {texts} is no time"
        # Lists write -1 twice for a whole video.
        if start == end == -1:
            return None, None
        if start >= first:
            start -= first
        scale, end_scale = (UNITS[self.units.get(role, "s")] for role in roles)
        start *= scale
        # VideoMAEv2 writes -1 for a segment that ends with the video.
        if end in (-1, math.inf):
            end = start + seconds
        else:
            end *= end_scale
            if "length" in roles:
                end += start
        if (start, end) == (0, math.inf):
            return None, None
        return Segment(start, end, self.in_frames), None

    @cached_property
    def _keys(self) -> dict[str, str]:
        """The keys of fields by column; "" for paths, labels and times, which are no fields."""
        kept = ("split", "group", "caption")
        return {name: role if role in kept else "" for role, name in self.columns.items()}

    def dump_fields(self, row: Row, title: Callable[[str], str]) -> str:
        """Return what is kept with a sample as a JSON object; "" if it has none of it.

        `title` returns the keys of columns that have no role.
        """
        fields = {}
        for name, cell in row.items():
            key = self._keys.get(name)
            if key is None and self.rest == FIELDS:
                key = title(name)
            if key and not is_missing(cell):
                fields[key] = to_text(cell) if isinstance(cell, str) else cell
        if not fields:
            return ""
        return json.dumps(fields, ensure_ascii=False, default=str)


def _require_times(columns: Mapping[str, str]) -> None:
    """Raise InputError if the columns of times are not those of a segment."""
    times = [role for role in TIMES if role in columns]
    if times not in ([], ["start", "end"], ["start", "length"], ["segment"]):
        what = f"--columns has {' and '.join(times)}"
        raise InputError(f"{what}: a segment needs start and end, start and length, or segment")


def _resolve(name: str, names: Sequence[str], where: str) -> str:
    """Return the column of a name, or of a number from 1. Raise InputError if there is none."""
    if name in names:
        return name
    if name.isdecimal() and 0 < int(name) <= len(names):
        return names[int(name) - 1]
    nearest = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {printable(nearest[0])}?" if nearest else "give one, or its number from 1"
    column, _, unit = name.rpartition(":")
    if column in names:
        hint = f"{unit} is none of {', '.join(UNITS)} (of times) and {', '.join(MARKS)} (of labels)"
    what = f"{where} has no column {name}, only {_join(names)}"
    raise InputError(f"--columns: {what}: {hint}")


def _join(names: Sequence[str]) -> str:
    text = ", ".join(map(printable, names[:NUM_NAMED]))
    return f"{text}, …" if len(names) > NUM_NAMED else text
