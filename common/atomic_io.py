"""Atomic, durable file writes (write to a temporary file, fsync, rename) and file hashes."""

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adamae.common.errors import name_disk_errors

DAY_S = 86400
# Matches what `atomic_write` is writing, and hidden files of other programs.
PARTIALS = ".*.partial"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` for a new file or folder.

    Rename it to `path` if the block succeeds, else delete it. Disk errors of the block that name no
    file are raised again with the name `path`.
    """
    # Nodes that share a file system may write the same file at the same time.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with name_disk_errors(path):
            yield temporary
            # Without fsync, a power failure after the rename could leave an empty file.
            for entry in (*temporary.glob("*"), temporary):
                sync(entry)
            temporary.replace(path)
            # The rename itself is durable only when its folder is.
            sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)


def make_output_folder(folder: Path) -> None:
    """Create a folder unless it exists, and remove what killed commands have left in it.

    Folders below it may be anybody's, and large: they are not looked at.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_left(folder.glob(PARTIALS))


def remove_partials(folder: Path) -> None:
    """Remove what killed commands have left in a folder and in those below it."""
    _remove_left(folder.rglob(PARTIALS))


def _remove_left(partials: Iterable[Path]) -> None:
    """Remove the files and folders that killed writers of `atomic_write` have left.

    Another machine's may still be written: they go when they are a day old.
    """
    for path in partials:
        name = re.fullmatch(r"(\..+\..+)-(\d+)\.partial", path.name)
        if name is None:
            continue
        owner, pid = name.groups()
        if owner.endswith(f".{socket.gethostname()}"):
            is_left = not _is_alive(int(pid))
        else:
            is_left = _is_old(path)
        if is_left:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > DAY_S
    except FileNotFoundError:
        # The other machine has finished it meanwhile.
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # A process of another user.
        return True
    return True


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically and durably."""
    with atomic_write(path) as temporary:
        # File names need not be UTF-8: Python holds their other bytes as \udcXX, which JSON reads
        # back.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically and durably."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
