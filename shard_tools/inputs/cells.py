"""Read the paths, labels, times and segments in the cells and JSON objects of lists."""

import json
import math
import re
import unicodedata
from ast import literal_eval
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from adamae.common.errors import InputError
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs.location import ParquetCell
from adamae.shard_tools.inputs.vocabulary import (
    ENDS,
    LENGTHS,
    PAIRS,
    PATHS,
    STARTS,
    is_time,
    to_key,
)
from adamae.shard_tools.temp_table import SURROGATES

MISSING = {"", "nan", "na", "n/a", "null", "<na>", "#n/a"}
WHOLE = re.compile(r"-?\d+(\.0+)?")
# Whole numbers in one cell: 3, or 0,2,4.
NUMBERS = re.compile(r"\d+(\s*[;|, ]\s*\d+)*")
# The text between the start and the end of a segment in one cell.
RANGE = re.compile(r"\s*(?:-|–|~|,|\bto\b)\s*")
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:[.,]\d+)?)")
# Characters that may separate labels; the first of these that any cell has is tried.
SEPARATORS = "|;,"
# The most words of a label in a cell of several; cells with longer parts are captions.
MAX_WORDS = 4
# Half of a surrogate pair, which JSON can write and no file name can hold. U+DC80 to U+DCFF are
# left out: Python reads bytes that are not UTF-8 as these.
HALF_A_PAIR = re.compile("[\ud800-\udc7f\udd00-\udfff]")
# Keys that show that an object wraps a list: they name the list, or facts beside it.
WRAPPERS = {"info", "version", "data", "videos", "annotations", "annotation"}
# Keys of an object that describes one video; an object without them maps ids to videos.
ONE_VIDEO = set("path filename video videopath videoid videouid vidname vid id".split())
# Keys of an object or a list of objects, each of which is a sample, with or without times.
ANNOTATIONS = {"annotations", "annotation"}
# Keys of lists of objects, each of which is a sample if any of them has times.
PARTS = set(
    """
    segments segment clips clip steps events actions actioninstances narratedactions instances
    moments intervals labels languagequeries""".split()
)
# Parts of the names of columns in which lists of pairs are segments.
TIMES = re.compile(
    "segment|time|span|clip|window|moment|event|interval|shot|action|range|phase|step"
)
# The names of columns of starts, ends, pairs and lengths of segments.
SEGMENT_COLUMNS = re.compile(f"{STARTS}|{ENDS}|{'|'.join(PAIRS | LENGTHS)}")

# The cells of a row: text, or any value that JSON or Parquet can hold.
Row = Sequence[Any]


class Times(NamedTuple):
    """The columns that say where a segment begins and ends."""

    start: int
    # The same column as `start` if its cells hold [start, end]; None if there is only a start.
    end: int | None
    # Seconds (or frames, with `in_frames`) per unit of the cells: 0.001 for milliseconds.
    scale: float = 1
    in_frames: bool = False
    # Whether the column `end` holds lengths.
    is_length: bool = False
    # The length of a segment whose end is missing.
    length: float = math.inf
    # The number of the first frame.
    first: int = 0


def get_cell(row: Row, column: int | None) -> Any:
    """Return a cell; None if the row ends before it, or there is no such column."""
    if column is None or column >= len(row):
        return None
    return row[column]


def to_text(cell: Any) -> str:
    """Return a cell as text to be shown; bytes that are not UTF-8 are read as Windows-1252."""
    if isinstance(cell, (dict, list)):
        return json.dumps(cell, ensure_ascii=False)
    if not isinstance(cell, str):
        return str(cell)
    if not SURROGATES.search(cell):
        return cell.strip()
    # A surrogate is an escaped byte, which can be restored, or half of a pair, which cannot.
    errors = "surrogateescape"
    if HALF_A_PAIR.search(cell):
        errors = "replace"
    data = cell.encode("utf-8", errors)
    return data.decode("cp1252", "replace").strip()


