"""Local copies of shards in object storage, in a directory of bounded size that all processes of a node share.

What came first is kept, and what finds no room is read from the store whenever it is needed. With shards that belong to
a node for the whole run (data.canonical_nodes) this has the hit rate of the best eviction, the fraction of the shards
that fits (docs/clusters.md), and needs no index. Room is made only of the copies of datasets that no process has open.
"""

import errno
import hashlib
import os
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import BinaryIO

from filelock import Timeout

from adamae.common.atomic_io import hash_file, sync
from adamae.common.errors import InputError
from adamae.common.locks import exclusive_lock, shared_lock
from adamae.common.logging import log
from adamae.pipeline.reading.storage import ObjectStore

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def user_cache_dir() -> Path:
    """Find or make the user's own cache directory, or a private temporary one where there is no home.

    Raises InputError if somebody else might have put it there, or may write to it.
    """
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = Path(os.path.expanduser("~"))  # unlike Path.home, it accepts users without one
    folder = (xdg if xdg.is_absolute() else home / ".cache") / "adamae"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:  # no directory, which is refused below
        pass
    except OSError:  # containers run as users who have no home, or may not write to it
        folder = Path(tempfile.gettempdir()) / f"adamae-cache-{os.getuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise InputError(
            f"{folder}, where downloads are kept, is a link, another user's, or others may write to it: remove it, or"
            " name a directory of your own with data.cache_dir"
        )
    return folder


class ShardCache:
    """Safe to use from many threads and processes."""

    def __init__(
        self, folder: Path | None = None, max_gib: float = 50.0, timeout: float = 60.0
    ) -> None:
        """timeout: see ObjectStore; max_gib=0: no shard is kept. Nothing is made before something remote is read."""
        self._given, self._max_bytes = folder, int(max_gib * 2**30)
        self._lock = threading.Lock()
        self._open_store = lru_cache(maxsize=None)(partial(ObjectStore, timeout=timeout))
        # Kept for as long as this cache exists, so that nobody removes the shards of a dataset that is in use.
        self._lease = lru_cache(maxsize=None)(_lease)
        self._is_full = False  # other shards are read from the store because there is no room
        self._counts: Counter[str] = Counter()

    def take_counts(self) -> Counter[str]:
        """Return sums since the last call: `download_seconds` of all threads, `cache_hits` and `streamed_clips`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return counts

    def count(self, **amounts: float) -> None:
        with self._lock:
            self._counts.update(amounts)

    def store(self, url: str) -> tuple[ObjectStore, str]:
        """Get the client for the directory of a file, and the file's name in it."""
        parent, name = url.rsplit("/", 1)
        return self._open_store(parent), name

    def path(self, url: str, sha256: str) -> Path:
        """Name the local copy of a file with this hash."""
        parent, name = url.rsplit("/", 1)
        stem, dot, suffix = name.rpartition(".")
        return (
            self._folder
            / hashlib.sha256(parent.encode()).hexdigest()[:16]
            / f"{stem}-{sha256[:16]}{dot}{suffix}"
        )

    def fetch_table(self, url: str, sha256: str, size: int) -> Path:
        """Download a file that takes no room of data.cache_gib, once."""
        path = self.path(url, sha256)
        with locked(path):
            if not path.exists():
                self._download(url, path, size, sha256)
        return path

    def fetch(self, url: str, sha256: str, size: int) -> Path | None:
        """Get the copy of a shard, which one process of the node downloads if there is room; None: there is none.

        Raises InputError if the file cannot be read or is another one.
        """
        if not self._max_bytes:
            return None
        path = self.path(url, sha256)
        self._lease(path.parent)
        if path.exists():
            return path
        if self._is_full:
            return None
        with locked(path):
            try:
                if not path.exists():
                    self._reserve(path, size)
                    self._download(url, path, size, sha256)
                return path
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                _partial(path, size).unlink(missing_ok=True)
                if not self._is_full:
                    log(
                        f"cache {self._folder} is full ({error.strerror}): shards are read in the store",
                        sys.stderr,
                    )
                self._is_full = True
                return None

    @cached_property
    def _folder(self) -> Path:
        return self._given or user_cache_dir()

    def _reserve(self, path: Path, size: int) -> None:
        """Make an empty partial file. Raise OSError (ENOSPC) if datasets in use leave no room for all of it."""
        unfinished = _partial(path, size)
        if unfinished.exists():  # of a process that was killed
            return
        with locked(self._folder / "all"):
            sizes: dict[Path, int] = {}  # an unfinished download takes the room of the whole file
            for copy in [*self._folder.glob("*/*.tar"), *self._folder.glob("*/.*.partial")]:
                with suppress(FileNotFoundError):
                    sizes[copy] = (
                        copy.stat().st_size if copy.suffix == ".tar" else int(copy.suffixes[-2][1:])
                    )
            room = self._max_bytes - sum(sizes.values()) - size
            for copy, copy_size in sizes.items():
                if room < 0 and not _is_in_use(copy.parent):
                    copy.unlink(missing_ok=True)
                    room += copy_size
            if room < 0:
                raise OSError(errno.ENOSPC, f"{self._max_bytes / 2**30:.3g} GiB (data.cache_gib)")
            unfinished.touch()

    def _download(self, url: str, path: Path, size: int, sha256: str) -> None:
        started = time.monotonic()
        store, name = self.store(url)
        unfinished = _partial(path, size)
        try:
            for _ in range(2):  # a file may be replaced while it is read
                store.append_range(name, unfinished, size)
                if hash_file(unfinished) == sha256:
                    sync(unfinished)
                    unfinished.replace(path)
                    return
                unfinished.unlink()
        finally:  # what came of a file that failed is kept for the next try
            self.count(download_seconds=time.monotonic() - started)
        raise InputError(
            f"{url} is not the file that its dataset was made with (its sha256 differs): upload that one again, or, if"
            " all shards were made again, upload their dataset.json too"
        )


def _partial(path: Path, size: int) -> Path:
    return path.with_name(f".{path.name}.{size}.partial")


def locked(path: Path) -> AbstractContextManager[None]:
    """Return the lock of a copy among all processes, a context manager; make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return exclusive_lock(path.with_name(f".{path.name}.lock"))


def _lease(folder: Path) -> BinaryIO:
    """Keep the copies in a folder from being removed until the file is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    return shared_lock(folder / ".in_use")


def _is_in_use(folder: Path) -> bool:
    """Return whether a process has a dataset open whose copies lie in this folder."""
    try:
        with exclusive_lock(folder / ".in_use", wait=False):
            return False
    except Timeout:
        return True
