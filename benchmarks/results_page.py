"""Keep the numbers on the pages in line with the files in benchmarks/results/.

The pages are README.md, docs/results.md, benchmarks/experiments.md and, for claims,
docs/training.md.
`python benchmarks/results_page.py` rewrites the tables and plots; with `--check`, it writes
nothing. Both exit with code 1 if a page contradicts a result. benchmarks/claims.yaml defines what
belongs on which page:

- a table is generated, between the lines `<!-- table NAME -->` and `<!-- end of table -->`;
- a sentence is written by hand and only checked: the page must contain the words of its claim, with
  the numbers of the result file. The check prints the words that are missing.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from adamae.benchmarks.harness import RESULTS, ROOT, Row, format_cell, format_table
from adamae.benchmarks.result_plots import PLOTS
from adamae.common.atomic_io import atomic_write, write_text
from adamae.common.errors import InputError, run_command
from adamae.common.yaml_io import read_yaml

CLAIMS = ROOT / "benchmarks" / "claims.yaml"
# Comments of HTML, which GitHub does not show. They have lines of their own: a line that begins
# with a comment is HTML to its end, and would be shown as it is typed.
TABLE_START = "<!-- table {name} -->"
TABLE_END = "<!-- end of table -->"

# The values that a row must have, by column: one value or a list of allowed ones.
Filters = dict[str, Any]


# Unknown fields are forbidden here and below: a misspelled filter would choose other rows in
# silence.
class Table(msgspec.Struct, forbid_unknown_fields=True):
    """A generated table: the rows of a file that pass the filters, and a heading for each column.

    A column "a ± b" shows two values of the file in one cell.
    """

    page: str
    file: str
    columns: dict[str, str]
    rows: Filters = {}


class Claim(msgspec.Struct, forbid_unknown_fields=True):
    """Words that a page must contain, with the numbers in braces replaced, as by `str.format`.

    `{name}` is a column of the only row that passes the filters `rows`. `{min}` and `{max}` are the
    extremes of `column` over all rows that pass. `{ratio}` is `max` relative to the largest value
    of other rows: of those that pass `rows` after the filters in `over` have replaced its own.
    """

    page: str
    words: str
    file: str
    rows: Filters = {}
    column: str = ""
    over: Filters = {}


class Definitions(msgspec.Struct, forbid_unknown_fields=True):
    """The contents of benchmarks/claims.yaml."""

    tables: dict[str, Table]
    claims: list[Claim]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Keep the pages in line with the result files.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is out of date"
    )
    options = parser.parse_args(arguments)
    definitions = read_definitions()
    # Sentences are checked instead of generated: with comments around every number, they could be
    # neither read nor wrapped.
    problems = find_wrong_claims(definitions.claims)
    if options.check:
        problems += find_stale_tables(definitions.tables)
    else:
        write_tables(definitions.tables)
        write_plots()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def read_definitions() -> Definitions:
    """Read benchmarks/claims.yaml.

    Raise InputError if a field is missing, unknown or of the wrong type.
    """
    try:
        return msgspec.convert(read_yaml(CLAIMS), Definitions)
    except msgspec.ValidationError as error:
        raise InputError(f"{CLAIMS}: {error}") from error


def find_wrong_claims(claims: Sequence[Claim]) -> list[str]:
    """Return a sentence for each claim whose words are not on its page."""
    problems = []
    for claim in claims:
        words = render_claim(claim)
        # Pages are wrapped by hand, so a line break counts as a space.
        text = " ".join(read_page(claim.page).split())
        if words not in text:
            problems.append(f"{claim.page} must say, by {claim.file}: {words}")
    return problems


def find_stale_tables(tables: dict[str, Table]) -> list[str]:
    """Return a sentence for each page whose tables differ from the result files."""
    problems = []
    for page in list_pages(tables):
        text = read_page(page)
        if replace_tables(text, page, tables) != text:
            problems.append(
                f"{page} has tables that are out of date: run `python benchmarks/results_page.py`"
            )
    return problems


def write_tables(tables: dict[str, Table]) -> None:
    for page in list_pages(tables):
        write_text(ROOT / page, replace_tables(read_page(page), page, tables))
        print(f"wrote {page}")


def write_plots() -> None:
    for name, plot in PLOTS.items():
        path = ROOT / "docs" / f"{name}.png"
        with atomic_write(path) as partial:
            # The widest plot is 12 inches: 1,080 pixels, about what GitHub shows of a page.
            plot().savefig(partial, format="png", dpi=90)
        print(f"wrote {path.relative_to(ROOT)}")


def list_pages(tables: dict[str, Table]) -> list[str]:
    return sorted({table.page for table in tables.values()})


def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def replace_tables(text: str, page: str, tables: dict[str, Table]) -> str:
    """Return the text of a page with its tables generated again.

    Raise InputError if it lacks the lines between which a table belongs.
    """
    for name, table in tables.items():
        if table.page != page:
            continue
        before, start, rest = text.partition(TABLE_START.format(name=name) + "\n")
        _, end, after = rest.partition(TABLE_END)
        if not start or not end:
            raise InputError(
                f"{page} lacks the lines {TABLE_START.format(name=name)} and {TABLE_END}: add them"
            )
        # A blank line after the first comment and before the second one: some parsers take the
        # neighbors of a comment for HTML, too.
        text = f"{before}{start}\n{make_table(table)}\n{end}{after}"
    return text


def make_table(table: Table) -> str:
    """Return the table in Markdown; raise InputError if the file lacks one of its columns."""
    rows = select_rows(table.file, table.rows)
    for column in table.columns:
        name, _, _ = column.partition(" ± ")
        # A column may be empty in the chosen rows, but not missing in the whole file.
        if not any(name in row for row in select_rows(table.file, {})):
            raise InputError(f"{table.file} has no column {name}, which {CLAIMS.name} names")
    cells = []
    for row in rows:
        cells_of_row = [format_column(row, column) for column in table.columns]
        cells.append(cells_of_row)
    return format_table(list(table.columns.values()), cells)


def format_column(row: Row, column: str) -> str:
    """Return the cell of a column, which is a name or "name ± name".

    The second value may be missing: a single seed has no standard deviation.
    """
    name, _, deviation_name = column.partition(" ± ")
    cell = format_cell(row.get(name))
    deviation = row.get(deviation_name)
    if deviation is not None:
        cell += f" ± {format_cell(deviation)}"
    return cell


def render_claim(claim: Claim) -> str:
    """Return the words that the page must contain.

    "{speed:.0f} clips/s" becomes "10 clips/s". Raise InputError if the words need a number that the
    rows do not have.
    """
    rows = select_rows(claim.file, claim.rows)
    numbers: dict[str, Any] = {}
    # Of several rows, nobody could tell which one a name means.
    if len(rows) == 1:
        numbers.update(rows[0])
    if claim.column:
        values = [row[claim.column] for row in rows]
        numbers["min"] = min(values)
        numbers["max"] = max(values)
    if claim.over:
        baselines = select_rows(claim.file, {**claim.rows, **claim.over})
        numbers["ratio"] = numbers["max"] / max(row[claim.column] for row in baselines)
    try:
        words = claim.words.format(**numbers)
    except KeyError as error:
        raise InputError(
            f'"{claim.words}" needs {error}, which {claim.file} has not in one row of {claim.rows}'
        ) from error
    # `{ratio:.0%}` gives "97%"; the pages write "97 %".
    return re.sub(r"(\d)%", r"\1 %", words)


def select_rows(file: str, filters: Filters) -> list[Row]:
    """Return the rows that pass all filters; raise InputError if there are none.

    {"loader": ["spdl", "torchcodec"], "repeats": 1} passes rows of either loader with one clip per
    decoded video.
    """
    path: Path = RESULTS / file
    if not path.is_file():
        raise InputError(f"{CLAIMS.name} names {file}, which is not in {RESULTS}")
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for name, allowed in filters.items():
        if not isinstance(allowed, list):
            allowed = [allowed]
        rows = [row for row in rows if row.get(name) in allowed]
    if not rows:
        raise InputError(f"{path} has no row with {filters}")
    return rows


if __name__ == "__main__":
    run_command(main)
