"""Local copies of remote shards, in a directory of bounded size that all processes of a node share.

Shards' samples.jsonl and the tables of whole datasets lie beside them and count like them.

The first shards are kept; those that do not fit are read from the store each time. With shards that
belong to a node for the whole run (data.canonical_nodes) this has the hit rate of optimal eviction,
the fraction of the shards that fits (docs/clusters.md), and needs no index. Room is made only by
removing the copies of datasets that no process has open.
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

from adamae.common.atomic_io import atomic_write, hash_file, sync
from adamae.common.errors import InputError
from adamae.common.locks import exclusive_lock, shared_lock
from adamae.common.logging import log
from adamae.common.processes import find_parent_start
from adamae.pipeline.reading.storage import ObjectStore

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Matches the folders of datasets, which are named by a hash.
DATASETS = "[0-9a-f]" * 16
# Requests for a table at a time: nothing can begin before it is there, and one stream of object
# storage gives a small part of a node's bandwidth.
TABLE_REQUESTS = 8


def user_cache_dir() -> Path:
    """Find or make the user's cache directory, or a private temporary one if there is no home.

    Raise InputError if another user may have made it, or may write to it.
    """
    parent = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The standard says that relative paths are to be ignored.
    if not parent.is_absolute():
        # Unlike Path.home, this works for users without a home.
        parent = Path(os.path.expanduser("~")) / ".cache"
    folder = parent / "adamae"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        # It is no directory, which is refused below.
        pass
    except OSError:
        # Containers run as users who have no home, or may not write to it.
        folder = Path(tempfile.gettempdir()) / f"adamae-cache-{os.getuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise InputError(
            f"{folder}, where downloads are kept, is a link, another user's, or others may write to"
            " it: remove it, or name a directory of your own with data.cache_dir"
        )
    return folder


class ShardCache:
    """The copies in one directory; safe to use from many threads and processes."""

    def __init__(
        self,
        folder: Path | None = None,
        max_gib: float = 50.0,
        timeout: float = 60.0,
        keeps_shards: bool = True,
    ) -> None:
        """Create nothing before something remote is read.

        folder: by default user_cache_dir(); timeout: see ObjectStore.
        """
        self._configured_folder = folder
        self._keeps_shards = keeps_shards
        self._max_bytes = int(max_gib * 2**30)
        self._lock = threading.Lock()
        self._open_store = lru_cache(maxsize=None)(partial(ObjectStore, timeout=timeout))
        # Leases are held for as long as this cache exists, so that no process removes the shards of
        # a dataset in use.
        self._lease = lru_cache(maxsize=None)(_lease)
        # Whether a shard has found no room. The following ones are then read from the store.
        self._is_full = False
        self._counts: Counter[str] = Counter()

    def take_counts(self) -> Counter[str]:
        """Return sums over all threads since the last call.

        They are `download_seconds`, `cache_hits` and `streamed_clips`.
        """
        with self._lock:
            counts = self._counts
            self._counts = Counter()
            return counts

    def count(self, **amounts: float) -> None:
        """Add to the counts."""
        with self._lock:
            self._counts.update(amounts)

    def store(self, url: str) -> tuple[ObjectStore, str]:
        """Return the client for the directory of a file, and the file's name in it."""
        parent, name = url.rsplit("/", 1)
        return self._open_store(parent), name

    def path(self, url: str, sha256: str) -> Path:
        """Return the path of the local copy of a file with this hash.

        For example, <cache>/<hash of the URL of the dataset>/shard-000000-<hash of the shard>.tar.
        """
        dataset, name = url.rsplit("/", 1)
        stem, dot, suffix = name.rpartition(".")
        folder = hashlib.sha256(dataset.encode()).hexdigest()[:16]
        return self.folder / folder / f"{stem}-{sha256[:16]}{dot}{suffix}"

    def read_description(self, url: str) -> bytes | None:
        """Read a small file that may change; return None if it does not exist.

        Of the ranks that torchrun or Slurm has started on this node, the first one downloads it,
        and the others read its copy. A copy that is older than their launcher may be out of date.
        """
        store, name = self.store(url)
        if os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
            return store.read(name)
        copy = self.folder / "descriptions" / hashlib.sha256(url.encode()).hexdigest()[:16]
        with locked(copy):
            if not copy.exists() or copy.stat().st_mtime < find_parent_start():
                content = store.read(name)
                if content is None:
                    return None
                with atomic_write(copy) as temporary:
                    temporary.write_bytes(content)
            return copy.read_bytes()

    def fetch_table(self, url: str, sha256: str, size: int) -> Path:
        """Download a table, unless there is a copy; copies of shards make room for it.

        Raise InputError if data.cache_gib, or the disk, is too small for it.
        """
        path = self.path(url, sha256)
        self._lease(path.parent)
        with locked(path):
            if path.exists():
                return path
            try:
                self._reserve(path, size, replaces_shards=True)
                self._download(url, path, size, sha256, TABLE_REQUESTS)
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                _partial(path, size).unlink(missing_ok=True)
                raise InputError(
                    f"{url} has {size / 2**30:.3g} GiB and finds no room in {self.folder}"
                    f" ({error.strerror}): raise data.cache_gib, or set data.cache_dir to a folder"
                    " of a larger disk"
                ) from error
        return path

    def read_index(self, url: str, sha256: str) -> bytes:
        """Return the content of a shard's samples.jsonl; keep a copy if there is room.

        One process of the node downloads it. Raise InputError if it cannot be read, or has another
        hash.
        """
        path = self.path(url, sha256)
        self._lease(path.parent)
        content = _read_copy(path, sha256)
        if content is not None:
            return content
        with locked(path):
            # Another process may have downloaded it in the meantime.
            content = _read_copy(path, sha256)
            if content is None:
                content = self._read_original(url, sha256)
                self._keep(path, content)
        return content

    def _read_original(self, url: str, sha256: str) -> bytes:
        """Read a small file with this hash from the store."""
        store, name = self.store(url)
        # Twice, as a file may be replaced while it is read.
        for _ in range(2):
            content = store.read(name)
            if content is None:
                raise InputError(f"{url} does not exist: upload all files of the dataset")
            if hashlib.sha256(content).hexdigest() == sha256:
                return content
        raise _wrong_file(url)

    def _keep(self, path: Path, content: bytes) -> None:
        """Write a copy of a small file, unless the cache is full."""
        if self._is_full:
            return
        partial_file = _partial(path, len(content))
        try:
            self._reserve(path, len(content))
            partial_file.write_bytes(content)
            partial_file.replace(path)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            partial_file.unlink(missing_ok=True)
            self._note_full(error)

    def fetch(self, url: str, sha256: str, size: int) -> Path | None:
        """Return the copy of a shard; None if there is no room.

        One process of the node downloads it. Raise InputError if the file cannot be read, or has
        another hash.
        """
        if not self._keeps_shards:
            return None
        path = self.path(url, sha256)
        self._lease(path.parent)
        if path.exists():
            return path
        if self._is_full:
            return None
        with locked(path):
            try:
                # Another process may have downloaded it in the meantime.
                if not path.exists():
                    self._reserve(path, size)
                    self._download(url, path, size, sha256)
                return path
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                _partial(path, size).unlink(missing_ok=True)
                self._note_full(error)
                return None

    def _note_full(self, error: OSError) -> None:
        """Say once that the cache is full."""
        if not self._is_full:
            log(
                f"cache {self.folder} is full ({error.strerror}): shards are read in the store",
                sys.stderr,
            )
        self._is_full = True

    @cached_property
    def folder(self) -> Path:
        """The directory that all processes of the node share."""
        return self._configured_folder or user_cache_dir()

    def _reserve(self, path: Path, size: int, replaces_shards: bool = False) -> None:
        """Create an empty partial file, which reserves the room of the whole one.

        Remove copies of datasets that no process has open, and if `replaces_shards`, of any shards.
        Raise OSError (ENOSPC) if that is not enough.
        """
        partial_file = _partial(path, size)
        # Left by a process that was killed: the download is resumed.
        if partial_file.exists():
            return
        with locked(self.folder / "all"):
            sizes = self._list_sizes()
            free = self._max_bytes - sum(sizes.values()) - size
            for copy, copy_size in sizes.items():
                is_needless = replaces_shards and copy.suffix == ".tar"
                if free < 0 and (is_needless or not _is_in_use(copy.parent)):
                    copy.unlink(missing_ok=True)
                    free += copy_size
            if free < 0:
                raise OSError(errno.ENOSPC, f"{self._max_bytes / 2**30:.3g} GiB (data.cache_gib)")
            partial_file.touch()

    def _list_sizes(self) -> dict[Path, int]:
        """Return the room in bytes of every copy; a partial one has reserved that of the whole."""
        sizes = {}
        # First, as another process may finish one in the meantime, which must not count as nothing.
        for copy in self.folder.glob(f"{DATASETS}/.*.partial"):
            sizes[copy] = int(copy.suffixes[-2].removeprefix("."))
        for copy in self.folder.glob(f"{DATASETS}/[!.]*"):
            # Another process may remove it in the meantime.
            with suppress(FileNotFoundError):
                size = copy.stat().st_size
                sizes.pop(_partial(copy, size), None)
                sizes[copy] = size
        return sizes

    def _download(
        self, url: str, path: Path, size: int, sha256: str, num_requests: int = 1
    ) -> None:
        """Download a file to `path`; raise InputError if its hash is another one."""
        started = time.monotonic()
        store, name = self.store(url)
        partial_file = _partial(path, size)
        try:
            # Twice, as a file may be replaced while it is read.
            for _ in range(2):
                store.append_range(name, partial_file, size, num_requests)
                if hash_file(partial_file) == sha256:
                    sync(partial_file)
                    partial_file.replace(path)
                    return
                partial_file.unlink()
        finally:
            self.count(download_seconds=time.monotonic() - started)
        raise _wrong_file(url)


def _wrong_file(url: str) -> InputError:
    return InputError(
        f"{url} is not the file that its dataset was made with (its sha256 differs): upload that"
        " one again, or, if all shards were made again, upload their dataset.json too"
    )


def _read_copy(path: Path, sha256: str) -> bytes | None:
    """Read the copy of a small file; return None if there is none, or it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return content if hashlib.sha256(content).hexdigest() == sha256 else None


def _partial(path: Path, size: int) -> Path:
    """Return the path of an unfinished copy. It stays when a download fails, for the next one."""
    return path.with_name(f".{path.name}.{size}.partial")


def locked(path: Path) -> AbstractContextManager[None]:
    """Return the lock of a copy among all processes, a context manager; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return exclusive_lock(path.with_name(f".{path.name}.lock"))


def _lease(folder: Path) -> BinaryIO:
    """Keep other processes from removing the copies in a folder until the file is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    return shared_lock(folder / ".in_use")


def _is_in_use(folder: Path) -> bool:
    """Return whether a process has a dataset open whose copies lie in this folder."""
    try:
        with exclusive_lock(folder / ".in_use", wait=False):
            return False
    except Timeout:
        return True
