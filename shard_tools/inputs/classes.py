"""Class names and their ids."""

import csv
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adamae.common.errors import InputError

# Digits of a class id; longer numbers are names.
MAX_DIGITS = 9
# What label maps call the column of names, the most telling first.
NAME_COLUMNS = (
    "name display_name class_name label_name category_name key class label category".split()
)
# Lines of label maps: 1 Name; Name,1; c000 Holding some clothes
LINES = (
    r"(?P<id>\d+)[\s,;:.]+(?P<name>\S.*)",
    r"(?P<name>.*\S)\s*[,;\t ]\s*(?P<id>\d+)",
    r"(?P<id>[A-Za-z]+\d+)[\s,;:]+(?P<name>\S.*)",
)


@dataclass(frozen=True)
class LabelMap:
    """Class names by id, and what lists write for them."""

    names: list[str]
    # The number of the first class, if the map numbers them.
    first: int | None = None
    # Names by what else identifies them, such as Charades' c000.
    codes: dict[str, str] = field(default_factory=dict)

    def match(self, labels: set[str]) -> tuple[dict[str, str], int | None]:
        """Return class names by label, and what the numbers among the labels count from, if any.

        Numbers count from 0 or 1, whatever the map says, if only that gives all of them a name: of
        the labels 1 and 2 and a map of two names, 1 is the first. Raise InputError if both are
        possible, and the map has no numbers.
        """
        by_case = {name.casefold(): name for name in self.names}
        names = {
            label: by_case[label.casefold()] for label in labels if label.casefold() in by_case
        }
        names.update({name: name for name in self.names})
        names.update(self.codes)
        numbers = {int(label) for label in labels if is_id(label) and label not in names}
        if not numbers:
            return names, None
        first = self.first or 0
        can_be_0 = max(numbers) < len(self.names)
        can_be_1 = min(numbers) >= 1 and max(numbers) <= len(self.names)
        if can_be_0 and can_be_1 and self.first is None:
            labels_are = f"labels are {min(numbers)} to {max(numbers)}"
            what = f"{labels_are}, and the label map has {len(self.names)} names without numbers"
            fix = "write them into it (0 Name)"
            raise InputError(f"{what}, which may count from 0 or from 1: {fix}")
        if can_be_0 != can_be_1:
            first = 0 if can_be_0 else 1
        numbered = {str(number): name for number, name in enumerate(self.names, first)}
        return numbered | names, first


def read_label_map(path: Path) -> LabelMap:
    """Read class names: a name a line, with a number or a code or without; CSV with a header; JSON.

    Raise InputError if it is none of these, or a number is missing.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            return _parse_records(_list_json(json.loads(text)))
        return _parse_records(_list_lines(text))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, csv.Error) as error:
        raise InputError(f"{path} is not a label map with ids from 0 or 1 ({error!r})") from error


def _list_json(value: Any) -> list[dict[str, Any]]:
    """Return a list of names, {name: id}, {id: name}, or a list of objects as a list of objects."""
    if not isinstance(value, dict):
        return [entry if isinstance(entry, dict) else {"name": entry} for entry in value]
    keys = [str(key) for key in value]
    contents = [str(content) for content in value.values()]
    if all(content.isdigit() for content in contents):
        names = keys
        numbers = contents
    elif all(key.isdigit() for key in keys):
        names = contents
        numbers = keys
    else:
        raise ValueError("neither names nor contents are numbers")
    return [{"id": number, "name": name} for number, name in zip(numbers, names, strict=True)]


def _list_lines(text: str) -> list[dict[str, Any]]:
    """Return the names of a text, with the numbers or codes beside them."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    header = lines[0].lower().split(",")
    if len(header) > 1 and not set(header).isdisjoint(NAME_COLUMNS):
        return _list_csv(lines)
    for pattern in LINES:
        matches = [re.fullmatch(pattern, line) for line in lines]
        records = [
            {"code": match["id"], "name": match["name"].strip(' "')} for match in matches if match
        ]
        # Names may hold numbers, too: only those that are ids or codes of all names are none.
        if len(records) == len(lines) and _have_codes(records):
            return records
    return [{"name": line} for line in lines]


def _list_csv(lines: list[str]) -> list[dict[str, Any]]:
    header, *rows = csv.reader(lines)
    return [{name: row[column] for column, name in enumerate(header)} for row in rows]


def _have_codes(records: list[dict[str, Any]]) -> bool:
    label_map = _parse_records(records)
    return label_map.first is not None or bool(label_map.codes)


def _parse_records(records: list[dict[str, Any]]) -> LabelMap:
    """Return the names, in the order of ids 0, 1, … or 1, 2, … if there are any.

    Other columns whose values are all different are codes. Raise LookupError or ValueError if there
    is no column of names, or a number is missing.
    """
    columns = {
        str(key).strip(): [str(record[key]).strip() for record in records] for key in records[0]
    }
    names = columns.pop(_find_names(columns))
    ordered = names
    first = None
    codes: dict[str, str] = {}
    for column, values in columns.items():
        start = _find_start(values)
        if start is not None and first is None:
            first = start
            by_number = {int(value): name for value, name in zip(values, names, strict=True)}
            ordered = [by_number[number] for number in sorted(by_number)]
        elif column == "id" and all(value.isdigit() for value in values):
            raise ValueError("a number is missing")
        elif len(set(values)) == len(names):
            pairs = zip(values, names, strict=True)
            codes.update({value: name for value, name in pairs if not value.isdigit()})
    return LabelMap(ordered, first, codes)


def _find_names(columns: Iterable[str]) -> str:
    """Return the column of names. Raise LookupError if there is none."""
    for name in NAME_COLUMNS:
        for column in columns:
            if column.lower() == name:
                return column
    raise LookupError("no column of names")


def _find_start(values: list[str]) -> int | None:
    """Return 0 if values are 0, 1, 2, … in any order, 1 if they are 1, 2, 3, …, else None."""
    for start in (0, 1):
        if set(values) == {str(number) for number in range(start, start + len(values))}:
            return start
    return None


def is_id(label: str) -> bool:
    """Return whether a label can be a class id."""
    return label.isdecimal() and len(label) <= MAX_DIGITS and str(int(label)) == label


def assign_class_ids(labels: set[str], known: list[str]) -> list[str]:
    """Return class names by id: the `known` ones first, then the others in order.

    Labels that are all whole numbers, without leading zeros, are class ids already and stay what
    they are, if they are at least half of the ids up to the largest: 4 and 1 are ids among 0 to 4,
    and years are names. Where they are 1 to their number, they count from 1: the class called 1 is
    the first.
    """
    names = labels | set(known)
    if labels and all(map(is_id, names)):
        last = max(map(int, names))
        first = 0
        if len(names) == last > 1 and "0" not in names:
            first = 1
        if last < 2 * len(names):
            ids = [str(number) for number in range(first, last + 1)]
            if ids[: len(known)] == known:
                return ids
    return known + sorted(labels - set(known))
