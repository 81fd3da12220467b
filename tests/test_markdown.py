"""Read all pages with a CommonMark parser, as GitHub does, and check that they look as meant."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from adamae.benchmarks.results_page import read_definitions

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "benchmarks/experiments.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), NOTEBOOK]
MAX_COLUMNS = 120
# A row of a table cannot be wrapped. A wide screen still shows this much.
MAX_TABLE_COLUMNS = 200
HTML_TYPES = ("html_block", "html_inline")
TABLE_START = re.compile(r"<!-- table (?P<name>.+) -->")


def parse(text: str) -> list[Token]:
    """Return the tokens of CommonMark with tables.

    Those within a paragraph or a cell follow their parent.
    """
    tokens = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        tokens.append(token)
        tokens.extend(token.children or ())
    return tokens


def list_html(text: str) -> list[str]:
    """Return all HTML of a page.

    A line that begins with a comment is HTML to its end, and is shown as it is typed.
    """
    tokens = parse(text)
    return [token.content.strip() for token in tokens if token.type in HTML_TYPES]


def list_broken_rows(text: str) -> list[str]:
    """Return the rows of tables that have more or fewer cells than the head.

    A row that belongs to no table is broken, too: it is shown as text.
    """
    lines = text.splitlines()
    broken = []
    for token in parse(text):
        if token.type not in ("table_open", "paragraph_open"):
            continue
        assert token.map is not None
        first, end = token.map
        block = lines[first:end]
        if token.type == "table_open":
            num_columns = count_cells(block[0])
            broken += [row for row in block if count_cells(row) != num_columns]
        else:
            broken += [line for line in block if line.startswith("|")]
    return broken


def count_cells(row: str) -> int:
    """Count the cells of `| a | b |`; an escaped bar belongs to a cell."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def list_text_lines(text: str) -> Iterator[str]:
    """Yield the lines outside code blocks."""
    is_code = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_only_generated_tables_have_comments(page: Path) -> None:
    comments = list_html(page.read_text(encoding="utf-8"))
    starts = comments[::2]
    ends = comments[1::2]
    assert all(TABLE_START.fullmatch(comment) for comment in starts), starts
    assert ends == ["<!-- end of table -->"] * len(starts)


def test_every_generated_table_is_defined() -> None:
    names = []
    for page in PAGES:
        names += TABLE_START.findall(page.read_text(encoding="utf-8"))
    assert sorted(names) == sorted(read_definitions().tables)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_row_of_a_table_is_broken(page: Path) -> None:
    assert list_broken_rows(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_is_wider_than_a_screen(page: Path) -> None:
    wide = []
    for line in page.read_text(encoding="utf-8").splitlines():
        is_row = line.startswith("|")
        # The notebook's tables name settings as they were given.
        if is_row and page == NOTEBOOK:
            continue
        if len(line) > (MAX_TABLE_COLUMNS if is_row else MAX_COLUMNS):
            wide.append(line)
    assert wide == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_have_a_digit_before_the_point(page: Path) -> None:
    text = "\n".join(list_text_lines(page.read_text(encoding="utf-8")))
    # Not the extension of a file, a slice, or the end of a link or a call.
    assert re.findall(r"(?<![\w.`/)*\]])[+−-]?\.\d+", text) == []


def test_what_the_checks_find() -> None:
    # The comment begins a line, so GitHub would show it and the line as they are typed.
    assert list_html("of the\n<!-- = x -->0.97<!-- end --> batch") != []
    assert list_html("a `<!-- b -->` c") == []
    assert list_broken_rows("| a | b |\n|---|---|\n| 1 | 2 |") == []
    assert list_broken_rows("| a | b |\n|---|---|\n| 1 | 2 | 3 |") == ["| 1 | 2 | 3 |"]
    assert list_broken_rows("text\n\n| a | b |\n| 1 | 2 |") == ["| a | b |", "| 1 | 2 |"]
