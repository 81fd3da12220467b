"""Files in object storage, through fsspec.

Failed requests are repeated, requests without an answer are abandoned, and downloads are resumed.
"""

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

# Of one request.
MAX_ATTEMPTS = 4
# Before the second attempt; each further pause is twice as long.
PAUSE_S = 1.0
# Bytes of a ranged read. At 40 ms per request and 100 MiB/s, two thirds of the time are transfer.
BLOCK = 2**23
# Only file systems have folders that must be made.
LOCAL_FILE_SYSTEMS = ("file://", "local://")
# Where a file is visible while it is written. Object stores show it when it is complete.
FILE_SYSTEMS = (*LOCAL_FILE_SYSTEMS, "sftp://", "ssh://")
# Errors that no repetition helps against.
FINAL_ERRORS = (PermissionError, FileNotFoundError, ImportError, ValueError, TypeError)
T = TypeVar("T")


def is_remote(location: str | Path) -> bool:
    """Return whether this is a URL, not a path."""
    return "://" in str(location)


class ObjectStore:
    """The files under a URL. All methods raise InputError when MAX_ATTEMPTS have failed."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """Make a client; `timeout`: seconds for a read of BLOCK bytes or less."""
        self.url = url.rstrip("/")
        self._timeout = timeout
        options = {"auto_mkdir": True} if url.startswith(LOCAL_FILE_SYSTEMS) else {}
        self._fs, self._root = self._retry(
            "opened", lambda: fsspec.core.url_to_fs(self.url, **options)
        )

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of all files in a folder, by their names relative to the URL."""
        self._fs.invalidate_cache()
        start = f"{self._root}/{folder}".rstrip("/")
        entries = self._retry("listed", lambda: self._fs.find(start, detail=True))
        sizes = {}
        for path, entry in entries.items():
            name = path.removeprefix(self._root).lstrip("/")
            sizes[name] = entry["size"]
        return sizes

    def read(self, name: str) -> bytes | None:
        """Read a small file; return None if it does not exist."""

        def read() -> bytes | None:
            with suppress(FileNotFoundError):
                return bytes(self._fs.cat_file(f"{self._root}/{name}"))
            return None

        return self._retry("read", lambda: call_with_timeout(read, self._timeout), name)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes of a file from `start` up to `end`."""

        def read(first: int, last: int) -> bytes:
            request = partial(self._fs.cat_file, f"{self._root}/{name}", start=first, end=last)
            content = call_with_timeout(request, self._timeout)
            if len(content) != last - first:
                raise OSError(
                    f"{len(content)} bytes came instead of {last - first} from byte {first}"
                )
            return bytes(content)

        blocks = []
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            blocks.append(self._retry("read", partial(read, first, last), name))
        return b"".join(blocks)

    def download(self, name: str, file: Path) -> None:
        """Download a file as it is now, and flush it to the disk."""
        self._fs.invalidate_cache()
        size = int(self._retry("read", lambda: self._fs.size(f"{self._root}/{name}"), name))
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            self.append_range(name, temporary, size)

    def append_range(self, name: str, file: Path, size: int) -> None:
        """Append to a local file those of the first `size` bytes that it does not have yet."""
        with file.open("ab") as output:
            for first in range(output.tell(), size, BLOCK):
                output.write(self.read_range(name, first, min(first + BLOCK, size)))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self._retry("written to", lambda: self._fs.pipe_file(f"{self._root}/{name}", data), name)

    def upload(self, file: Path, name: str) -> None:
        """Upload a file. Readers see the earlier one or this one, never half of it."""
        target = f"{self._root}/{name}"

        def put() -> None:
            if not self.url.startswith(FILE_SYSTEMS):
                self._fs.put_file(str(file), target)
                return
            self._fs.put_file(str(file), f"{target}.partial")
            self._fs.mv(f"{target}.partial", target)

        self._retry("written to", put, name)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

        def remove() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")

        self._retry("removed", remove, name)

    def _retry(self, action: str, request: Callable[[], T], name: str = "") -> T:
        """Call `request` until it succeeds; raise InputError about `action` and `name`."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return request()
            # The client of every store has a family of errors of its own.
            except Exception as error:
                if isinstance(error, FINAL_ERRORS) or attempt == MAX_ATTEMPTS - 1:
                    location = f"{self.url}/{name}" if name else self.url
                    raise InputError(f"{location} cannot be {action}: {_explain(error)}") from error
                time.sleep(PAUSE_S * 2**attempt)
        raise AssertionError


def call_with_timeout(
    call: Callable[[], T], timeout: float, option: str = "data.download_timeout_s"
) -> T:
    """Call in a thread; raise TimeoutError after `timeout` seconds, which `option` has set.

    Not all clients have timeouts of their own. A call without an answer keeps its daemon thread
    until the process ends.
    """
    future = thread(name="request")(call)()
    if not wait([future], timeout).done:
        raise TimeoutError(f"no answer in {timeout:g} s ({option})")
    return future.result()


def _explain(error: Exception) -> str:
    """Return an error as half a sentence."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, PermissionError):
        return "no permission"
    # Clients put whole answers of servers into their messages.
    line = " ".join(str(error).split())
    return line[:300] or type(error).__name__
