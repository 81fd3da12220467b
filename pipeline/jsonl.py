"""Files of JSON lines that several ranks append to, and read again when a run resumes."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class JsonlFile:
    """One such file, created by its first line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Read all valid lines. One that a kill or a full disk has cut short is skipped, and ended: the next line must
        not be appended to it."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace")  # a bad byte costs its line, not the run
        if text and not text.endswith("\n"):
            self._append("\n")
        found: list[Any] = []
        for line in text.splitlines():
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]

    def add(self, line: dict[str, Any]) -> None:
        self._append(json.dumps(line) + "\n")

    def _append(self, line: str) -> None:
        """Write once in append mode, so that lines of several processes do not mix."""
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())
