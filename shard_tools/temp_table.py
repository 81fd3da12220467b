"""Tables of more rows than memory should hold: SQLite spills what exceeds its cache to disk.

They lie among SQLite's temporary files ($SQLITE_TMPDIR or $TMPDIR) and vanish with the process,
however it ends.
"""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from adamae.common.errors import InputError

# Memory per database; sorting takes as much again.
CACHE_KIB = 64 * 1024
# Disk space, about; docs/shards.md says when it takes more.
BYTES_PER_VIDEO = 1000
# Lone surrogates stand for the bytes of a file name that is not UTF-8 (PEP 383).
SURROGATES = re.compile("[\ud800-\udfff]")


class TempTable:
    """A private database with the tables of `schema`.

    Text sorts by code point; names that are not UTF-8 are stored as bytes and come last.
    """

    def __init__(self, schema: str) -> None:
        self.database = sqlite3.connect("", isolation_level=None)
        # One transaction without a journal: nothing is rolled back, and no other process reads it.
        self.database.executescript(
            f"PRAGMA cache_size = -{CACHE_KIB}; PRAGMA journal_mode = OFF; {schema}; BEGIN"
        )

    def run(self, query: str, *values: Any) -> Iterator[list[Any]]:
        """Execute a query with `values` for its question marks; return an iterator of its rows."""
        return map(decode, self.database.execute(query, encode(values)))

    def insert(self, table: str, rows: Iterable[Sequence[Any]], num_columns: int) -> None:
        placeholders = ", ".join("?" * num_columns)
        self.database.executemany(f"INSERT INTO {table} VALUES ({placeholders})", map(encode, rows))


def encode(values: Sequence[Any]) -> list[Any]:
    """Return values as SQLite stores them: text as it is, or as bytes where it is not UTF-8."""
    stored = []
    for value in values:
        if isinstance(value, str) and SURROGATES.search(value):
            value = value.encode("utf-8", "surrogatepass")
        stored.append(value)
    return stored


def decode(row: Iterable[Any]) -> list[Any]:
    """Return a row as it was before `encode`."""
    values = []
    for value in row:
        if isinstance(value, bytes):
            value = value.decode(errors="surrogatepass")
        values.append(value)
    return values


@contextmanager
def explain_full_disk() -> Iterator[None]:
    """Turn SQLite's error on a full temporary disk into an InputError."""
    disk_errors = ("SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_IOERR")
    try:
        yield
    except sqlite3.OperationalError as error:
        if not error.sqlite_errorname.startswith(disk_errors):
            raise
        raise InputError(
            f"the list of all videos does not fit on the disk for temporary files ({error}): free"
            f" some space, or set SQLITE_TMPDIR to a folder with {BYTES_PER_VIDEO} bytes per video"
        ) from error
