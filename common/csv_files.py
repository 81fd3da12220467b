"""Tables as CSV that a spreadsheet opens without running what is in them."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from adamae.common.atomic_io import write_text

# Spreadsheets take a cell that begins with one of these for a formula
# (https://owasp.org/www-community/attacks/CSV_Injection).
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table atomically. A text that looks like a formula gets an apostrophe before it."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([escape_cell(cell) for cell in row])
    write_text(path, table.getvalue())


def escape_cell(cell: Any) -> Any:
    """Return a cell as it is written; numbers may begin with a minus."""
    if isinstance(cell, str) and cell.startswith(FORMULA_STARTS):
        return f"'{cell}"
    return cell
