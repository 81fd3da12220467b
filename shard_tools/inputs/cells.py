"""What cells and objects of a list say: paths, labels, times and segments, whatever they are written as."""

import json
import math
import re
import unicodedata
from ast import literal_eval
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from adamae.common.errors import InputError
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs.formats import ENDS, LENGTHS, PAIRS, PATHS, STARTS, is_time, to_key
from adamae.shard_tools.inputs.location import ParquetCell
from adamae.shard_tools.temp_table import SURROGATES

MISSING = {"", "nan", "na", "n/a", "null", "<na>", "#n/a"}
WHOLE = re.compile(r"-?\d+(\.0+)?")
NUMBERS = re.compile(r"\d+(\s*[;|, ]\s*\d+)*")
RANGE = re.compile(r"\s*(?:-|–|~|,|\bto\b)\s*")  # between two times
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:[.,]\d+)?)")
SEPARATORS = "|;,"  # of labels
MAX_WORDS = 4  # of a label among several
HALF_A_PAIR = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # which JSON can name, and no file
WRAPPERS = {
    "info",
    "version",
    "data",
    "videos",
    "annotations",
    "annotation",
}  # beside or around a list of objects
ONE_VIDEO = set(
    "path filename video videopath videoid videouid vidname vid id".split()
)  # in an object by no id
ANNOTATIONS = {
    "annotations",
    "annotation",
}  # which are unfolded with and without times; these with times:
PARTS = set(
    """
    segments segment clips clip steps events actions actioninstances narratedactions instances moments intervals labels
    languagequeries""".split()
)
TIMES = re.compile(
    "segment|time|span|clip|window|moment|event|interval|shot|action|range|phase|step"
)  # in names

Row = Sequence[Any]  # cells: text, or whatever JSON and Parquet hold


class Times(NamedTuple):
    """The columns that say where a segment begins and ends."""

    start: int
    end: int | None  # that of the start, if it holds pairs
    scale: float = 1  # seconds (or frames) per unit
    in_frames: bool = False
    is_length: bool = False  # the second column is one
    length: float = math.inf  # where there is no end
    first: int = 0  # number of the first frame


def get_cell(row: Row, column: int | None) -> Any:
    """Return a cell; None if the row ends before it, or there is no such column."""
    return row[column] if column is not None and column < len(row) else None


def to_text(cell: Any) -> str:
    """Return a cell as text for people; bytes that were not UTF-8 are taken for Windows-1252."""
    if not isinstance(cell, str):
        return json.dumps(cell, ensure_ascii=False) if isinstance(cell, (dict, list)) else str(cell)
    if not SURROGATES.search(cell):
        return cell.strip()
    # Escaped bytes, or half a pair, which JSON can name.
    data = cell.encode("utf-8", "replace" if HALF_A_PAIR.search(cell) else "surrogateescape")
    return data.decode("cp1252", "replace").strip()


def to_path(cell: Any) -> str:
    """Return a cell as a path, with the very bytes of the list."""
    return cell.strip() if isinstance(cell, str) else "" if cell is None else to_text(cell)


