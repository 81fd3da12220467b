"""One file from an object store to the disk, however that store fails: what came is kept, what hangs is left behind."""

import errno
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec

from common.errors import InputError
from pipeline.decoding.workers import Task, Workers

TRIES = 4  # in a row that bring nothing, 1, 2 and 4 s apart
TAKES = 2  # of a whole file that turns out to be another one: its store may have been in the middle of a change
# Requests begin small, so that a slow store is told from a silent one, and grow while they take less than .5 s.
SMALLEST, LARGEST = 2**20, 2**25  # bytes
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Download:
    """A file on its way; a try that fails is followed by one that goes on behind the bytes that are there."""

    def __init__(
        self, url: str, to: Path, timeout: float, given_up: Callable[[], bool], part: range = range(2**62)
    ) -> None:
        """`timeout`: seconds in which a try must bring a MiB or the rest of the file; `given_up`: nobody waits now;
        `part`: the bytes that are asked for."""
        self._url, self._to, self._timeout, self._given_up, self._part = url, to, timeout, given_up, part
        self._workers = Workers(1, "download")
        self._file: Any = None
        self._digest: Any = None
        self._at = 0  # bytes that have come

    def run(self, sha256: str = "", size: int | None = None) -> None:
        """Write the file, of this hash and size where they are given.

        Raises InputError if it cannot be had, or is another file; CancelledError once `given_up` says so.
        """
        try:
            for _ in range(TAKES):
                with open(self._to, "wb", buffering=0) as self._file:
                    self._at, self._digest = 0, hashlib.sha256()
                    self._fetch_all()
                wrong = self._difference(sha256, size)
                if not wrong:
                    return
        finally:
            self._workers.close(timeout=0)  # a client that hangs ends at its own time, and finds that it is abandoned
        raise InputError(
            f"{self._url} is not the file that its dataset was made with ({wrong}): upload that one again, or, if all"
            " shards were made anew, upload their dataset.json too"
        )

    def _difference(self, sha256: str, size: int | None) -> str:
        if size is not None and self._at != size:
            return f"it has {self._at} bytes instead of {size}"
        return "its sha256 differs" if sha256 and self._digest.hexdigest() != sha256 else ""

    def _fetch_all(self) -> None:
        failures = 0
        while True:
            before = self._at
            try:
                self._workers.result(self._workers.submit(self._fetch_rest), self._timeout, self._given_up)
                return
            except CancelledError:
                raise
            except FileNotFoundError as error:
                raise InputError(f"{self._url} does not exist") from error
            # Clients of object stores share no class of errors: botocore's, aiohttp's and Google's are all their own.
            except Exception as error:
                if isinstance(error, OSError) and error.errno in FULL_DISK:
                    raise InputError(
                        f"{self._to.parent} takes no more ({error.strerror}): free some space, lower data.cache_gib, or"
                        " name another folder with data.cache_dir"
                    ) from error
                failures = failures + 1 if self._at == before else 1
                hopeless = isinstance(error, ImportError | ValueError | PermissionError)
                if failures == TRIES or hopeless:
                    raise InputError(f"{self._url} cannot be read: {self._in_words(error)}") from error
                self._pause(2 ** (failures - 1))

    def _in_words(self, error: Exception) -> str:
        if type(error) is TimeoutError:
            return f"the store brought less than {SMALLEST >> 20} MiB in {self._timeout:g} s (data.download_timeout_s)"
        return " ".join(str(error).split())[:300] or type(error).__name__

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._given_up():
                raise CancelledError
            time.sleep(0.05)

    def _fetch_rest(self, task: Task) -> None:
        parent, name = self._url.rsplit("/", 1)
        filesystem, folder = _filesystem(parent)
        # Without a cache, which would wait for more than is asked for.
        with filesystem.open(f"{folder}/{name}", "rb", cache_type="none") as remote:
            if self._part.start + self._at:
                remote.seek(self._part.start + self._at)
            amount = SMALLEST
            while True:
                started = time.monotonic()
                block = remote.read(min(amount, len(self._part) - self._at))
                if not self._store(task, block):
                    return
                amount = min(2 * amount, LARGEST) if time.monotonic() - started < 0.5 else max(amount // 2, SMALLEST)

    def _store(self, task: Task, block: bytes) -> bool:
        """Whether to go on."""
        with task.lock:
            if task.abandoned or not block:
                return False
            self._file.write(block)
            self._digest.update(block)
            self._at += len(block)
            task.start_clock()
        return True


@lru_cache(maxsize=64)
def _filesystem(folder: str) -> tuple[Any, str]:
    """The client for a folder's URL, and the folder as it names it. fsspec would make one for every thread."""
    return fsspec.core.url_to_fs(folder)