def to_path(cell: Any) -> str:
    """Return a cell as a path, with the list's bytes unchanged; "" if the cell is None."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell.strip()
    return to_text(cell)


def is_missing(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.strip().lower() in MISSING
    is_nan = cell != cell
    return cell is None or isinstance(cell, ParquetCell) or is_nan


def parse_time(cell: Any) -> float | None:
    """Read a number (of seconds or of a frame) or hh:mm:ss.mmm; return None for other cells."""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return float(cell)
    text = str(cell).strip()
    match = CLOCK.fullmatch(text)
    if match:
        hours, minutes, seconds = match.groups(default="0")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
    with suppress(ValueError):
        return float(text)
    return None


def parse_nested(cell: Any) -> Any:
    """Read the text of a list or an object, in JSON or Python; return other cells unchanged."""
    value = cell
    if isinstance(cell, str) and cell.startswith(("[", "(", "{")):
        # Tables that were written in Python hold ['a', 'b'], which is not JSON.
        for parse in (json.loads, literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                value = parse(cell)
                break
    if type(value) in (tuple, set):
        return list(value)
    return value


def parse_pair(cell: Any) -> list[Any]:
    """Return [start, end] of a segment; [] if the cell does not hold both.

    "00:01 - 00:04" gives ["00:01", "00:04"]; "[1.5, 2]" and [1.5, 2] both give [1.5, 2].
    """
    if isinstance(cell, str) and not cell.startswith(("[", "(")):
        values = re.split(RANGE, cell.strip())
    else:
        values = parse_nested(cell)
    if not isinstance(values, list) or len(values) != 2:
        return []
    if any(parse_time(value) is None for value in values):
        return []
    return values


def read_label(cell: Any) -> str | None:
    """Return the label of a cell as text; None if the cell is missing."""
    if is_missing(cell):
        return None
    text = to_text(cell)
    if not text.isascii():
        # A composed letter (é) and a decomposed one (e and an accent) look the same.
        text = unicodedata.normalize("NFC", text)
    if WHOLE.fullmatch(text):
        # pandas writes 1 as 1.0 if other rows of the column have no value.
        text = text.partition(".")[0]
    return text


def read_labels(cell: Any, separator: str | None) -> tuple[str, ...] | None:
    """Return the labels of a cell, sorted; None if the cell is missing.

    `separator` is None if a cell is one label, "" if it is a list, else the text between labels.
    """
    if separator is None or is_missing(cell):
        label = read_label(cell)
        return None if label is None else (label,)
    parts = parse_nested(cell)
    if not isinstance(parts, list):
        parts = str(cell).split(separator) if separator else [str(cell)]
    labels = set()
    for part in parts:
        # A part may be [class, start, end].
        label = read_label(part[0] if isinstance(part, list) and part else part)
        if label is not None:
            labels.add(label)
    return tuple(sorted(labels))


def find_separator(texts: list[str], is_named: bool) -> str | None:
    """Return the text between several labels of a cell; None if a cell is one label.

    `is_named` says that the column's name is a plural, such as `labels`. Commas may also be part of
    class names. If some comma has a space behind it, commas separate labels only if each part is
    the whole label of some row: "run, walk" is two labels if other rows are "run" and "walk", and
    "dog, barking" is one label.
    """
    separator = None
    for mark in SEPARATORS:
        if any(mark in text for text in texts):
            separator = mark
            break
    if all(map(NUMBERS.fullmatch, texts)):
        if all(map(WHOLE.fullmatch, texts)):
            return None
        return separator or " "
    if is_named or separator is None:
        return separator
    parts: set[str] = set()
    for text in texts:
        parts.update(part.strip() for part in text.split(separator))
    if any(len(part.split()) > MAX_WORDS for part in parts):
        return None
    may_be_in_names = separator == "," and any(", " in text for text in texts)
    if may_be_in_names and not parts <= set(texts):
        return None
    return separator


def read_segment(row: Row, times: Times) -> tuple[Segment | None, str | None]:
    """Return the segment of a row (None: the whole video), and a problem (None: no problem)."""
    first = get_cell(row, times.start)
    last = get_cell(row, times.end)
    if times.start == times.end and not is_missing(first):
        first, last = parse_pair(first) or (first, "")
    if is_missing(first) and is_missing(last):
        return None, None
    start: float | None = 0
    if not is_missing(first):
        start = parse_time(first)
    end: float | None = math.inf
    if not is_missing(last):
        end = parse_time(last)
    if start is None or end is None:
        return None, f"its segment from {to_text(first)!r} to {to_text(last)!r} is no time"
    if start >= times.first:
        start -= times.first
    start *= times.scale
    # VideoMAEv2 writes -1 for a segment that ends with the video.
    if end in (-1, math.inf):
        end = start + times.length
    else:
        end *= times.scale
        if times.is_length:
            end += start
    if (start, end) == (0, math.inf):
        return None, None
    return Segment(start, end, times.in_frames), None


def dump_fields(names: list[str], row: Row, columns: list[int]) -> str:
    """Return the cells of `columns` as a JSON object by name; "" if all of them are missing."""
    fields = {}
    for column in columns:
        if column >= len(row) or is_missing(row[column]):
            continue
        cell = row[column]
        fields[names[column]] = to_text(cell) if isinstance(cell, str) else cell
    if not fields:
        return ""
    return json.dumps(fields, ensure_ascii=False, default=str)


def list_records(value: Any, where: str) -> list[Any]:
    """Return the records of a list, or of an object whose keys are ids; either may be wrapped.

    {"version": "1", "videos": [a, b]} has the records a and b; {"x": {"label": 0}} has
    {"id": "x", "label": 0}; {"x": [0, 1]} has ["x", 0] and ["x", 1]. Raise InputError if an object
    wraps several lists.
    """
    if isinstance(value, list):
        return value
    if any(to_key(name) in ONE_VIDEO and isinstance(entry, str) for name, entry in value.items()):
        return [value]
    # ActivityNet, HACS, THUMOS and COIN wrap their records so.
    database = value.get("database")
    if isinstance(database, dict):
        value = database
    tables = [name for name, entries in value.items() if _are_objects(entries)]
    if tables and not WRAPPERS.isdisjoint(value):
        if len(tables) > 1:
            what = f"{where} holds several lists ({', '.join(tables)})"
            raise InputError(f"{what}: give one in a file of its own")
        return list_records(value[tables[0]], where)
    records: list[Any] = []
    for key, entries in value.items():
        for entry in entries if isinstance(entries, list) else [entries]:
            if not isinstance(entry, dict):
                records.append([key, entry])
            elif "id" in entry:
                records.append({"key": key, **entry})
            else:
                records.append({"id": key, **entry})
    return records


def unfold(record: Any) -> list[Any]:
    """Return an object for each annotation in a record, or for each segment of its parallel lists.

    Return [record] if it has neither.

    {"id": "v", "annotations": [{"label": 0}, {"label": 1}]} becomes {"id": "v", "label": 0} and
    {"id": "v", "label": 1}. {"id": "v", "start": [1, 3], "end": [2, 4]} becomes {"id": "v",
    "start": 1, "end": 2} and {"id": "v", "start": 3, "end": 4}.
    """
    if not isinstance(record, dict):
        return [record]
    values = {name: parse_nested(cell) for name, cell in record.items()}
    for name, value in values.items():
        entries = value
        if isinstance(value, dict) and name in ANNOTATIONS:
            entries = [value]
        if _are_annotations(name, entries):
            outer = {key: cell for key, cell in record.items() if key != name}
            parts = []
            for entry in entries:
                parts.extend(unfold(_join(outer, name, entry)))
            return parts
    # ActivityNet Captions, HowTo100M and Panda-70M have parallel lists: times, sentences, ….
    lengths = {len(value) for name, value in values.items() if _are_times(to_key(name), value)}
    if len(lengths) != 1:
        return [record]
    length = lengths.pop()
    segments = [dict(record) for _ in range(length)]
    for name, value in values.items():
        if isinstance(value, list) and len(value) == length:
            for segment, part in zip(segments, value, strict=True):
                segment[name] = part
    return segments


def _join(outer: dict[str, Any], name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Join the record of a part of a video to the video's: the part's times, the video's id.

    `outer` is the video, without its list `name`; `entry` is an entry of the list. The part
    {"id": 3, "segment": [1, 2]} of "steps" and the video {"id": "v", "duration": 9} give
    {"id": "v", "video's duration": 9, "steps id": 3, "segment": [1, 2]}.
    """
    own = {}
    for key, value in entry.items():
        if key in outer and to_key(key) in PATHS:
            # The part's id must not replace the video's id.
            key = f"{name} {key}"
        own[key] = value
    joined = {}
    has_own_times = has_times(entry)
    for key, value in outer.items():
        is_time_of_video = has_own_times and SEGMENT_COLUMNS.fullmatch(to_key(key))
        if key in own or is_time_of_video:
            key = f"video's {key}"
        joined[key] = value
    return joined | own


