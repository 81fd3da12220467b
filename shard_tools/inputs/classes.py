"""Class names and their ids."""

import csv
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InputError

MAX_DIGITS = 9  # of a class id
NAME_COLUMNS = (
    "name",
    "display_name",
    "class_name",
    "label_name",
    "category_name",
    "key",
    "class",
    "label",
    "category",
)
NUMBERED = (r"(?P<id>\d+)[\s,;:.]+(?P<name>\S.*)", r"(?P<name>.*\S)\s*[,;\t ]\s*(?P<id>\d+)")  # 1 Name; Name,1
CODED = r"(?P<code>[A-Za-z]+\d+)[\s,;:]+(?P<name>\S.*)"  # c000 Holding some clothes


@dataclass(frozen=True)
class LabelMap:
    """Class names by id, and what lists write for them."""

    names: list[str]
    first: int | None = None  # number of the first class, if the map numbers them
    codes: dict[str, str] = field(default_factory=dict)  # names by what else identifies them

    def match(self, labels: set[str], places: Iterable[tuple[str, str]]) -> tuple[dict[str, str], int | None]:
        """Return class names by label, and what the numbers among the labels count from.

        Numbers count from 0 or 1 whatever the map says: `places`, pairs of a label and its video's path, show it where
        folders are called like classes, else the numbers that occur. Raise InputError if neither does.
        """
        known = {name: name for name in self.names} | self.codes
        by_case = {name.casefold(): name for name in self.names}
        known |= {label: by_case[label.casefold()] for label in labels if label.casefold() in by_case} | known
        numbers = {int(label) for label in labels if is_id(label) and label not in known}
        if not numbers:
            return known, None
        possible = [first for first in (0, 1) if all(0 <= number - first < len(self.names) for number in numbers)]
        first: int | None
        votes = dict.fromkeys(possible, 0)
        for label, place in places:
            folders = {fold(part) for part in place.split("/")[:-1]}
            for first in possible:
                if is_id(label) and fold(self.names[int(label) - first]) in folders:
                    votes[first] += 1
        first = self.first if self.first in possible else possible[0] if len(possible) == 1 else None
        if any(votes.values()):
            first = max(votes, key=votes.__getitem__)
        if len(possible) == 2 and first is None:
            raise InputError(
                f"labels are numbers from {min(numbers)} to {max(numbers)}, and the label map has {len(self.names)}"
                " names and no numbers, which may count from 0 or from 1: write the numbers into the map (0 Name)"
            )
        first = first if first is not None else self.first or 0
        numbered = {str(number): name for number, name in enumerate(self.names, first)}
        return numbered | known, first


def fold(name: str) -> str:
    """Return a name without what folders and class lists write differently."""
    return re.sub(r"[\W_]+", "", name).casefold()


def read_label_map(path: Path) -> LabelMap:
    """Read class names: a name a line, with a number or a code or without; CSV with a header; JSON."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _parse_json(json.loads(text)) if path.suffix == ".json" else _parse_lines(text)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError, csv.Error) as error:
        raise InputError(f"{path} is not a label map with ids from 0 or 1 ({error!r})") from error


def _parse_json(value: Any) -> LabelMap:
    """Read a list of names, {name: id}, {id: name}, or a list of objects with both."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), (list, dict)):
        value = next(iter(value.values()))  # {"classes": …}
    if isinstance(value, list):
        if value and all(isinstance(entry, dict) for entry in value):
            return _parse_table([list(value[0]), *([entry[key] for key in value[0]] for entry in value)])
        return LabelMap([" ".join(map(str, entry)) if isinstance(entry, list) else str(entry) for entry in value])
    pairs = [(str(key), str(content)) for key, content in value.items()]
    is_by_id = all(key.isdigit() for key, _ in pairs) and not all(content.isdigit() for _, content in pairs)
    return _number([(int(key), name) if is_by_id else (int(name), key) for key, name in pairs])


def _parse_lines(text: str) -> LabelMap:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    for pattern in (*NUMBERED, CODED):
        for rest in (lines, lines[1:]):  # without a header
            matches = [re.fullmatch(pattern, line) for line in rest]
            if not matches or not all(matches):
                continue
            found = [match.groupdict() for match in matches if match]
            names = [entry["name"].strip().strip('"') for entry in found]
            if pattern == CODED:
                return LabelMap(names, codes={entry["code"]: name for entry, name in zip(found, names, strict=True)})
            if sorted(int(entry["id"]) for entry in found) in (list(range(len(rest))), list(range(1, len(rest) + 1))):
                header = lines[0].lower().split(",") if rest is not lines else []
                if len(header) > 2:
                    return _parse_table(list(csv.reader(lines)))
                return _number([(int(entry["id"]), name) for entry, name in zip(found, names, strict=True)])
    return LabelMap(lines)


def _parse_table(rows: list[list[Any]]) -> LabelMap:
    """Read a table with a header: the column of names, that of ids 0, 1, … or 1, 2, …, and others, which are codes."""
    header, *rest = rows
    names = [str(name).strip().lower() for name in header]
    column = next(names.index(name) for name in NAME_COLUMNS if name in names)
    values = [[str(row[n]).strip() for row in rest] for n in range(len(header))]
    ranges = ([*map(str, range(len(rest)))], [*map(str, range(1, len(rest) + 1))])
    ids = next((n for n in range(len(header)) if n != column and sorted(values[n]) in map(sorted, ranges)), None)
    codes = {
        code: name
        for n in range(len(header))
        if n not in (column, ids) and len(set(values[n])) == len(rest)
        for code, name in zip(values[n], values[column], strict=True)
        if not code.isdigit()
    }
    if ids is None:
        return LabelMap(values[column], codes=codes)
    numbered = _number([(int(id_), name) for id_, name in zip(values[ids], values[column], strict=True)])
    return LabelMap(numbered.names, numbered.first, codes)


def _number(pairs: list[tuple[int, str]]) -> LabelMap:
    """Order names by their ids, which must leave no gap. Raise KeyError if they do."""
    by_id = dict(pairs)
    first = 0 if 0 in by_id else 1
    return LabelMap([by_id[number] for number in range(first, len(pairs) + first)], first)


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
        by_number = [str(number) for number in range(first, count)] if count <= 2 * len(numbers) else []
        if by_number and by_number[: len(known)] == known:
            return by_number
    return known + sorted(labels - set(known))
