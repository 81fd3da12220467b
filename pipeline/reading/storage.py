"""Files in object storage, by fsspec: failed requests are repeated, hanging ones left behind, downloads resumed."""

import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import fsspec
from pebble.concurrent import thread

from adamae.common.atomic_io import atomic_write
from adamae.common.errors import InputError

TRIES = 4  # of one request
PAUSE_S = 1.0  # before the second one; it doubles
BLOCK = (
    2**23
)  # bytes of a ranged read: at 40 ms per request and 100 MiB/s, two thirds of the time are transfer
FILE_SYSTEMS = (
    "file://",
    "local://",
    "sftp://",
    "ssh://",
)  # where files are visible while they are written
FINAL = (
    PermissionError,
    FileNotFoundError,
    ImportError,
    ValueError,
    TypeError,
)  # no repetition helps
T = TypeVar("T")


def is_remote(place: str | Path) -> bool:
    """Tell whether this is a URL, not a path."""
    return "://" in str(place)


class ObjectStore:
    """The files under a URL. All methods raise InputError where several tries have failed."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """Make a client; `timeout`: seconds that a read of BLOCK bytes or less may take."""
        self.url, self._timeout = url.rstrip("/"), timeout
        # Only file systems have folders that must be made.
        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        self._fs, self._root = self._retry(
            "opened", lambda: fsspec.core.url_to_fs(self.url, **options)
        )

    def sizes(self, under: str = "") -> dict[str, int]:
        """List the bytes of all files by their names, relative to the URL."""
        self._fs.invalidate_cache()
        start = f"{self._root}/{under}".rstrip("/")
        found = self._retry("listed", lambda: self._fs.find(start, detail=True))
        return {name[len(self._root) :].lstrip("/"): entry["size"] for name, entry in found.items()}

    def read(self, name: str) -> bytes | None:
        """Read a small file; None if there is none."""

        def read() -> bytes | None:
            with suppress(FileNotFoundError):
                return bytes(self._fs.cat_file(f"{self._root}/{name}"))
            return None

        return self._retry("read", lambda: call_with_timeout(read, self._timeout), name)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read bytes of a file."""

        def read(first: int, last: int) -> bytes:
            request = partial(self._fs.cat_file, f"{self._root}/{name}", start=first, end=last)
            found = call_with_timeout(request, self._timeout)
            if len(found) != last - first:
                raise OSError(
                    f"{len(found)} bytes came instead of {last - first} from byte {first}"
                )
            return bytes(found)

        blocks = [(first, min(first + BLOCK, end)) for first in range(start, end, BLOCK)]
        return b"".join(self._retry("read", partial(read, *block), name) for block in blocks)

    def download(self, name: str, file: Path) -> None:
        """Download a file as it is now, durably."""
        self._fs.invalidate_cache()
        size = int(self._retry("read", lambda: self._fs.size(f"{self._root}/{name}"), name))
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            self.append_range(name, temporary, size)

    def append_range(self, name: str, file: Path, size: int) -> None:
        """Append to a local file what it lacks of the first `size` bytes."""
        with file.open("ab") as output:
            while (first := output.tell()) < size:
                output.write(self.read_range(name, first, min(first + BLOCK, size)))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self._retry("written to", lambda: self._fs.pipe_file(f"{self._root}/{name}", data), name)

    def upload(self, file: Path, name: str) -> None:
        """Write a file that others may be reading: they see the earlier one or this, never half of it."""
        target = f"{self._root}/{name}"
        written = f"{target}.partial" if self.url.startswith(FILE_SYSTEMS) else target

        def put() -> None:
            self._fs.put_file(str(file), written)
            if written != target:
                self._fs.mv(written, target)

        self._retry("written to", put, name)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")

        self._retry("removed", remove, name)

    def _retry(self, what: str, request: Callable[[], T], name: str = "") -> T:
        for attempt in range(TRIES):
            try:
                return request()
            except Exception as error:  # every store's client has a family of errors of its own
                if isinstance(error, FINAL) or attempt == TRIES - 1:
                    where = f"{self.url}/{name}" if name else self.url
                    raise InputError(f"{where} cannot be {what}: {_explain(error)}") from error
                time.sleep(PAUSE_S * 2**attempt)
        raise AssertionError


def call_with_timeout(
    call: Callable[[], T], timeout: float, option: str = "data.download_timeout_s"
) -> T:
    """Call in a thread; raise TimeoutError after `timeout` seconds, which `option` has set.

    Not all clients have timeouts of their own. One that hangs keeps its daemon thread until the process ends.
    """
    future = thread(name="request")(call)()
    if not wait([future], timeout).done:
        raise TimeoutError(f"no answer in {timeout:g} s ({option})")
    return future.result()


def _explain(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, PermissionError):
        return "no permission"
    return " ".join(str(error).split())[:300] or type(error).__name__
