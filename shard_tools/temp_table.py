"""Tables of more rows than memory should hold: SQLite's, which spills what exceeds its cache to disk.

They lie among SQLite's temporary files ($SQLITE_TMPDIR or $TMPDIR) and vanish with the process, however it ends.
"""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from adamae.common.errors import InputError

CACHE_KIB = 64 * 1024  # of memory per database, and as much again while it sorts
BYTES_PER_VIDEO = 1000  # of disk, about
SURROGATES = re.compile("[\ud800-\udfff]")  # which stand for bytes


class TempTable:
    """One private database with the tables of `schema`. Text sorts as its characters do, what is not UTF-8 last."""

    def __init__(self, schema: str) -> None:
        self.database = sqlite3.connect("", isolation_level=None)
        self.database.executescript(
            f"PRAGMA cache_size = -{CACHE_KIB}; PRAGMA journal_mode = OFF; {schema}; BEGIN"  # nothing is rolled back
        )

    def run(self, query: str, *values: Any) -> Iterator[list[Any]]:
        return map(_decode, self.database.execute(query, encode(values)))

    def insert(self, table: str, rows: Iterable[Sequence[Any]], num_columns: int) -> None:
        self.database.executemany(
            f"INSERT INTO {table} VALUES ({', '.join('?' * num_columns)})", map(encode, rows)
        )


def encode(values: Sequence[Any]) -> list[Any]:
    """Return what SQLite stores: text itself, and bytes where a name of a file is not UTF-8."""
    return [
        value.encode("utf-8", "surrogatepass")
        if isinstance(value, str) and SURROGATES.search(value)
        else value
        for value in values
    ]


def _decode(row: Iterable[Any]) -> list[Any]:
    return [
        value.decode(errors="surrogatepass") if isinstance(value, bytes) else value for value in row
    ]


@contextmanager
def explain_full_disk() -> Iterator[None]:
    """Turn SQLite's error on a full temporary disk into an InputError."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if not error.sqlite_errorname.startswith(
            ("SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_IOERR")
        ):
            raise
        raise InputError(
            f"the list of all videos does not fit on the disk for temporary files ({error}): free some space, or set"
            f" SQLITE_TMPDIR to a folder with {BYTES_PER_VIDEO} bytes per video"
        ) from error
