"""Claims and tables of pages, generated from and checked against constructed result files."""

import json
from pathlib import Path
from typing import Any

import pytest

from adamae.benchmarks import results_page
from adamae.benchmarks.harness import Row
from adamae.benchmarks.results_page import Claim, Table
from adamae.common.errors import InputError

LOADERS: list[Row] = [
    {"loader": "spdl", "batches": 8, "speed": 10.0, "speed_std": 0.01234},
    {"loader": "decord", "batches": 8, "speed": 5.0},
    {"loader": "adamae", "batches": 8, "speed": 80.0},
    {"loader": "other", "batches": 1, "speed": 3000.0},
]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the folders of pages and of result files by one that holds x.json."""
    (tmp_path / "x.json").write_text(json.dumps({"rows": LOADERS}))
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    monkeypatch.setattr(results_page, "ROOT", tmp_path)


def make_claim(words: str, **fields: Any) -> Claim:
    return Claim(page="page.md", words=words, file="x.json", **fields)


# This is the check of the committed pages; all others are of the pages that they write.
def test_the_pages_say_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert results_page.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (make_claim("{speed:.0f} clips/s", rows={"loader": "spdl"}), "10 clips/s"),
        (make_claim("{speed:,.0f} ± {speed_std:.3f}", rows={"loader": "spdl"}), "10 ± 0.012"),
        (make_claim("{min:.0f} to {max:.0f}", column="speed", rows={"batches": 8}), "5 to 80"),
        (
            make_claim(
                "{ratio:.2g}×",
                column="speed",
                rows={"loader": "adamae"},
                over={"loader": ["spdl", "decord"]},
            ),
            "8×",
        ),
        (
            make_claim(
                "{ratio:.0%} as fast",
                column="speed",
                rows={"loader": "decord"},
                over={"loader": "spdl"},
            ),
            "50 % as fast",
        ),
    ],
)
def test_the_words_of_a_claim_hold_numbers_of_the_results(claim: Claim, expected: str) -> None:
    assert results_page.render_claim(claim) == expected


@pytest.mark.usefixtures("results")
def test_a_claim_may_be_wrapped_but_not_wrong(tmp_path: Path) -> None:
    claim = make_claim("loads {speed:.0f} clips/s", rows={"loader": "spdl"})
    page = tmp_path / "page.md"
    page.write_text("It loads\n  10 clips/s.")
    assert results_page.find_wrong_claims([claim]) == []
    page.write_text("It loads 11 clips/s.")
    assert results_page.find_wrong_claims([claim]) == [
        "page.md must say, by x.json: loads 10 clips/s"
    ]


@pytest.mark.usefixtures("results")
def test_a_claim_of_several_rows_names_no_single_value() -> None:
    with pytest.raises(InputError, match=r"needs 'speed', which x\.json has not in one row"):
        results_page.render_claim(make_claim("{speed}", rows={"batches": 8}))
    with pytest.raises(InputError, match=r"has no row with \{'loader': 'nobody'\}"):
        results_page.render_claim(make_claim("{speed}", rows={"loader": "nobody"}))


@pytest.mark.usefixtures("results")
def test_a_table_has_the_chosen_columns_and_rows(tmp_path: Path) -> None:
    columns = {"loader": "loader", "speed ± speed_std": "clips/s"}
    tables = {"speeds": Table(page="page.md", file="x.json", columns=columns, rows={"batches": 8})}
    page = tmp_path / "page.md"
    page.write_text("<!-- table speeds -->\nold\n<!-- end of table -->\nend")
    assert results_page.find_stale_tables(tables) != []
    results_page.write_tables(tables)
    assert results_page.find_stale_tables(tables) == []
    lines = [
        "| loader | clips/s |",
        "| --- | --- |",
        "| spdl | 10 ± 0.0123 |",
        "| decord | 5 |",
        "| adamae | 80 |",
    ]
    assert page.read_text().splitlines() == [
        "<!-- table speeds -->",
        "",
        *lines,
        "",
        "<!-- end of table -->",
        "end",
    ]


@pytest.mark.usefixtures("results")
def test_a_table_needs_its_lines_its_file_and_its_columns() -> None:
    table = Table(page="page.md", file="y.json", columns={"loader": "loader"})
    with pytest.raises(InputError, match=r"page\.md lacks the lines <!-- table speeds -->"):
        results_page.replace_tables("no table", "page.md", {"speeds": table})
    with pytest.raises(InputError, match=r"names y\.json, which is not in"):
        results_page.make_table(table)
    with pytest.raises(InputError, match=r"x\.json has no column nowhere"):
        results_page.make_table(
            Table(page="page.md", file="x.json", columns={"nowhere": "heading"})
        )


def test_a_misspelled_field_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = tmp_path / "claims.yaml"
    claims.write_text("tables: {}\nclaims: [{page: a, words: b, file: c, row: {}}]")
    monkeypatch.setattr(results_page, "CLAIMS", claims)
    with pytest.raises(InputError, match="unknown field `row`"):
        results_page.read_definitions()
