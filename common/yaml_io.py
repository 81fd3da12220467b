"""Read YAML that may be damaged or hostile: plain data of bounded size, without aliases.

With aliases, 300 bytes of YAML can stand for 10⁹ values or for a value that contains itself.
Configurations do not need them, so they are refused; the limits bound everything else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from adamae.common.errors import InputError

# Parsing this much takes up to 4 s; a configuration with all its comments has 10 kB.
MAX_BYTES = 2**16
# Parsing takes time that grows with the square of the depth.
MAX_DEPTH = 20
# Of one value: the longest path. Python refuses to print integers of more than 4,300 digits.
MAX_LENGTH = 4096


def read_yaml(file: Path) -> Any:
    """Parse a file; raise InputError if it is not valid YAML or exceeds the limits."""
    # One byte more than is allowed suffices to see that it is too large.
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    try:
        return parse_yaml(content.decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{file} is damaged ({reason}): restore or correct it") from error


def parse_yaml(text: str, reader: Callable[[str], Any] = yaml.safe_load) -> Any:
    """Parse `text` with `reader`; raise yaml.YAMLError if it exceeds the limits."""
    if len(text) > MAX_BYTES:
        raise yaml.YAMLError(f"larger than {MAX_BYTES // 2**10} KiB")
    # Events are checked before anything is built of them.
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_LENGTH:
            raise yaml.YAMLError(f"a value has more than {MAX_LENGTH} characters")
    try:
        return reader(text)
    # PyYAML raises it for a date that does not exist.
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error
