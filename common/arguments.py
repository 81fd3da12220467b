"""The parser of commands without a configuration: a mistake ends in one sentence."""

import argparse
import difflib
import math
from collections.abc import Callable
from itertools import chain
from typing import Any, NoReturn

from adamae.common import commands
from adamae.common.errors import InputError

# How argparse's message about options begins that it does not have.
UNKNOWN = "unrecognized arguments: "


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose help is a docstring, and which raises InputError instead of printing usage."""

    def __init__(self, description: str | None = None, **options: Any) -> None:
        # A subparser is told its own name.
        options.setdefault("prog", commands.called_as or None)
        super().__init__(
            description=commands.name_as_called(description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """Raise InputError with argparse's message; for an unknown option, with one like it."""
        first = message.removeprefix(UNKNOWN).split()[0].partition("=")[0]
        end = ";"
        if message.startswith(UNKNOWN) and first.startswith("-"):
            message = f"there is no option {first}"
            options = chain.from_iterable(action.option_strings for action in self._actions)
            similar = difflib.get_close_matches(first, list(options), n=1)
            if similar:
                end = f": did you mean {similar[0]}?"
        message = message.removeprefix("argument ")
        raise InputError(f"{message}{end} `{self.prog} --help` lists every option")


def between(low: float, high: float = math.inf, kind: type = int) -> Callable[[str], Any]:
    """Return the `type` of an argument that is a finite number from `low` to `high`."""

    # argparse names this function in its message about text that is no number.
    def number(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high or value == math.inf:
            bounds = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"it must be {bounds}, not {text}")
        return value

    return number


def parse_part(text: str) -> tuple[int, int]:
    """Parse I/N, the I-th of N jobs, counted from 1: "2/4" is (2, 4)."""
    part, _, total = text.partition("/")
    is_numeric = part.isdecimal() and total.isdecimal()
    if not is_numeric or not 1 <= int(part) <= int(total):
        raise argparse.ArgumentTypeError(f"{text} is not like 1/4, 2/4, 3/4 or 4/4")
    return int(part), int(total)
