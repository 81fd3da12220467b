"""The parser of commands without a configuration: their mistakes end in one sentence, not in a screen of usage."""

import argparse
import difflib
import math
from collections.abc import Callable
from typing import Any, NoReturn

from adamae.common.errors import InputError

UNKNOWN = "unrecognized arguments: "


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose help is a module's docstring, and which raises InputError where argparse would print its usage."""

    def __init__(self, description: str | None = None, **options: Any) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )

    def error(self, message: str) -> NoReturn:
        first = message.removeprefix(UNKNOWN).split()[0].partition("=")[0]
        if message.startswith(UNKNOWN) and first.startswith("-"):
            known = [option for action in self._actions for option in action.option_strings]
            similar = difflib.get_close_matches(first, known, n=1)
            message = f"there is no option {first}" + (
                f": did you mean {similar[0]}?" if similar else ""
            )
        message = message.removeprefix("argument ") + ("" if message.endswith("?") else ";")
        raise InputError(f"{message} `{self.prog} --help` lists every option")


def between(low: float, high: float = math.inf, kind: type = int) -> Callable[[str], Any]:
    """Make an argument's `type`: a number from `low` to `high`, finite."""

    def number(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high or value == math.inf:
            bounds = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"it must be {bounds}, not {text}")
        return value

    return number


def parse_part(text: str) -> tuple[int, int]:
    """Parse I/N: the I-th of N jobs, counted from 1."""
    part, _, total = text.partition("/")
    if not (part.isdecimal() and total.isdecimal() and 1 <= int(part) <= int(total)):
        raise argparse.ArgumentTypeError(f"{text} is not like 1/4, 2/4, 3/4 or 4/4")
    return int(part), int(total)
