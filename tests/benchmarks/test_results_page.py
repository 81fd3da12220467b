import json
from pathlib import Path

import pytest

from benchmarks import results_page
from common.errors import InputError


@pytest.mark.parametrize("page", results_page.PAGES, ids=lambda page: page.name)
def test_the_page_is_what_the_results_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert results_page.regenerate(text) == text, "run `python benchmarks/results_page.py`"


def test_every_number_stands_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in results_page.PAGES)
    assert [name for name in results_page.NUMBERS if f"<!-- = {name} -->" not in text] == []


def test_a_number_is_that_of_the_best_row(monkeypatch, tmp_path: Path) -> None:
    rows = [
        {"loader": loader, "what": "bf16, large", "speed": speed}
        for loader, speed in (("spdl", 10.0), ("decord", 5.0), ("adamae", 80.0), ("other", 3000.0))
    ]
    (tmp_path / "x.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    peers = {"file": "x.json", "column": "speed", "where": "what=bf16, large, loader=spdl|decord", "over": ""}
    own = {**peers, "where": "loader=adamae", "over": "loader=spdl|decord"}
    numbers = {
        "peer": {**peers, "as": "{value} by {loader}"}, "peers": {**peers, "as": "{low:.0f} to {value:.0f}"},
        "ratio": {**own, "as": "{ratio:.2g}×"}, "all": {**peers, "where": "", "as": "{value}"},
        "none": {**own, "where": "loader=nobody"},
    }  # fmt: skip
    monkeypatch.setattr(results_page, "NUMBERS", numbers)
    found = [results_page.make_number(name) for name in ("peer", "peers", "ratio", "all")]
    assert found == ["10 by spdl", "5 to 10", "8×", "3,000"]
    page = "<!-- = ratio -->\n9×<!-- end --> | <!-- = peer --><!-- end -->"
    assert results_page.regenerate(page) == "<!-- = ratio -->8×<!-- end --> | <!-- = peer -->10 by spdl<!-- end -->"
    with pytest.raises(InputError, match="has no row with loader=nobody"):
        results_page.make_number("none")
    with pytest.raises(InputError, match=r"names the number nowhere, which .*results_page\.yaml does not define"):
        results_page.regenerate("<!-- = nowhere --><!-- end -->")


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


def test_plots_show_every_loader_and_the_bound() -> None:
    figure = results_page.plot_loading(results_page.read_rows(results_page.LOADING))
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert {"adamae", "spdl", "torchcodec", "decord"} <= set(names)
        assert "decoding" not in names
        assert len(axes.lines) == 1, "the bound"
    fastest = figure.axes[0].patches[-1].get_width()
    assert fastest == max(patch.get_width() for patch in figure.axes[0].patches)
