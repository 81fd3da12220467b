"""Read YAML that may be damaged or hostile: plain data only, of bounded size and depth, without aliases.

With aliases, 300 bytes of YAML can stand for 10⁹ values or for a value that contains itself. Configurations do not
need them, so they are refused; the limits bound everything else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from adamae.common.errors import InputError

MAX_BYTES = 2**16  # parsing takes up to 4 s; a configuration with all its comments has 10 kB
MAX_DEPTH = 20  # parsing takes the square of the depth
MAX_LENGTH = 4096  # of one value: the longest path; Python does not print integers of 4,300 digits


def read_yaml(file: Path) -> Any:
    """Parse a file; raise InputError if it is not valid YAML or exceeds the limits."""
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    try:
        return parse_yaml(content.decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(
            f"{file} is damaged ({' '.join(str(error).split())}): restore or correct it"
        ) from error


def parse_yaml(text: str, reader: Callable[[str], Any] = yaml.safe_load) -> Any:
    """Parse `text` with `reader`; raise yaml.YAMLError if it exceeds the limits."""
    if len(text) > MAX_BYTES:
        raise yaml.YAMLError(f"larger than {MAX_BYTES // 2**10} KiB")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_LENGTH:
            raise yaml.YAMLError(f"a value has more than {MAX_LENGTH} characters")
    try:
        return reader(text)
    except ValueError as error:  # a date that does not exist
        raise yaml.YAMLError(str(error)) from error
