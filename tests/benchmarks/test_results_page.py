import json
from pathlib import Path

import pytest

from benchmarks import results_page
from common.errors import InputError


@pytest.mark.parametrize("page", [results_page.PAGE, results_page.README])
def test_the_page_is_what_the_results_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert results_page.regenerate(text) == text, "run `python benchmarks/results_page.py`"
    assert "| --- |\n<!-- end" not in text, "a table without a row"


def test_figures_name_the_fastest_other_loader(monkeypatch, tmp_path: Path) -> None:
    speeds = {
        ("decord", "original", 1): 5.0, ("spdl", "original", 1): 10.0, ("decoding", "h264", 1): 90.0,
        ("spdl", "h264", 1): 20.0, ("torchcodec", "h264", 1): 40.0,
        ("ours", "h264", 1): 80.0, ("ours", "h264", 2): 120.0,
    }  # fmt: skip
    rows = [
        {"loader": loader, "encode": encode, "repeats": repeats, "clips_per_second": speed}
        for (loader, encode, repeats), speed in speeds.items()
    ]
    (tmp_path / "cpu").mkdir()
    (tmp_path / results_page.LOADING).write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    page = "<!-- = speed-up -->8<!-- end --> | <!-- = ours, same bytes --><!-- end -->"
    assert results_page.regenerate(page) == (
        "<!-- = speed-up -->8 times the throughput of spdl, the fastest other loader<!-- end --> |"
        " <!-- = ours, same bytes -->80, **2×**<!-- end -->"
    )
    assert results_page.make_figure("fastest on our bytes") == "40, torchcodec"
    assert results_page.make_figure("ours, two clips") == "120, **12×**"
    with pytest.raises(InputError, match="names the figure nowhere: must be one of speed-up, "):
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
        assert {"ours", "spdl", "torchcodec", "decord", "pyav"} <= set(names)
        assert "decoding" not in names
        assert len(axes.lines) == 1, "the bound"
    fastest = figure.axes[0].patches[-1].get_width()
    assert fastest == max(patch.get_width() for patch in figure.axes[0].patches)
