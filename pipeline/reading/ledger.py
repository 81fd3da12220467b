"""What a cache folder holds, and who expects which of it: one SQLite file, shared by all processes of the machine.

Every change is a transaction of its own, on a connection of its own, under a lock: a kill at any moment leaves the
change whole or undone. The ledger only counts: where it is missing, damaged, or names a file that is not there, one
walk through the folder makes it anew.
"""

import errno
import fcntl
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from common.errors import InputError

LEDGER = ".ledger.sqlite"
VERSION = 1
TABLES = """
CREATE TABLE files (name TEXT PRIMARY KEY, size INTEGER NOT NULL, used INTEGER NOT NULL, wanted REAL) WITHOUT ROWID;
CREATE INDEX by_turn ON files (wanted, used);
CREATE TABLE held (name TEXT, holder TEXT, PRIMARY KEY (name, holder)) WITHOUT ROWID;
CREATE TABLE total (bytes INTEGER NOT NULL);
CREATE TRIGGER added AFTER INSERT ON files BEGIN UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER changed AFTER UPDATE OF size ON files BEGIN UPDATE total SET bytes = bytes + new.size - old.size; END;
CREATE TRIGGER dropped AFTER DELETE ON files BEGIN UPDATE total SET bytes = bytes - old.size; END;
INSERT INTO total VALUES (0);
"""
# Whom it costs least to lose: what nobody is known to want again, by its last use; then what is wanted last; and only
# where a reader waits, what is expected: the oldest first, as whoever reads that has opened it.
TURNS = (
    "wanted IS NULL AND name NOT IN (SELECT name FROM held) ORDER BY used",
    "wanted IS NOT NULL AND name NOT IN (SELECT name FROM held) ORDER BY wanted DESC",
)
LAST_TURN = "name IN (SELECT name FROM held) ORDER BY used"


class NoRoomError(Exception):
    """Only files that are expected could make room."""