def has_times(entry: Mapping[str, Any]) -> bool:
    """Return whether an object has the times of a segment, itself or in a list of objects."""
    for name, value in entry.items():
        key = to_key(name)
        if re.fullmatch(STARTS, key) and parse_time(value) is not None:
            return True
        if key in PAIRS and (parse_pair(value) or _are_times(key, value)):
            return True
        if _are_objects(value) and any(map(has_times, value)):
            return True
    return False


def holds_segments(name: str, cell: Any) -> bool:
    """Return whether a cell of the column `name` has times of segments, at any depth."""
    value = parse_nested(cell)
    key = to_key(name)
    if isinstance(value, dict):
        if has_times(value):
            return True
        return any(holds_segments(inner_name, inner) for inner_name, inner in value.items())
    if parse_pair(value):
        return key in PAIRS
    if _are_objects(value) and key in PAIRS:
        return True
    if not isinstance(value, list):
        return False
    if value and all(map(parse_pair, value)):
        return TIMES.search(key) is not None
    return any(holds_segments(name, part) for part in value if isinstance(part, (list, dict)))


def _are_objects(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, dict) for entry in value)


def _are_annotations(name: str, value: Any) -> bool:
    """Return whether `value`, which has the key `name`, is a list of objects that are samples."""
    if not _are_objects(value):
        return False
    if name in ANNOTATIONS:
        return True
    return to_key(name) in PARTS and any(map(has_times, value))


def _are_times(key: str, value: Any) -> bool:
    """Return whether a list of the name `key` holds pairs, starts or ends of segments."""
    if not isinstance(value, list) or not value:
        return False
    if key in PAIRS:
        return all(map(parse_pair, value))
    return is_time(key) and all(parse_time(part) is not None for part in value)
