"""Files of JSON lines that several ranks append to, and read again when a run resumes."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the objects of all lines but those that a kill or a full disk has cut short."""
    if not path.exists():
        return []
    rows = []
    # Replaced, a byte that is not UTF-8 costs a line at most.
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        # RecursionError: a damaged line may be a thousand brackets.
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def end_last_line(path: Path) -> None:
    """End a line that was cut short, so that the next one is not appended to it."""
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        append_line(path, "\n")


def append_line(path: Path, line: str) -> None:
    """Append a line, durably."""
    # POSIX: a single write in append mode is atomic, so lines of several processes do not mix.
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())
        os.fsync(file.fileno())
