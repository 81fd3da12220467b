"""Files that exist whole or not at all: written aside, flushed to the disk, renamed. What tells two files apart."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a temporary path next to `path`; when the block ends well, it becomes `path`; otherwise it is removed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and durably."""
    with atomic_write(path) as aside:
        # Names of files need not be UTF-8: their other bytes are written as \udcXX, which JSON reads back.
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a closing newline, atomically and durably."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
