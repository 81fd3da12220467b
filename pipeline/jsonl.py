"""Files of JSON lines that a run adds to, also several processes of it, and reads when it goes on."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class JsonlFile:
    """One such file; it comes to be with the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """What can be read. A line that a kill or a full disk has cut short is left out, and ended: the next one must
        not stand behind it."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace")  # a bad byte costs its line, not the run
        if text and not text.endswith("\n"):
            self._append("\n")
        found = []
        for line in text.splitlines():
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]

    def add(self, line: dict[str, Any]) -> None:
        self._append(json.dumps(line) + "\n")

    def _append(self, line: str) -> None:
        """One write in append mode: lines of several processes do not mix."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