def is_missing(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.strip().lower() in MISSING
    return cell is None or isinstance(cell, ParquetCell) or cell != cell  # NaN


def parse_time(cell: Any) -> float | None:
    """Read seconds, a frame's number or hh:mm:ss.mmm; None if it is none of them."""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return float(cell)
    text = str(cell).strip()
    if match := CLOCK.fullmatch(text):
        hours, minutes, seconds = match.groups(default="0")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
    with suppress(ValueError):
        return float(text)
    return None


def parse_nested(cell: Any) -> Any:
    """Read the text of a list or an object, as JSON or Python write it; return anything else as it is."""
    if isinstance(cell, str) and cell[:1] in ("[", "(", "{"):
        for parse in (json.loads, literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
                cell = parse(cell)
                break
    return list(cell) if type(cell) in (tuple, set) else cell


def parse_pair(cell: Any) -> list[Any]:
    """Return the start and the end of a segment; nothing if a cell does not hold both."""
    values = (
        re.split(RANGE, cell.strip())
        if isinstance(cell, str) and cell[:1] not in "[("
        else parse_nested(cell)
    )
    return (
        values
        if isinstance(values, list) and len(values) == 2 and None not in map(parse_time, values)
        else []
    )


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
    if separator is None or is_missing(cell):
        label = read_label(cell)
        return None if label is None else (label,)
    parts = parse_nested(cell)
    if not isinstance(parts, list):
        parts = str(cell).split(separator) if separator else [str(cell)]
    parts = [part[0] if isinstance(part, list) and part else part for part in parts]
    return tuple(sorted({label for label in map(read_label, parts) if label is not None}))


def find_separator(texts: list[str], is_named: bool) -> str | None:
    """Return what stands between several labels of a cell, None if there is one; `is_named`: they are called labels.
    Names of classes hold commas, too: these have a space behind, and the parts are no labels of other rows."""
    separator = next((mark for mark in SEPARATORS if any(mark in text for text in texts)), None)
    if all(map(NUMBERS.fullmatch, texts)):
        return None if all(map(WHOLE.fullmatch, texts)) else separator or " "
    if is_named or separator is None:
        return separator
    parts = {part.strip() for text in texts for part in text.split(separator)}
    if max(len(part.split()) for part in parts) > MAX_WORDS:  # of captions
        return None
    is_clear = separator != "," or not any(", " in text for text in texts)
    return separator if is_clear or parts <= {*texts} else None


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
    # -1: to the end, as VideoMAEv2 writes.
    end = (
        start + times.length
        if end in (-1, math.inf)
        else end * times.scale + (start if times.is_length else 0)
    )
    return (None if (start, end) == (0, math.inf) else Segment(start, end, times.in_frames)), None


def dump_fields(names: list[str], row: Row, columns: list[int]) -> str:
    """Return the cells of some columns as a JSON object, "" if all are missing."""
    cells = {names[n]: row[n] for n in columns if n < len(row) and not is_missing(row[n])}
    values = {
        name: to_text(cell) if isinstance(cell, str) else cell for name, cell in cells.items()
    }
    return json.dumps(values, ensure_ascii=False, default=str) if values else ""


def list_records(value: Any, where: str) -> list[Any]:
    """Return the entries of a list, of an object by id, or of what either is wrapped in."""
    if isinstance(value, list):
        return value
    if any(to_key(name) in ONE_VIDEO and isinstance(entry, str) for name, entry in value.items()):
        return [value]
    if isinstance(value.get("database"), dict):  # ActivityNet's, HACS', THUMOS', COIN's
        value = value["database"]
    tables = [key for key, entries in value.items() if _are_objects(entries)]
    if tables and {*value} & WRAPPERS:
        if len(tables) > 1:
            raise InputError(
                f"{where} holds several lists ({', '.join(tables)}): give one in a file of its own"
            )
        return list_records(value[tables[0]], where)
    items = (
        (key, item)
        for key, entry in value.items()
        for item in (entry if isinstance(entry, list) else [entry])
    )
    return [
        {"key" if "id" in item else "id": key, **item} if isinstance(item, dict) else [key, item]
        for key, item in items
    ]


def unfold(record: Any) -> list[Any]:
    """Return an object once per annotation in it, or segment of parallel lists; anything else, or with none, itself."""
    cells = (
        {name: parse_nested(cell) for name, cell in record.items()}
        if isinstance(record, dict)
        else {}
    )
    for name, cell in cells.items():
        entries = [cell] if isinstance(cell, dict) and name in ANNOTATIONS else cell
        if _are_objects(entries) and (
            name in ANNOTATIONS or (to_key(name) in PARTS and any(map(has_times, entries)))
        ):
            outer = {key: value for key, value in record.items() if key != name}
            return [part for entry in entries for part in unfold(_join(outer, name, entry))]
    lengths = {len(cell) for name, cell in cells.items() if _are_times(to_key(name), cell)}
    if len(lengths) != 1:
        return [record]
    length = lengths.pop()
    parallel = {
        name: cell for name, cell in cells.items() if isinstance(cell, list) and len(cell) == length
    }
    # ActivityNet Captions, Panda-70M
    return [
        {**record, **{name: cell[number] for name, cell in parallel.items()}}
        for number in range(length)
    ]


def _join(outer: dict[str, Any], name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of a part of a video: its own times and labels, but the video's id."""
    own = {
        f"{name} {key}" if key in outer and to_key(key) in PATHS else key: value
        for key, value in entry.items()
    }
    times = f"{STARTS}|{ENDS}|{'|'.join(PAIRS | LENGTHS)}" if has_times(entry) else "-"
    others = {
        f"video's {key}" if key in own or re.fullmatch(times, to_key(key)) else key: outer[key]
        for key in outer
    }
    return others | own


def has_times(entry: dict[str, Any]) -> bool:
    """Whether an object says where a segment is, itself or in a list of objects."""
    return any(
        (re.fullmatch(STARTS, to_key(name)) and parse_time(value) is not None)
        or (to_key(name) in PAIRS and (parse_pair(value) or _are_times(to_key(name), value)))
        or (_are_objects(value) and any(map(has_times, value)))
        for name, value in entry.items()
    )


def holds_segments(name: str, cell: Any) -> bool:
    """Whether a cell says where segments are, inside of lists or objects."""
    cell = parse_nested(cell)
    if isinstance(cell, dict):
        return has_times(cell) or any(holds_segments(key, value) for key, value in cell.items())
    if _are_objects(cell) and to_key(name) in PAIRS:
        return True
    if parse_pair(cell) or not isinstance(cell, list):
        return bool(parse_pair(cell)) and to_key(name) in PAIRS
    if cell and all(map(parse_pair, cell)):
        return TIMES.search(to_key(name)) is not None
    return any(holds_segments(name, value) for value in cell if isinstance(value, (list, dict)))


def _are_objects(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)
    )


def _are_times(key: str, value: Any) -> bool:
    """Whether a list holds segments, or the starts or the ends of some, by its name."""
    if key in PAIRS:
        return isinstance(value, list) and bool(value) and all(map(parse_pair, value))
    return (
        is_time(key)
        and isinstance(value, list)
        and bool(value)
        and None not in map(parse_time, value)
    )
