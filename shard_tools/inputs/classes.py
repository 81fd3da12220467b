"""Class names and their ids."""

import csv
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adamae.common.errors import InputError

MAX_DIGITS = 9  # of a class id
NAME_COLUMNS = (
    "name display_name class_name label_name category_name key class label category".split()
)
LINES = (  # 1 Name; Name,1; c000 Holding some clothes
    r"(?P<id>\d+)[\s,;:.]+(?P<name>\S.*)",
    r"(?P<name>.*\S)\s*[,;\t ]\s*(?P<id>\d+)",
    r"(?P<id>[A-Za-z]+\d+)[\s,;:]+(?P<name>\S.*)",
)


@dataclass(frozen=True)
class LabelMap:
    """Class names by id, and what lists write for them."""

    names: list[str]
    first: int | None = None  # number of the first class, if the map numbers them
    codes: dict[str, str] = field(default_factory=dict)  # names by what else identifies them

    def match(self, labels: set[str]) -> tuple[dict[str, str], int | None]:
        """Return class names by label, and what the numbers among the labels count from: 0 or 1, whatever the map says,
        if only that gives all of them a name. Raise InputError if both may be, and the map has no numbers."""
        by_case = {name.casefold(): name for name in self.names}
        known = {
            label: by_case[label.casefold()] for label in labels if label.casefold() in by_case
        }
        known |= {name: name for name in self.names} | self.codes
        numbers = {int(label) for label in labels if is_id(label) and label not in known}
        if not numbers:
            return known, None
        possible = [
            first
            for first in (0, 1)
            if all(0 <= number - first < len(self.names) for number in numbers)
        ]
        if len(possible) > 1 and self.first is None:
            what = f"labels are {min(numbers)} to {max(numbers)}, and the label map has {len(self.names)} names"
            raise InputError(
                f"{what} without numbers, which may count from 0 or from 1: write them into it (0 Name)"
            )
        first = possible[0] if len(possible) == 1 else self.first or 0
        return {str(number): name for number, name in enumerate(self.names, first)} | known, first


def read_label_map(path: Path) -> LabelMap:
    """Read class names: a name a line, with a number or a code or without; CSV with a header; JSON."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _parse_records(
            _list_json(json.loads(text)) if path.suffix == ".json" else _list_lines(text)
        )
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        StopIteration,
        RecursionError,
        csv.Error,
    ) as error:
        raise InputError(f"{path} is not a label map with ids from 0 or 1 ({error!r})") from error


def _list_json(value: Any) -> list[dict[str, Any]]:
    """Return a list of names, {name: id}, {id: name}, or a list of objects with both, as the last of these."""
    if not isinstance(value, dict):
        return [entry if isinstance(entry, dict) else {"name": entry} for entry in value]
    pairs = [(str(key), str(content)) for key, content in value.items()]
    if all(content.isdigit() for _, content in pairs):
        pairs = [(content, key) for key, content in pairs]
    if not all(number.isdigit() for number, _ in pairs):
        raise ValueError("neither names nor contents are numbers")
    return [{"id": number, "name": name} for number, name in pairs]


def _list_lines(text: str) -> list[dict[str, Any]]:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if "," in lines[0] and {*lines[0].lower().split(",")} & {*NAME_COLUMNS}:
        header, *rows = csv.reader(lines)
        return [{name: row[number] for number, name in enumerate(header)} for row in rows]
    for pattern in LINES:
        matches = [match for line in lines if (match := re.fullmatch(pattern, line))]
        records = [{"code": match["id"], "name": match["name"].strip(' "')} for match in matches]
        if len(matches) == len(lines) and _parse_records(records) != LabelMap(
            [it["name"] for it in records]
        ):
            return records
    return [{"name": line} for line in lines]


def _parse_records(records: list[dict[str, Any]]) -> LabelMap:
    """Read the names, in the order of ids 0, 1, … or 1, 2, … if there are any; what else is unique are codes."""
    columns = {
        str(key).strip(): [str(record[key]).strip() for record in records] for key in records[0]
    }
    names = columns.pop(
        next(key for name in NAME_COLUMNS for key in columns if key.lower() == name)
    )
    ordered, first = names, None
    codes: dict[str, str] = {}
    for column, values in columns.items():
        start = next(
            (start for start in (0, 1) if {*values} == {str(start + n) for n in range(len(names))}),
            None,
        )
        if start is not None and first is None:
            first, ordered = (
                start,
                [name for _, name in sorted(zip(map(int, values), names, strict=True))],
            )
        elif column == "id" and all(map(str.isdigit, values)):
            raise ValueError("a number is missing")
        elif len({*values}) == len(names):
            codes |= {
                value: name
                for value, name in zip(values, names, strict=True)
                if not value.isdigit()
            }
    return LabelMap(ordered, first, codes)


def is_id(label: str) -> bool:
    """Whether a label can be a class id."""
    return label.isdecimal() and len(label) <= MAX_DIGITS and str(int(label)) == label


def assign_class_ids(labels: set[str], known: list[str]) -> list[str]:
    """Return class names by id: the `known` ones first, then the others in order.

    Labels that are all whole numbers, without leading zeros, are class ids already and stay what they are, if they are
    at least half of the ids up to the largest: years, say, are names. Where they are 1 to their number, they count
    from 1: the class called 1 is the first.
    """
    numbers = labels | set(known)
    if labels and all(is_id(name) for name in numbers):
        count = max(map(int, numbers)) + 1
        first = 1 if len(numbers) == count - 1 > 1 and "0" not in numbers else 0
        by_number = (
            [str(number) for number in range(first, count)] if count <= 2 * len(numbers) else []
        )
        if by_number and by_number[: len(known)] == known:
            return by_number
    return known + sorted(labels - set(known))
