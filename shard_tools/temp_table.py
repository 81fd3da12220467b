"""Tables of more rows than memory should hold: SQLite's, which puts on the disk what is more than its cache.

They lie among SQLite's temporary files ($SQLITE_TMPDIR or $TMPDIR) and are gone when the process is, however it ends.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from common.errors import InputError

CACHE_KIB = 64 * 1024  # of memory for each of them, and as much again while it sorts


class TempTable:
    """A database that nobody else sees. Raises InputError where there is no room for it."""

    schema: ClassVar[str]
    content: ClassVar[str]  # what a message calls its rows
    row_bytes: ClassVar[int]  # of disk, about

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._database.execute("PRAGMA journal_mode = OFF")  # nothing is ever taken back
        self._database.executescript(self.schema)
        self._database.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._database.close()
        self._refuse_full(error)

    @contextmanager
    def room(self) -> Iterator[None]:
        """Says what it needs where the disk is full, as leaving it does, and leaves it open."""
        try:
            yield
        except sqlite3.OperationalError as error:
            self._refuse_full(error)

    def _refuse_full(self, error: object) -> None:
        if isinstance(error, sqlite3.OperationalError):  # the disk's, as the database is nobody else's
            raise InputError(
                f"{self.content} cannot be sorted ({error}): make room among the temporary files, or set "
                f"SQLITE_TMPDIR to a folder with {self.row_bytes} bytes a video"
            ) from error

    def _run(self, query: str, *values: Any) -> Iterable[Any]:
        return self._database.execute(query, values)

    def _one(self, query: str, *values: Any) -> Any:
        return self._database.execute(query, values).fetchone()

    def _insert(self, table: str, rows: Iterable[tuple[Any, ...]], num_columns: int) -> None:
        self._database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * num_columns)})", rows)

    def _teach(self, name: str, function: Callable[..., Any], num_arguments: int) -> None:
        self._database.create_function(name, num_arguments, function, deterministic=True)


def as_bytes(text: str | None) -> bytes | None:
    """Names that are not UTF-8 hold half surrogate pairs. Written like this, bytes sort as characters do."""
    return None if text is None else text.encode(errors="surrogatepass")


def as_text(content: bytes | None) -> Any:
    return None if content is None else content.decode(errors="surrogatepass")
