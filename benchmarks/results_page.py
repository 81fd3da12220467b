"""Regenerate the tables of docs/results.md from benchmarks/results/: `python benchmarks/results_page.py`.

A table stands between two comments. The first names the JSON file, the columns (`name: heading`, or
`name ± deviation: heading`) and optionally which rows: `key=value|other value, ...`, all of which must hold. The text
around the tables is left as it is.
"""

import json
import re

from benchmarks.harness import RESULTS, ROOT, Row, format_cell, format_table
from common.atomic_io import write_text
from common.errors import InputError, run_command

PAGE = ROOT / "docs" / "results.md"
TABLE = re.compile(
    r"(<!-- table (?P<file>\S+) \|(?P<columns>[^|]*?)(?:\|(?P<filters>.*?))?-->\n).*?(<!-- end -->)", re.S
)


def main() -> None:
    write_text(PAGE, regenerate(PAGE.read_text(encoding="utf-8")))
    print(f"wrote {PAGE}")


def regenerate(text: str) -> str:
    """Return the page with all its tables as the results say; raise InputError for a file or column that is missing."""
    return TABLE.sub(
        lambda found: found[1] + make_table(found["file"], found["columns"], found["filters"] or "") + found[5], text
    )


def make_table(file: str, columns: str, filters: str) -> str:
    path = RESULTS / file
    if not path.is_file():
        raise InputError(f"{PAGE} names {file}, which is not in {RESULTS}")
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    known = {key for row in rows for key in row}
    for pair in filter(None, map(str.strip, filters.split(","))):
        key, _, values = pair.partition("=")
        rows = [row for row in rows if str(row.get(key)) in values.split("|")]
    heads: list[str] = []
    cells: list[list[str]] = []
    for column in columns.split(","):
        name, _, heading = (part.strip() for part in column.partition(":"))
        mean, _, deviation = (part.strip() for part in name.partition("±"))
        if mean not in known:
            raise InputError(f"{PAGE} names the column {mean}, which {path} does not have")
        heads.append(heading or name)
        cells.append([])
        for row in rows:
            spread = f" ± {format_cell(row[deviation])}" if row.get(deviation) is not None else ""
            cells[-1].append(format_cell(row.get(mean)) + spread)
    return format_table(heads, zip(*cells, strict=True))


if __name__ == "__main__":
    run_command(main)
