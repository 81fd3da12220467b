"""Fields of configuration dataclasses: default, range and "free on resume" stand in one line, the help text below it.

    prefetch: int = option(3, at_least=1, free=True)
    \"\"\"batches that are read, decoded or ready, beyond the one in use\"\"\"

`check_ranges` in `__post_init__` raises the one sentence on a value out of range; only rules that concern several
fields are written by hand. Imports nothing heavy: a command's --help needs these modules and no torch.
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
    """Raise InputError for the first number that is not finite or out of its field's range, in sections too."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        limits = field.metadata.get("limits", {})
        if not (
            math.isfinite(value)
            and all(LIMITS[name](value, limit) for name, limit in limits.items())
        ):
            expected = (
                " and ".join(
                    f"{name.replace('_', ' ')} {limit:g}" for name, limit in limits.items()
                )
                or "finite"
            )
            finite = "" if math.isfinite(value) or not limits else "finite, "
            null = ", or null" if type(None) in get_args(field.type) else ""
            key = f"{section}.{field.name}" if section else field.name
            raise InputError(f"{key} is {value}: must be {finite}{expected}{null}")


def free_keys(config_class: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the fields that a resumed run may change, those of nested dataclasses included."""
    for field in dataclasses.fields(config_class):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield from free_keys(field.type, f"{prefix}{field.name}.")
        elif field.metadata.get("free"):
            yield prefix + field.name


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dict by their dotted names, tuples as lists; {} for anything else."""
    flat: dict[str, Any] = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
