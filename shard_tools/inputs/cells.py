"""Read the paths, labels and times in the cells of lists, and the objects of JSON."""

import json
import re
import unicodedata
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from adamae.shard_tools.temp_table import SURROGATES

MISSING = {"", "nan", "na", "n/a", "null", "<na>", "#n/a"}
WHOLE = re.compile(r"-?\d+(\.0+)?")
# The text between the start and the end of a segment in one cell.
RANGE = re.compile(r"\s*(?:-|–|~|,|\bto\b)\s*")
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:[.,]\d+)?)")
# Half of a surrogate pair, which JSON can write and no file name can hold. U+DC80 to U+DCFF are
# left out: Python reads bytes that are not UTF-8 as these.
HALF_A_PAIR = re.compile("[\ud800-\udc7f\udd00-\udfff]")

# A row or an object of a list: cells, which are text or any value of JSON or Parquet, by column.
Row = Mapping[str, Any]


def to_text(cell: Any) -> str:
    """Return a cell as text to be shown; bytes that are not UTF-8 are read as Windows-1252."""
    if isinstance(cell, (dict, list)):
        return json.dumps(cell, ensure_ascii=False, default=str)
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
    """Return a cell as a path, with the list's bytes unchanged; "" if the cell is missing."""
    if is_missing(cell):
        return ""
    if isinstance(cell, str):
        return cell.strip()
    return to_text(cell)


def is_missing(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.strip().lower() in MISSING
    is_nan = cell != cell
    return cell is None or is_nan


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
        # Tables of half of Europe have decimal commas.
        return float(text.replace(",", "."))
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

    "00:01 - 00:04" gives ["00:01", "00:04"], and [1.5, 2] is returned as it is.
    """
    values = re.split(RANGE, cell.strip()) if isinstance(cell, str) else cell
    if not isinstance(values, list) or len(values) != 2:
        return []
    if any(parse_time(value) is None for value in values):
        return []
    return values


def may_be_spans(numbers: Sequence[float]) -> bool:
    """Return whether numbers may be starts and ends: an even count, increasing, as 16 24 30 60."""
    return len(numbers) % 2 == 0 and list(numbers) == sorted(set(numbers))


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


def read_labels(cell: Any, mark: str | None = None) -> tuple[str, ...] | None:
    """Return the labels of a cell, sorted; None if the cell is missing.

    A list holds several labels, and so does a text with `mark` between them.
    """
    if is_missing(cell):
        return None
    if isinstance(cell, list):
        parts = cell
    elif mark:
        parts = to_text(cell).split(mark)
    else:
        label = read_label(cell)
        return None if label is None else (label,)
    labels = map(read_label, parts)
    return tuple(sorted({label for label in labels if label is not None}))


def is_list_of_objects(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, dict) for entry in value)


def list_cells(
    record: Row, prefix: str = "", lists: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield (column, cell, lists) of an object, and of all objects in it.

    `lists` are the columns of the lists of objects that the cell lies in, the outermost first.
    {"id": 3, "steps": [{"label": "run"}, {"label": "sit"}]} gives ("id", 3, ()), ("steps.label",
    "run", ("steps",)) and ("steps.label", "sit", ("steps",)).
    """
    for name, value in record.items():
        column = prefix + name
        if isinstance(value, dict):
            yield from list_cells(value, f"{column}.", lists)
        elif is_list_of_objects(value):
            for entry in value:
                yield from list_cells(entry, f"{column}.", (*lists, column))
        else:
            yield column, value, lists


def unfold(record: Row, lists: set[str], prefix: str = "") -> list[dict[str, Any]]:
    """Return a row for each object in the lists named `lists`; columns are as in list_cells.

    Other lists of objects stay cells. The example above gives {"id": 3, "steps.label": "run"} and
    {"id": 3, "steps.label": "sit"} if "steps" is one of `lists`, else its only row is {"id": 3,
    "steps": […]}.
    """
    rows: list[dict[str, Any]] = [{}]
    for name, value in record.items():
        column = prefix + name
        parts = [{column: value}]
        if isinstance(value, dict):
            parts = unfold(value, lists, column + ".")
        elif column in lists and is_list_of_objects(value):
            parts = []
            for entry in value:
                parts.extend(unfold(entry, lists, column + "."))
        rows = [row | part for row in rows for part in parts]
    return rows