class Holder:
    """One who expects files. It ends with its process, however that ends: it is a lock on a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f".{uuid4().hex}.holder"
        lock = open_lock(self.path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.close = weakref.finalize(self, _end, lock, self.path, os.getpid())

    @staticmethod
    def lives(path: Path) -> bool:
        """Whether it has not ended; what is left of one that has is removed."""
        try:
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        path.unlink(missing_ok=True)
        return False


class Ledger:
    """Safe to use from many threads and processes."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def holder(self) -> Holder:
        """A new one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder / ".ledger.lock"):  # within it no holder is without its lock
            for left in self._folder.glob(".*.holder"):
                Holder.lives(left)
            return Holder(self._folder)

    def admit(self, path: Path, size: int, holder: Holder, *, ahead: bool = False) -> None:
        """Count a file that is here or on its way, used now and expected by `holder`, and remove others to make room.

        Raises NoRoomError, and removes nothing, if it comes `ahead` of its use and only expected files could make room.
        """
        name = self._name(path)

        def change(ledger: sqlite3.Connection) -> None:
            self._make_room(ledger, name, self._max_bytes - size, ahead)
            ledger.execute(
                "INSERT INTO files VALUES (?, ?, ?, NULL) ON CONFLICT DO UPDATE SET size = excluded.size,"
                " used = excluded.used",
                (name, size, time.time_ns()),
            )
            ledger.execute("INSERT OR IGNORE INTO held VALUES (?, ?)", (name, holder.path.name))

        self._do(change)

    def release(self, wanted_in: Mapping[Path, float | None], holder: Holder) -> None:
        """The holder has done with files, and wants them again in so many seconds; None: nobody knows."""
        now = time.time()
        names = [self._name(path) for path in wanted_in]
        turns = [None if seconds is None else now + seconds for seconds in wanted_in.values()]

        def change(ledger: sqlite3.Connection) -> None:
            held = [(name, holder.path.name) for name in names]
            ledger.executemany("DELETE FROM held WHERE name = ? AND holder = ?", held)
            ledger.executemany("UPDATE files SET wanted = ? WHERE name = ?", zip(turns, names, strict=True))

        self._do(change)

    def remove(self, path: Path) -> None:
        """A file that has not come."""
        self._do(lambda ledger: _drop(ledger, self._name(path)))

    def _name(self, path: Path) -> str:
        return os.fspath(path.relative_to(self._folder))

    def _do(self, change: Callable[[sqlite3.Connection], None]) -> None:
        """A transaction. A ledger that SQLite cannot use is made anew; raises InputError if that does not help."""
        with locked(self._folder / ".ledger.lock"):
            with suppress(sqlite3.Error):  # it is damaged, for all that we know
                return self._transaction(change)
            try:
                for left in (LEDGER, f"{LEDGER}-journal"):
                    (self._folder / left).unlink(missing_ok=True)
                self._transaction(change)
            except (sqlite3.Error, OSError) as error:
                raise InputError(
                    f"{self._folder / LEDGER} cannot be written ({error}): free some space, or name another folder with"
                    " data.cache_dir"
                ) from error

    def _transaction(self, change: Callable[[sqlite3.Connection], None]) -> None:
        for name in (LEDGER, f"{LEDGER}-journal"):
            refuse_link(self._folder / name)
        with closing(sqlite3.connect(self._folder / LEDGER)) as ledger, ledger:
            # A crash of the machine may damage the ledger: then it is made anew. So no write waits for the disk.
            ledger.execute("PRAGMA synchronous = OFF")
            ledger.execute("BEGIN IMMEDIATE")
            if ledger.execute("PRAGMA user_version").fetchone() != (VERSION,):
                self._create(ledger)
            change(ledger)

    def _create(self, ledger: sqlite3.Connection) -> None:
        for (name,) in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            ledger.execute(f'DROP TABLE "{name}"')
        for line in TABLES.strip().splitlines():
            ledger.execute(line)
        self._walk(ledger)
        ledger.execute(f"PRAGMA user_version = {VERSION}")

    def _walk(self, ledger: sqlite3.Connection) -> None:
        """Count what is in the folder, and only that; what is on its way is held, and stays."""
        found = []
        for path in self._folder.rglob("*.tar"):
            with suppress(FileNotFoundError):
                state = path.lstat()
                found.append((self._name(path), state.st_size, state.st_mtime_ns))
        ledger.execute("CREATE TEMP TABLE found (name TEXT PRIMARY KEY, size INTEGER, used INTEGER) WITHOUT ROWID")
        ledger.executemany("INSERT INTO found VALUES (?, ?, ?)", found)
        ledger.execute(
            "DELETE FROM files WHERE name NOT IN (SELECT name FROM found) AND name NOT IN (SELECT name FROM held)"
        )
        ledger.execute(
            "INSERT INTO files SELECT name, size, used, NULL FROM found WHERE true"
            " ON CONFLICT DO UPDATE SET size = excluded.size"
        )
        ledger.execute("DROP TABLE found")

    def _forget_the_dead(self, ledger: sqlite3.Connection) -> None:
        for (holder,) in ledger.execute("SELECT DISTINCT holder FROM held").fetchall():
            if not Holder.lives(self._folder / holder):
                ledger.execute("DELETE FROM held WHERE holder = ?", (holder,))

    def _make_room(self, ledger: sqlite3.Connection, keep: str, room: int, ahead: bool) -> None:
        """Remove files until all but `keep` take no more than `room`."""
        if _others(ledger, keep) <= room:
            return
        self._forget_the_dead(ledger)
        expected = "SELECT coalesce(sum(size), 0) FROM files WHERE name != ? AND name IN (SELECT name FROM held)"
        if ahead and ledger.execute(expected, (keep,)).fetchone()[0] > room:
            raise NoRoomError
        ledger.execute("UPDATE files SET wanted = NULL WHERE wanted < ?", (time.time(),))  # and it was not
        walked = False
        while _others(ledger, keep) > room:
            name, expected_here = _first(ledger, keep)
            path = self._folder / name
            for left in path.parent.glob(f".{path.name}.*.partial"):  # by a kill
                left.unlink(missing_ok=True)
            if not (walked or expected_here or path.is_file()):  # what else is said is not to be trusted either
                self._walk(ledger)
                walked = True
                continue
            path.unlink(missing_ok=True)
            _drop(ledger, name)


def _others(ledger: sqlite3.Connection, name: str) -> int:
    """Bytes of all files but one."""
    found = ledger.execute("SELECT bytes - coalesce((SELECT size FROM files WHERE name = ?), 0) FROM total", (name,))
    return int(found.fetchone()[0])


def _first(ledger: sqlite3.Connection, keep: str) -> tuple[str, bool]:
    """The file whose turn to go is first, and whether somebody expects it: it may be on its way then."""
    for turn in (*TURNS, LAST_TURN):
        found = ledger.execute(f"SELECT name FROM files WHERE name != ? AND {turn} LIMIT 1", (keep,)).fetchone()
        if found:
            return str(found[0]), turn == LAST_TURN
    raise AssertionError("files that are not there take room")


def _drop(ledger: sqlite3.Connection, name: str) -> None:
    for table in ("files", "held"):
        ledger.execute(f"DELETE FROM {table} WHERE name = ?", (name,))


def refuse_link(path: Path) -> None:
    """Raises InputError if `path` is a link."""
    if path.is_symlink():
        raise InputError(f"{path} is a link: remove it, or name a folder of your own with data.cache_dir")


def open_lock(path: Path) -> int:
    """A file to lock, made if need be; raises InputError if it is a link."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


@contextmanager
def locked(path: Path, given_up: Callable[[], bool] | None = None) -> Iterator[None]:
    """Alone, among all processes; raises CancelledError soon after `given_up` says that nobody waits."""
    lock = open_lock(path)
    try:
        if given_up is None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        while given_up is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if given_up():
                    raise CancelledError from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def _end(lock: int, path: Path, process: int) -> None:
    if os.getpid() == process:  # not a copy of it in a fork
        path.unlink(missing_ok=True)
    os.close(lock)
