"""Class names and their ids."""

import json
from pathlib import Path

from common.errors import InputError

MAX_DIGITS = 9  # of a class id


def read_label_map(path: Path) -> list[str]:
    """Read class names by class id: one name per line, or JSON with a list, {name: id} or {id: name}."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix != ".json":
            return [line.strip() for line in text.split("\n") if line.strip()]
        value = json.loads(text)
        if isinstance(value, list):
            return [str(name) for name in value]
        pairs = [(str(key), str(content)) for key, content in value.items()]
        is_by_id = all(key.isdigit() for key, _ in pairs) and not all(content.isdigit() for _, content in pairs)
        by_id = {int(key): content for key, content in pairs} if is_by_id else {int(id_): key for key, id_ in pairs}
        return [by_id[number] for number in range(len(by_id))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not a label map with ids from 0 ({error!r})") from error


def is_id(label: str) -> bool:
    """Whether a label can be a class id."""
    return label.isdecimal() and len(label) <= MAX_DIGITS and str(int(label)) == label


def assign_class_ids(labels: set[str], known: list[str]) -> list[str]:
    """Return class names by id: the `known` ones first, then the others in order.

    Labels that are all whole numbers, without leading zeros, are class ids already and stay what they are, if they are
    at least half of the ids up to the largest: years, say, are names.
    """
    numbers = labels | set(known)
    if labels and all(is_id(name) for name in numbers):
        count = max(map(int, numbers)) + 1
        by_number = [str(number) for number in range(count)] if count <= 2 * len(numbers) else []
        if by_number and by_number[: len(known)] == known:
            return by_number
    return known + sorted(labels - set(known))
