"""Files in object storage, through fsspec.

Every request has a limit in time and is repeated when it fails: reads, writes, lists and removals
alike. Downloads are resumed.
"""

import io
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from pebble.concurrent import thread

from adamae.common.atomic_io import atomic_write
from adamae.common.errors import BAD_INPUT, UNAVAILABLE, InputError

# Of one request.
MAX_ATTEMPTS = 4
# Before the second attempt; each further pause is twice as long.
PAUSE_S = 1.0
# Bytes of a ranged read, and of a part of an upload. At 40 ms per request and 100 MiB/s, two thirds
# of the time are transfer.
BLOCK = 2**23
# Bytes that a file which is opened for reading asks for at least.
READ_AHEAD = 2**20
# Only file systems have folders that must be made.
LOCAL_FILE_SYSTEMS = ("file://", "local://")
# Where a file is visible while it is written. Object stores show it when it is complete.
FILE_SYSTEMS = (*LOCAL_FILE_SYSTEMS, "sftp://", "ssh://")
WEB = ("http://", "https://")
# Answers of a web server that no repetition changes: the file is gone (RFC 9110, RFC 7725).
GONE = (404, 410, 451)
# Errors that no repetition helps against.
FINAL_ERRORS = (PermissionError, FileNotFoundError, ImportError, ValueError, TypeError)
# The codes of S3 (docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html) that users mend.
ADVICE = {
    "ExpiredToken": "renew the credentials",
    "InvalidAccessKeyId": "check the access key",
    "NoSuchBucket": "check the name of the bucket",
    "RequestTimeTooSkewed": "set this machine's clock",
    "SignatureDoesNotMatch": "check the secret key",
}
T = TypeVar("T")


class StorageError(InputError):
    """Object storage has failed or refuses a request, which says nothing about the file."""

    exit_code = UNAVAILABLE


class MissingFileError(StorageError):
    """The bucket is there and has no such file."""


