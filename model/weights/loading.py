"""Weights into a module, with one clear sentence when they do not fit."""

from torch import Tensor, nn

from common.errors import InputError

MOST_NAMES = 8  # of each kind of fault
Shapes = dict[str, tuple[int, ...]]


def load_weights(module: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """`module.load_state_dict`, but raises InputError with what does not fit."""
    check_keys(shapes(module.state_dict()), shapes(state_dict))
    module.load_state_dict(state_dict)


def shapes(state_dict: dict[str, Tensor]) -> Shapes:
    return {name: tuple(value.shape) for name, value in state_dict.items()}


def check_keys(wanted: Shapes, given: Shapes) -> None:
    """Raise InputError with what is missing, unexpected and mis-shaped, at once."""
    faults = {
        "missing": sorted(wanted.keys() - given.keys()),
        "unexpected": sorted(given.keys() - wanted.keys()),
        "mis-shaped": [
            f"{name} {given[name]} instead of {wanted[name]}"
            for name in sorted(wanted.keys() & given.keys())
            if wanted[name] != given[name]
        ],
    }
    if any(faults.values()):
        raise InputError(
            "these weights do not fit: "
            + "; ".join(f"{kind}: {_few(names)}" for kind, names in faults.items() if names)
        )


def _few(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
