"""Progress bars, alike in all commands."""

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress_bar(values: Iterable[T] | None = None, *, unit: str, **options: Any) -> "tqdm[T]":
    """The values, with a bar on stderr; without values, a bar to be moved. `options` are tqdm's."""
    often = sys.stderr.isatty()  # a log file needs a line now and then, not ten a second
    return tqdm(values, unit=unit, file=sys.stderr, mininterval=0.1 if often else 30, dynamic_ncols=True, **options)
