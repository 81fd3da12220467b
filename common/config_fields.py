"""Fields of configuration dataclasses: a line with default and range, the help text below it.

    prefetch: int = option(3, at_least=1, free=True)
    \"\"\"batches that are read, decoded or ready, beyond the one in use\"\"\"

`check_ranges` in `__post_init__` raises InputError on a value out of range; only rules that concern
several fields are written by hand. Imports nothing heavy: a command's --help needs these modules
and no torch.
"""

import copy
import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any, TypeVar, get_args

from adamae.common.errors import InputError

T = TypeVar("T")
LIMITS = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def option(default: T, *, free: bool = False, **limits: float) -> T:
    """Declare a field; `limits` are named as in LIMITS.

    `free`: it changes how a run is executed, not its result, so a resumed run may change it.
    """
    metadata = {"limits": limits, "free": free}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_ranges(config: Any, section: str = "") -> None:
    """Raise InputError for the first number, also of sections, that is out of its field's range.

    No range has infinite numbers or NaN.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, field.name)
        # Booleans are integers, too.
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        limits = field.metadata.get("limits", {})
        is_in_range = all(LIMITS[name](value, limit) for name, limit in limits.items())
        if not math.isfinite(value) or not is_in_range:
            key = f"{section}.{field.name}" if section else field.name
            allowed = describe_range(limits, math.isfinite(value))
            if type(None) in get_args(field.type):
                allowed += ", or null"
            raise InputError(f"{key} is {value}: must be {allowed}")


def describe_range(limits: dict[str, float], is_finite: bool) -> str:
    """Return a range in words, such as "at least 1 and below 10", for a value that is not in it."""
    if not limits:
        return "finite"
    words = " and ".join(f"{name.replace('_', ' ')} {limit:g}" for name, limit in limits.items())
    if not is_finite:
        words = f"finite, {words}"
    return words


def free_keys(config_class: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the fields, also of sections, that a resumed run may change."""
    for field in dataclasses.fields(config_class):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield from free_keys(field.type, f"{prefix}{field.name}.")
        elif field.metadata.get("free"):
            yield prefix + field.name


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dict by their dotted names, tuples as lists.

    {"model": {"size": "tiny"}} becomes {"model.size": "tiny"}, and what is no dict becomes {}.
    """
    flat: dict[str, Any] = {}
    if not isinstance(tree, dict):
        return flat
    for key, value in tree.items():
        name = f"{prefix}{key}"
        # An empty dict has no names of its own, and would be lost.
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, tuple):
            flat[name] = list(value)
        else:
            flat[name] = value
    return flat
