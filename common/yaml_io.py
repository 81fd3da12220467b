"""The one door for YAML, which may be damaged or hostile: data only, of bounded size, depth and repetition.

An alias stands for a copy of what its anchor holds, and YAML lets copies hold copies: 300 bytes can mean 10⁹ values, or
a value that contains itself. Readers that walk them never end. So a text is counted, as if written out, before it is
read; counting stops at the bound and costs about as much as reading.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from common.errors import InputError

MAX_BYTES = 2**20
MAX_VALUES = 10_000  # with every alias written out
MAX_DEPTH = 20
MAX_LETTERS = 4096  # of one value: a path is no longer, and reading a number takes the square of its length


def read_yaml(file: Path) -> Any:
    """What a file says; raises InputError where it is no YAML, or more than any configuration is."""
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    try:
        if len(content) > MAX_BYTES:
            raise yaml.YAMLError(f"it is larger than {MAX_BYTES // 2**20} MiB")
        return parse_yaml(content.decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{file} is damaged ({' '.join(str(error).split())}): put it back, or mend it") from error


def parse_yaml(text: str, reader: Callable[[str], Any] = yaml.safe_load) -> Any:
    """What `reader` makes of a text that is within the bounds; raises yaml.YAMLError."""
    _require_bounded(text)
    try:
        return reader(text)
    except ValueError as error:  # a date that does not exist
        raise yaml.YAMLError(str(error)) from error


def _require_bounded(text: str) -> None:
    """Raise yaml.YAMLError where the text means more than this program wants to hold, or holds itself."""
    values = 0
    open_anchors: list[tuple[str | None, int]] = []  # name and number of values before it, of what is not closed yet
    sizes: dict[str, int | None] = {}  # None: still open
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        values += 1
        if isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 1)  # of one that does not exist the reader says so
            if size is None:
                raise yaml.YAMLError(f"{event.anchor!r} contains itself")
            values += size
        elif isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append((event.anchor, values))
            if event.anchor is not None:
                sizes[event.anchor] = None
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_anchors.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_LETTERS:
            raise yaml.YAMLError(f"a value is {len(event.value)} letters long, and {MAX_LETTERS} are the most")
        if values > MAX_VALUES or len(open_anchors) > MAX_DEPTH:
            raise yaml.YAMLError(f"it holds more than {MAX_VALUES} values, or {MAX_DEPTH} inside each other")
