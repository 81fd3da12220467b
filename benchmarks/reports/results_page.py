"""Draw the tables of docs/results.md anew: `python -m benchmarks.reports.results_page`.

A table stands between two comments; the first says which file of benchmarks/results/, which columns (`name: heading`,
`name ± deviation`) and, if need be, which rows. What stands around the tables is left as it is.
"""

import json
import re
from pathlib import Path

from benchmarks.harness import RESULTS, ROOT, Row
from common.atomic_io import write_text
from common.errors import InputError, run_command

PAGE = ROOT / "docs" / "results.md"
TABLE = re.compile(
    r"(<!-- table (?P<file>\S+) \|(?P<columns>[^|]*?)(?:\|(?P<rows>[^|]*?))?-->\n).*?(<!-- end -->)", re.S
)


def main() -> None:
    write_text(PAGE, redrawn(PAGE.read_text(encoding="utf-8")))
    print(f"{PAGE} is drawn anew")


def redrawn(text: str) -> str:
    """The page with all its tables as the results say now; raises InputError where one names what is not there."""
    return TABLE.sub(
        lambda found: found[1] + table(found["file"], found["columns"], found["rows"] or "") + found[5], text
    )


def table(file: str, columns: str, chosen: str) -> str:
    """Lines of a Markdown table; `chosen` is `key=value, …`, of which all must hold."""
    path = RESULTS / file
    if not path.is_file():
        raise InputError(f"{PAGE} names {file}, which is not in {RESULTS}")
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    wanted = [pair.strip().split("=") for pair in chosen.split(",") if pair.strip()]
    rows = [row for row in rows if all(str(row.get(key)) == value for key, value in wanted)]
    specified = [column.strip().partition(":") for column in columns.split(",")]
    heads = [head.strip() or name.strip() for name, _, head in specified]
    cells = [[cell(row, name.strip(), path) for name, _, _ in specified] for row in rows]
    lines = [heads, ["---"] * len(heads), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(row: Row, name: str, path: Path) -> str:
    mean, _, deviation = (part.strip() for part in name.partition("±"))
    if mean not in row and not any(mean in other for other in json.loads(path.read_text(encoding="utf-8"))["rows"]):
        raise InputError(f"{PAGE} names the column {mean}, which {path} does not have")
    value = written(row.get(mean))
    return f"{value} ± {written(row[deviation])}" if deviation and row.get(deviation) is not None else value


def written(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    run_command(main)
