import json
from pathlib import Path

import pytest

from benchmarks import results_page
from common.errors import InputError


def test_the_page_is_what_the_results_say() -> None:
    text = results_page.PAGE.read_text(encoding="utf-8")
    assert results_page.regenerate(text) == text, "run `python benchmarks/results_page.py`"
    assert "| --- |\n<!-- end" not in text, "a table without a row"


def test_a_table_has_the_chosen_columns_and_rows(tmp_path: Path, monkeypatch) -> None:
    rows = [{"name": name, "top1": top1, "top1_std": 0.01234} for name, top1 in (("a", 0.5), ("b", 123.4), ("c", None))]
    (tmp_path / "x.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    page = "<!-- table x.json | name: model, top1 ± top1_std: top-1 | name=a|b -->\nold\n<!-- end -->"
    expected = "| model | top-1 |\n| --- | --- |\n| a | 0.5 ± 0.0123 |\n| b | 123 ± 0.0123 |\n"
    assert results_page.regenerate(page) == page.replace("old\n", expected)
    with pytest.raises(InputError, match=r"names y\.json, which is not in"):
        results_page.regenerate("<!-- table y.json | name -->\n<!-- end -->")
    with pytest.raises(InputError, match="names the column nowhere"):
        results_page.regenerate("<!-- table x.json | nowhere -->\n<!-- end -->")
