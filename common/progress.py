"""Progress bars, the same in all commands."""

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress_bar(values: Iterable[T] | None = None, *, unit: str, **options: Any) -> "tqdm[T]":
    """Wrap `values` in a bar on stderr; without values, return a bar to update by hand.

    `options` are tqdm's.
    """
    # In seconds. In a log file, every update is a line.
    interval = 0.1 if sys.stderr.isatty() else 30
    return tqdm(
        values, unit=unit, file=sys.stderr, mininterval=interval, dynamic_ncols=True, **options
    )
