"""Loads weights into a module, or says in one sentence all that does not fit."""

from collections.abc import Collection

from torch import Tensor, nn

from adamae.common.devices import is_structure_only
from adamae.common.errors import InputError

# Of each kind of fault, in a message.
MAX_NAMES = 8
StateDict = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

# Weights whose shapes say how large a patch is, and how many tokens a clip has.
TOKENIZER = "tokenizer.projection.weight"
LEARNED_POSITIONS = "token_sampler.positions"
# What the names of an encoder's weights start with.
ENCODER_PARTS = ("tokenizer.", "encoder.")


def load_weights(module: nn.Module, state_dict: StateDict, parts: tuple[str, ...] = ("",)) -> None:
    """Load the weights whose names start with one of `parts`, all others stay as they are.

    Raise InputError, with all differences, unless they are the weights of these parts of the
    module. A module without memory takes none.
    """
    weights = select(state_dict, parts)
    check_keys(shapes(select(module.state_dict(), parts)), shapes(weights))
    if not is_structure_only():
        module.load_state_dict(weights, strict=False)


def select(state_dict: StateDict, parts: str | tuple[str, ...]) -> StateDict:
    """Return the weights whose names start with one of `parts`."""
    return {name: value for name, value in state_dict.items() if name.startswith(parts)}


def shapes(state_dict: StateDict) -> Shapes:
    """Return the shapes of weights, by name."""
    return {name: tuple(value.shape) for name, value in state_dict.items()}


def check_keys(
    expected: Shapes, actual: Shapes, where: str = "checkpoint does not match the model"
) -> None:
    """Raise InputError with all that is missing, unexpected and of another shape.

    "checkpoint does not match the model: missing keys: head.bias; of another shape: head.weight (5,
    8) instead of (3, 8)".
    """
    of_another_shape = [
        f"{name} {actual[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in actual and actual[name] != shape
    ]
    faults = [
        _list_names("missing keys", expected.keys() - actual.keys()),
        _list_names("unexpected keys", actual.keys() - expected.keys()),
        _list_names("of another shape", of_another_shape),
    ]
    sentences = [fault for fault in faults if fault]
    if sentences:
        raise InputError(f"{where}: {'; '.join(sentences)}")


def _list_names(title: str, names: Collection[str]) -> str:
    """List the first names after a title, with how many there are more; "" if there are none."""
    if not names:
        return ""
    text = f"{title}: {', '.join(sorted(names)[:MAX_NAMES])}"
    num_more = len(names) - MAX_NAMES
    if num_more > 0:
        text += f" and {num_more} more"
    return text
