"""Files of JSON lines that several ranks append to, and read again when a run resumes."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read all valid lines; one that a kill or a full disk has cut short is skipped."""
    text = (
        path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    )  # a bad byte costs its line
    found: list[Any] = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def end_last_line(path: Path) -> None:
    """End a line that was cut short, so that the next one is not appended to it."""
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        append_line(path, "\n")


def append_line(path: Path, line: str) -> None:
    """Write once in append mode, so that lines of several processes do not mix."""
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())
        os.fsync(file.fileno())
