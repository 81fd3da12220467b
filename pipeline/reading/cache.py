"""Shards in an object store (s3://, gs://, https://, …: what fsspec knows), kept in a local folder of bounded size."""

import hashlib
import os
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from common.atomic_io import atomic_write
from common.errors import InputError
from pipeline.reading.download import Download
from pipeline.reading.ledger import Holder, Ledger, locked


def user_cache_dir(name: str = "adamae", option: str = "data.cache_dir") -> Path:
    """The user's own cache folder, made if need be; one of the machine's temporary folder where there is no home.

    `option` names another folder. Raises InputError if somebody else might have put it there, or may write to it.
    """
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = Path(os.path.expanduser("~"))  # unlike Path.home, it does not mind users without one
    folder = (xdg if xdg.is_absolute() else home / ".cache") / name
    with suppress(OSError):  # containers run as users who have no home, or may not write to it
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _private(folder, option)
    return _private(Path(tempfile.gettempdir()) / f"{name}-cache-{os.getuid()}", option)


def _private(folder: Path, option: str) -> Path:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    state = folder.lstat()
    if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022:
        return folder
    raise InputError(
        f"{folder}, where downloads are kept, is a link, another user's, or others may write to it: remove it, or name"
        f" a folder of your own with {option}"
    )


class ShardCache:
    """Local copies of remote files, shared by all processes of the machine; `Ledger` says which make room."""

    def __init__(self, folder: Path | None = None, max_gib: float = 50.0, timeout: float = 60.0) -> None:
        """`timeout`: seconds in which a store must bring a MiB, or what is left of a file."""
        self._given, self.max_bytes, self._timeout = folder, int(max_gib * 2**30), timeout
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @cached_property
    def _folder(self) -> Path:
        return self._given or user_cache_dir()

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self._folder, self.max_bytes)

    @property
    def counts(self) -> Counter[str]:
        """`download_seconds`, of all threads together, and `cache_hits`, since the start, of this process."""
        with self._lock:
            return Counter(self._counts)

    def fetch(self, url: str, *, version: str = "", size: int | None = None, fresh: bool = False) -> Path:
        """Path of a local copy, downloaded if there is none of this version, or, with `fresh`, in any case.

        `version` is the sha256 of the file and `size` its bytes, where they are known: nothing else is kept. Raises
        InputError if the file cannot be had after several tries, or is another one.
        """
        with self._copy(url, version, size, fresh=fresh) as copy:
            return copy

    def open(
        self,
        url: str,
        *,
        version: str,
        size: int,
        start: int | None = None,
        fresh: bool = False,
        given_up: Callable[[], bool] = lambda: False,
        holder: Holder | None = None,
        ahead: bool = False,
    ) -> BinaryIO:
        """A copy, as from `fetch`, open to be read: another process may remove it all the same.

        With `start`, these are `size` bytes of a file of that version, and their hash is for the reader to check.
        `holder` goes on expecting a shard until it releases it (see `Ledger`). Raises InputError as `fetch` does;
        CancelledError soon after `given_up` says that nobody waits; NoRoomError if a shard that is asked for `ahead` of
        its use would take the place of others that are expected; FileNotFoundError if others were faster to remove it.
        """
        with self._copy(url, version, size, start, given_up, holder, fresh=fresh, ahead=ahead) as copy:
            return copy.open("rb")

    @contextmanager
    def _copy(
        self,
        url: str,
        version: str,
        size: int | None,
        start: int | None = None,
        given_up: Callable[[], bool] = lambda: False,
        holder: Holder | None = None,
        *,
        fresh: bool,
        ahead: bool = False,
    ) -> Iterator[Path]:
        """A copy that is whole and, in the block, seldom removed."""
        if size is not None and size > self.max_bytes:
            raise InputError(
                f"{url} has {size / 2**30:.3g} GiB, and data.cache_gib is {self.max_bytes / 2**30:.3g}: raise it to"
                " hold the shards that are shuffled together"
            )
        parent, name = url.rsplit("/", 1)
        part = range(2**62)
        if start is not None:
            assert size is not None
            part, name = range(start, start + size), f"{name.removesuffix('.tar')}@{start}.tar"
        copy = self._folder / hashlib.sha256(parent.encode()).hexdigest()[:16] / version[:16] / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        # One process downloads, the others wait for it.
        with locked(copy.with_name(f".{copy.name}.lock"), given_up), self._counted(copy, size, holder, ahead):
            if fresh or not _is_whole(copy, size):
                started = time.monotonic()
                for left in copy.parent.glob(f".{name}.*.partial"):  # by a kill
                    left.unlink()
                with atomic_write(copy) as aside:
                    Download(url, aside, self._timeout, given_up, part).run("" if start is not None else version, size)
                self._count(download_seconds=time.monotonic() - started)
            else:
                self._count(cache_hits=1)
            os.utime(copy)
            yield copy

    @contextmanager
    def _counted(self, copy: Path, size: int | None, holder: Holder | None, ahead: bool) -> Iterator[None]:
        """There is room for a shard before it comes; tables are not counted."""
        if copy.suffix != ".tar":
            yield
            return
        expected = holder or self._own
        self.ledger.admit(copy, size or 0, expected, ahead=ahead)
        try:
            yield
        finally:
            if copy.exists():  # of a size that was not known, or another has removed it from the ledger
                self.ledger.admit(copy, copy.stat().st_size, expected)
            else:
                self.ledger.remove(copy)
            if holder is None:
                self.ledger.release({copy: None}, expected)

    @cached_property
    def _own(self) -> Holder:
        """Who expects what is on its way and nobody else does."""
        return self.ledger.holder()

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount  # type: ignore[assignment]  # seconds are counted too


def _is_whole(copy: Path, size: int | None) -> bool:
    return copy.is_file() and size in (None, copy.stat().st_size)
