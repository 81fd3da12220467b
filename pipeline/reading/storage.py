"""Files in an object store, by fsspec: requests that fail are repeated, and end in a sentence where that is no help."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import fsspec

from common.atomic_io import atomic_write
from common.errors import InputError

TRIES = 4  # of one request, 1, 2 and 4 s apart
FOLDERS = ("file://", "local://", "sftp://", "ssh://")  # what is written there can be seen, and renamed over
T = TypeVar("T")


def is_remote(place: str | Path) -> bool:
    return "://" in str(place)


class ObjectStore:
    """The files under a URL; raises InputError where they cannot be had after several tries."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # Only file systems have folders that must be made.
        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        self._fs, self._root = self._tried("opened", lambda: fsspec.core.url_to_fs(self.url, **options))

    def names(self, under: str = "") -> list[str]:
        """Of all files, relative to the URL."""
        return list(self.sizes(under))

    def sizes(self, under: str = "") -> dict[str, int]:
        """Bytes of all files, by their names relative to the URL."""
        start = f"{self._root}/{under}".rstrip("/")

        def listed() -> dict[str, int]:
            self._fs.invalidate_cache()
            found = self._fs.find(start, detail=True)
            return {name[len(self._root) :].lstrip("/"): entry["size"] for name, entry in found.items()}

        return self._tried("listed", listed)

    def size(self, name: str) -> int:
        """Bytes of a file, as the store says now."""

        def asked() -> int:
            self._fs.invalidate_cache()
            return int(self._fs.size(f"{self._root}/{name}"))

        return self._tried("read", asked, name)

    def read(self, name: str) -> bytes | None:
        """None where there is no such file."""

        def content() -> bytes | None:
            try:
                return self._fs.cat_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return None

        return self._tried("read", content, name)

    def write(self, name: str, data: bytes) -> None:
        self._tried("written to", lambda: self._fs.pipe_file(f"{self._root}/{name}", data), name)

    def upload(self, file: Path, name: str) -> None:
        self._tried("written to", lambda: self._fs.put_file(str(file), f"{self._root}/{name}"), name)

    def replace(self, file: Path, name: str) -> None:
        """Upload a file that others may be reading an earlier one of: they see that or this, never half of it."""
        if not self.url.startswith(FOLDERS):  # object stores show a file when it is whole
            self.upload(file, name)
            return
        aside = f".{name}.partial"
        self.upload(file, aside)
        self._tried("written to", lambda: self._fs.mv(f"{self._root}/{aside}", f"{self._root}/{name}"), name)

    def download(self, name: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as aside:
            self._tried("read", lambda: self._fs.get_file(f"{self._root}/{name}", str(aside)), name)

    def remove(self, name: str) -> None:
        def removed() -> None:
            try:
                self._fs.rm_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return

        self._tried("removed", removed, name)

    def _tried(self, what: str, request: Callable[[], T], name: str = "") -> T:
        for attempt in range(TRIES):
            try:
                return request()
            except Exception as error:  # every store's client has a family of errors of its own
                is_final = isinstance(error, (PermissionError, FileNotFoundError, ImportError, ValueError, TypeError))
                if is_final or attempt == TRIES - 1:
                    why = "no permission" if isinstance(error, PermissionError) else " ".join(str(error).split())[:300]
                    where = f"{self.url}/{name}" if name else self.url
                    raise InputError(f"{where} cannot be {what}: {why or type(error).__name__}") from error
                time.sleep(2**attempt)
        raise AssertionError