class ObjectStore:
    """The files under a URL; the name "" is that of the URL itself.

    All methods raise StorageError when MAX_ATTEMPTS have failed, or none can succeed.
    """

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """Make a client; `timeout`: seconds for a request, which moves up to BLOCK bytes.

        Raise InputError if the URL makes no sense, which is no fault of object storage.
        """
        self.url = url.rstrip("/")
        # When the store has last answered, by the monotonic clock.
        self.answered_at = time.monotonic()
        self._timeout = timeout
        options = {"auto_mkdir": True} if url.startswith(LOCAL_FILE_SYSTEMS) else {}
        # This imports the client, which may take longer than a request.
        connect = partial(fsspec.core.url_to_fs, self.url, **options)
        try:
            self._fs, self._root = self._retry("opened", "", connect)
        except StorageError as error:
            if isinstance(error.__cause__, ValueError):
                raise InputError(str(error)) from error
            raise

    def sizes(self, folder: str = "", timeout: float | None = None) -> dict[str, int]:
        """Return the bytes of all files in a folder, by their names relative to the URL.

        They are 0 where the store does not say. timeout: by default that of any request.
        """
        self._fs.invalidate_cache()
        find = partial(self._fs.find, self._path(folder), detail=True)
        attempt = partial(self._call, find, timeout=timeout or self._timeout)
        sizes = {}
        for path, entry in self._retry("listed", "", attempt).items():
            name = path.removeprefix(self._root).lstrip("/")
            sizes[name] = int(entry["size"] or 0)
        return sizes

    def read(self, name: str) -> bytes | None:
        """Read a small file; return None if it does not exist."""
        # With a start, s3fs does not ask for the size before.
        read = partial(self._fs.cat_file, self._path(name), start=0)
        try:
            content = self._request("read", name, read)
        except MissingFileError:
            return None
        return bytes(content)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes of a file from `start` up to `end`."""

        def read(first: int, last: int) -> bytes:
            content: bytes = self._fs.cat_file(self._path(name), start=first, end=last)
            if len(content) != last - first:
                raise OSError(
                    f"{len(content)} bytes came instead of {last - first} from byte {first}"
                )
            return bytes(content)

        blocks = []
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            blocks.append(self._request("read", name, partial(read, first, last)))
        return b"".join(blocks)

    def download(self, name: str, file: Path) -> None:
        """Download a file as it is now, and flush it to the disk."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            self.fetch(name, temporary)

    def fetch(self, name: str, file: Path) -> None:
        """Write a file as it is now to a local path."""
        if self.url.startswith(WEB):
            # Web servers need not know sizes, nor send parts of a file.
            copy = partial(_copy_growing, self._fs, self._path(name), file, self._timeout)
            self._retry("read", name, copy)
            return
        self.append_range(name, file, self.size(name))

    def size(self, name: str) -> int:
        """Return the bytes of a file as it is now."""
        self._fs.invalidate_cache()
        return self._request("read", name, partial(self._measure, self._path(name)))

    def open(self, name: str) -> io.BufferedIOBase:
        """Open a file whose bytes are read in ranges, as they are asked for."""
        if self.url.startswith(WEB):
            # fsspec streams from servers that do not send ranges.
            return cast(io.BufferedIOBase, self._fs.open(self._path(name)))
        return io.BufferedReader(_RangeReader(self, name), READ_AHEAD)

    def append_range(self, name: str, file: Path, size: int, num_requests: int = 1) -> None:
        """Append to a local file those of the first `size` bytes that it does not have yet.

        num_requests: how many are under way at a time, each of up to BLOCK bytes.
        """

        def read_block(first: int) -> bytes:
            return self.read_range(name, first, min(first + BLOCK, size))

        with file.open("ab") as output, ThreadPoolExecutor(num_requests) as threads:
            step = num_requests * BLOCK
            for start in range(output.tell(), size, step):
                blocks = range(start, min(start + step, size), BLOCK)
                for block in threads.map(read_block, blocks):
                    output.write(block)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self._request("written to", name, partial(self._fs.pipe_file, self._path(name), data))

    def upload(self, file: Path, name: str) -> None:
        """Upload a file. Readers see the earlier one or this one, never half of it."""
        target = self._path(name)
        if not self.url.startswith(FILE_SYSTEMS):
            with file.open("rb") as source:
                self._retry("written to", name, partial(self._send, source, target))
            return
        put = partial(self._fs.put_file, str(file), f"{target}.partial")
        timeout = self._timeout * (1 + file.stat().st_size // BLOCK)
        self._retry("written to", name, partial(self._call, put, timeout))
        self._request("written to", name, partial(self._fs.mv, f"{target}.partial", target))

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(MissingFileError):
            self._request("removed", name, partial(self._fs.rm_file, self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/") if name else self._root

    def _measure(self, path: str) -> int:
        """Return the bytes of a file."""
        try:
            return int(self._fs.info(path)["size"])
        except FileNotFoundError:
            raise
        except Exception:
            # S3 answers with the reason to a read, but not to the HEAD that asks for a size.
            self._fs.cat_file(path, start=0, end=1)
            raise

    def _send(self, source: BinaryIO, path: str) -> None:
        """Write an open local file in parts of BLOCK bytes, so that each has its limit in time."""
        source.seek(0)
        first = source.read(BLOCK)
        if len(first) < BLOCK:
            self._call(partial(self._fs.pipe_file, path, first))
            return
        # Without autocommit nothing is visible before `commit`, whatever happens to this process.
        target = self._call(partial(self._fs.open, path, "wb", block_size=BLOCK, autocommit=False))
        part = first
        try:
            while part:
                self._call(partial(target.write, part))
                part = source.read(BLOCK)
            self._call(target.close)
            self._call(target.commit)
        except Exception as error:
            # Stores charge for parts until they are discarded. After a timeout, though, another
            # request would not be answered either.
            if not isinstance(error, TimeoutError):
                self._call(target.discard)
            raise

    def _call(self, request: Callable[[], T], timeout: float | None = None) -> T:
        """Call `request`, and note when the store has answered."""
        answer = call_with_timeout(request, timeout or self._timeout)
        self.answered_at = time.monotonic()
        return answer

    def _request(self, action: str, name: str, request: Callable[[], T]) -> T:
        """Call `request` within the limit in time until it succeeds."""
        return self._retry(action, name, partial(self._call, request))

    def _retry(self, action: str, name: str, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it succeeds; raise StorageError about `action` and `name`."""
        for number in range(MAX_ATTEMPTS):
            try:
                return attempt()
            # The client of every store has a family of errors of its own.
            except Exception as error:
                is_missing = _is_missing(error)
                is_final = is_missing or isinstance(error, FINAL_ERRORS)
                if is_final or number == MAX_ATTEMPTS - 1:
                    kind = MissingFileError if is_missing else StorageError
                    location = f"{self.url}/{name}" if name else self.url
                    failure = kind(f"{location} cannot be {action}: {_explain(error)}")
                    if is_final:
                        # The same command would fail again.
                        failure.exit_code = BAD_INPUT
                    raise failure from error
                time.sleep(PAUSE_S * 2**number)
        raise AssertionError


class _RangeReader(io.RawIOBase):
    """A file in object storage, which can be read from any position."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name
        self._size = store.size(name)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = starts[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        content = self._store.read_range(self._name, self._position, end)
        buffer[: len(content)] = content
        self._position = end
        return len(content)


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


def _copy_growing(filesystem: Any, path: str, file: Path, timeout: float) -> None:
    """Download a file as a whole; raise TimeoutError if none of it comes for `timeout` seconds."""
    # A call that is given up may still write, so each attempt has a file of its own.
    part = file.with_name(f"{file.name}.{time.monotonic_ns()}")
    copy = thread(name="request")(filesystem.get_file)(path, str(part))
    size = 0
    while not wait([copy], timeout).done:
        size_before = size
        if part.exists():
            size = part.stat().st_size
        if size == size_before:
            raise TimeoutError(f"nothing came for {timeout:g} s after {size} bytes")
    copy.result()
    part.replace(file)


def _is_missing(error: Exception) -> bool:
    """Return whether a request has failed because the file is not there."""
    if isinstance(error, FileNotFoundError):
        return _find_code(error) != "NoSuchBucket"
    return getattr(error, "status", None) in GONE


def _find_code(error: BaseException | None) -> str:
    """Return the code that S3 has given an error, such as ExpiredToken; "" if there is none."""
    while error is not None:
        # s3fs raises errors of Python, which have botocore's as their cause.
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response["Error"]["Code"])
        error = error.__cause__ or error.__context__
    return ""


def _explain(error: Exception) -> str:
    """Return an error as half a sentence, with the store's own code and words."""
    if _is_missing(error):
        return "it does not exist"
    code = _find_code(error)
    # Clients put whole answers of servers into their messages.
    text = " ".join(str(getattr(error, "strerror", None) or error).split())[:300]
    answer = text or type(error).__name__
    if code and code not in text:
        answer = f"{code}: {text}"
    if isinstance(error, PermissionError):
        answer = f"no permission ({answer})" if text else "no permission"
    if code in ADVICE:
        answer += f"; {ADVICE[code]}"
    return answer
