"""Loads weights into a module, with one sentence on all that does not fit."""

from torch import Tensor, nn

from adamae.common.errors import InputError

MOST_NAMES = 8  # of each kind of fault
StateDict = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

# Names of weights that are looked for: those that say how large a patch is, and how many tokens a clip has.
TOKENIZER = "tokenizer.projection.weight"
LEARNED_POSITIONS = "token_sampler.positions"
# What the names of an encoder's weights start with.
ENCODER_PARTS = ("tokenizer.", "encoder.")


def load_weights(module: nn.Module, state_dict: StateDict, parts: tuple[str, ...] = ("",)) -> None:
    """Load what starts with one of `parts`; raise InputError with all of it that does not fit."""
    given = select(state_dict, parts)
    check_keys(shapes(select(module.state_dict(), parts)), shapes(given))
    module.load_state_dict(given, strict=False)


def select(state_dict: StateDict, parts: str | tuple[str, ...]) -> StateDict:
    return {name: value for name, value in state_dict.items() if name.startswith(parts)}


def shapes(state_dict: StateDict) -> Shapes:
    return {name: tuple(value.shape) for name, value in state_dict.items()}


def check_keys(
    wanted: Shapes, given: Shapes, where: str = "checkpoint does not match the model"
) -> None:
    """Raise InputError with what is missing, unexpected and of another shape, at once."""
    both = wanted.keys() & given.keys()
    faults = {
        "missing keys": wanted.keys() - given.keys(),
        "unexpected keys": given.keys() - wanted.keys(),
        "of another shape": {
            f"{k} {given[k]} instead of {wanted[k]}" for k in both if wanted[k] != given[k]
        },
    }
    said = [
        f"{kind}: {', '.join(sorted(names)[:MOST_NAMES])}"
        + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
        for kind, names in faults.items()
        if names
    ]
    if said:
        raise InputError(f"{where}: {'; '.join(said)}")
