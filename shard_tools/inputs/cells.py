"""What the cells of a list say: paths, labels, times and segments, whatever they are written as."""

import json
import math
import re
import unicodedata
from ast import literal_eval
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from shard_tools.inputs.item import ParquetCell, Segment

MISSING = {"", "nan", "na", "n/a", "null", "<na>", "#n/a"}
WHOLE = re.compile(r"-?\d+(\.0+)?")
NUMBERS = re.compile(r"\d+(\s*[;|, ]\s*\d+)*")
RANGE = re.compile(r"\s*(?:-|–|~|,|\bto\b)\s*")  # between two times
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:[.,]\d+)?)")
TIMED = re.compile(r"(\S+) +([\d.]+) +([\d.]+)")  # Charades: class, start, end
SEPARATORS = "|;,"  # of labels
MAX_WORDS = 4  # of a label among several
HALF_A_PAIR = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # which JSON can name, and no file

Row = Sequence[Any]  # cells: text, or whatever JSON and Parquet hold


class Times(NamedTuple):
    """The columns that say where a segment begins and ends."""

    start: int
    end: int | None  # that of the start, if it holds pairs; None, if all segments are `length` long
    scale: float = 1  # seconds (or frames) per unit
    in_frames: bool = False
    is_length: bool = False  # the second column is one
    length: float = math.inf
    first: int = 0  # number of the first frame


def get_cell(row: Row, column: int | None) -> Any:
    """Return a cell; None if the row ends before it, or there is no such column."""
    return row[column] if column is not None and column < len(row) else None


def to_text(cell: Any) -> str:
    """Return a cell as text for people; bytes that were not UTF-8 are taken for Windows-1252."""
    if not isinstance(cell, str):
        return json.dumps(cell, ensure_ascii=False) if isinstance(cell, (dict, list)) else str(cell)
    try:
        if not cell.isascii():
            cell.encode()
        return cell.strip()
    except UnicodeEncodeError:  # surrogates: escaped bytes, or half a pair, which JSON can name
        data = cell.encode("utf-8", "replace" if HALF_A_PAIR.search(cell) else "surrogateescape")
        return data.decode("cp1252", "replace").strip()


def to_path(cell: Any) -> str:
    """Return a cell as a path, with the very bytes of the list."""
    return cell.strip() if isinstance(cell, str) else "" if cell is None else to_text(cell)


def is_missing(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.strip().lower() in MISSING
    return cell is None or cell != cell  # NaN alone differs from itself


def parse_time(cell: Any) -> float | None:
    """Read seconds, a frame's number or hh:mm:ss.mmm; None if it is none of them."""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return float(cell)
    text = str(cell).strip()
    if match := CLOCK.fullmatch(text):
        hours, minutes, seconds = match.groups(default="0")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
    try:
        return float(text)
    except ValueError:
        return None


def parse_nested(cell: Any) -> Any:
    """Read the text of a list or an object, as JSON or Python write it; return anything else as it is."""
    if isinstance(cell, str) and cell[:1] in ("[", "(", "{"):
        for parse in (json.loads, literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                cell = parse(cell)
                break
    return list(cell) if isinstance(cell, (tuple, set)) else cell


def parse_list(cell: Any) -> list[Any] | None:
    return value if isinstance(value := parse_nested(cell), list) else None


def parse_pair(cell: Any) -> list[Any]:
    """Return the start and the end of a segment; nothing if a cell does not hold both."""
    values = re.split(RANGE, cell.strip()) if isinstance(cell, str) and cell[:1] not in "[(" else parse_list(cell)
    return values if values and len(values) == 2 and None not in map(parse_time, values) else []


def is_pair(cell: Any) -> bool:
    return bool(parse_pair(cell))


def read_label(cell: Any) -> str | None:
    """Return a label as text; None if there is none. pandas makes 1.0 of 1 in columns that lack some."""
    if is_missing(cell):
        return None
    text = to_text(cell)
    if not text.isascii():  # composed and decomposed letters look alike
        text = unicodedata.normalize("NFC", text)
    return text.partition(".")[0] if WHOLE.fullmatch(text) else text


def read_labels(cell: Any, separator: str | None) -> tuple[str, ...] | None:
    """Return the labels of a cell: one if there is no separator, those of a list or at it otherwise."""
    if separator is None:
        label = read_label(cell)
        return None if label is None else (label,)
    parts = parse_list(cell)
    if parts is None:
        if is_missing(cell):
            return None
        texts = str(cell).split(separator) if separator else [str(cell)]
        parts = [match[1] if (match := TIMED.fullmatch(text.strip())) else text for text in texts]
    parts = [part[0] if isinstance(part, list) and part else part for part in parts]
    return tuple(sorted({label for label in map(read_label, parts) if label is not None}))


def find_separator(texts: list[str], is_named: bool) -> str | None:
    """Return what stands between several labels of a cell, None if there is one; `is_named`: they are called labels.

    Names of classes hold commas, too: these have a space behind, and the parts are no labels of other rows.
    """
    separator = next((mark for mark in SEPARATORS if any(mark in text for text in texts)), None)
    if all(map(NUMBERS.fullmatch, texts)):
        return None if all(map(WHOLE.fullmatch, texts)) else separator or " "
    if is_named and any(map(TIMED.match, texts)):
        return ";"
    if is_named or separator is None:
        return separator
    parts = {part.strip() for text in texts for part in text.split(separator)}
    if max(len(part.split()) for part in parts) > MAX_WORDS:  # of captions
        return None
    is_clear = separator != "," or not any(", " in text for text in texts)
    return separator if is_clear or parts <= {*texts} else None


def are_starts_and_ends(text: str) -> bool:
    """Whether numbers are so many, and grow so, as the starts and ends of segments do."""
    numbers = [int(number) for number in text.split()]
    return len(numbers) % 2 == 0 and all(one < other for one, other in pairwise(numbers))


def read_segment(row: Row, times: Times) -> tuple[Segment | None, str | None]:
    """Return the segment of a row, None if it is the whole video, and why it is none."""
    first, last = get_cell(row, times.start), get_cell(row, times.end)
    if times.start == times.end and not is_missing(first):
        first, last = parse_pair(first) or (first, "")
    if is_missing(first) and is_missing(last):
        return None, None
    start = 0.0 if is_missing(first) else parse_time(first)
    end = math.inf if is_missing(last) else parse_time(last)
    if start is None or end is None:
        return None, f"its segment from {to_text(first)!r} to {to_text(last)!r} is no time"
    start = (start - times.first if start >= times.first else start) * times.scale
    if times.end is None:
        end = start + times.length
    elif end == -1:  # to the end, as VideoMAEv2 writes
        end = math.inf
    else:
        end = end * times.scale + (start if times.is_length else 0)
    return (None if (start, end) == (0, math.inf) else Segment(start, end, times.in_frames)), None


def dump_fields(names: list[str], row: Row, columns: list[int]) -> str:
    """Return the cells of some columns as a JSON object, "" if all are missing."""
    cells = {names[n]: row[n] for n in columns if n < len(row) and not is_missing(row[n])}
    values = {name: to_text(cell) if isinstance(cell, str) else cell for name, cell in cells.items()}
    values = {name: value for name, value in values.items() if not isinstance(value, ParquetCell)}
    return json.dumps(values, ensure_ascii=False, default=str) if values else ""
