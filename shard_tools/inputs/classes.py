"""Class names and their ids."""

import json
from pathlib import Path
from typing import Any

from common.errors import InputError

MOST_DIGITS = 9  # of a class's number


def read_label_map(path: Path) -> list[str]:
    """Class names by class id, from one name a line, or JSON: a list, {name: id} or {id: name}."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix != ".json":
            return [line.strip() for line in text.split("\n") if line.strip()]
        value = json.loads(text)
        if isinstance(value, list):
            return [str(name) for name in value]
        by_id = {int(key): str(name) for key, name in value.items()} if _is_by_id(value) else {}
        by_id = by_id or {int(identity): str(name) for name, identity in value.items()}
        return [by_id[identity] for identity in range(len(by_id))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not a label map with ids from 0 ({error!r})") from error


def _is_by_id(value: dict[str, Any]) -> bool:
    return all(key.isdigit() for key in value) and not all(str(name).isdigit() for name in value.values())


def is_id(label: str) -> bool:
    """Whether a label can be the number of a class."""
    return label.isdecimal() and len(label) <= MOST_DIGITS and str(int(label)) == label


def assign_class_ids(labels: set[str], known: list[str]) -> list[str]:
    """Class names by id: the `known` ones first, the others behind them in order.

    Labels that are all whole numbers, without leading zeros, are class ids already and stay what they are, if they are
    at least half of the ids up to the largest: years, say, are names.
    """
    numbers = labels | set(known)
    if labels and all(is_id(name) for name in numbers):
        count = max(map(int, numbers)) + 1
        by_number = [str(identity) for identity in range(count)] if count <= 2 * len(numbers) else []
        if by_number and by_number[: len(known)] == known:
            return by_number
    return known + sorted(labels - set(known))
