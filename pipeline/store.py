"""Shards in an object store (s3://, gs://, https://, …: what fsspec knows), kept in a local folder of bounded size."""

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from durable import write_aside
from errors import InputError

TRIES = 4  # of one download, 1, 2 and 4 s apart


def is_remote(place: str | Path) -> bool:
    return "://" in str(place)


def default_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"adamae-cache-{os.getuid()}"


class Cache:
    """Local copies of remote files, shared by all processes of the machine; the least recently used ones go first."""

    def __init__(self, folder: Path | None = None, max_gib: float = 50.0) -> None:
        self._folder, self._max_bytes = folder or default_cache(), int(max_gib * 2**30)

    def fetch(self, url: str, *, version: str = "", fresh: bool = False) -> Path:
        """Path of a local copy, downloaded if there is none of this version, or, with `fresh`, in any case.

        Whoever has the file open may go on reading it when another process removes it. Raises InputError if the file
        cannot be had after several tries.
        """
        parent, name = url.rsplit("/", 1)
        copy = self._folder / hashlib.sha256(parent.encode()).hexdigest()[:16] / version[:16] / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with _locked(copy.with_name(f".{copy.name}.lock")):  # one process downloads, the others wait for it
            if fresh or not copy.exists():
                self._download(url, copy)
                self._make_room(keep=copy)
            os.utime(copy)
        return copy

    def _download(self, url: str, copy: Path) -> None:
        for attempt in range(TRIES):
            try:
                with fsspec.open(url, "rb") as remote, write_aside(copy) as aside, open(aside, "wb") as local:
                    while block := remote.read(2**22):
                        local.write(block)
                return
            except FileNotFoundError as error:
                raise InputError(f"{url} does not exist") from error
            except (OSError, ValueError, ImportError) as error:
                if attempt == TRIES - 1 or not isinstance(error, OSError):
                    raise InputError(f"{url} cannot be read: {error}") from error
                time.sleep(2**attempt)

    def _make_room(self, keep: Path) -> None:
        files = [(entry.stat(), entry) for entry in self._folder.rglob("*.tar") if entry != keep]
        total = keep.stat().st_size + sum(state.st_size for state, _ in files)
        for state, path in sorted(files, key=lambda item: item[0].st_mtime):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= state.st_size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
