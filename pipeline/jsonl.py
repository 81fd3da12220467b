"""Files of JSON lines that several ranks append to, and read again when a run resumes."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read all valid lines. One that a kill or a full disk has cut short is skipped, and ended: the next line must not
    be appended to it."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""  # a bad byte costs its line
    if text and not text.endswith("\n"):
        append_line(path, "\n")
    found: list[Any] = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def append_line(path: Path, line: str) -> None:
    """Write once in append mode, so that lines of several processes do not mix."""
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())
        os.fsync(file.fileno())
