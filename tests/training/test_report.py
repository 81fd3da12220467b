"""RUN/report.html: complete in itself, right about the run, and fit for a browser of any width."""

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from common.errors import InputError
from training.config import TrainConfig, changed_keys, parse
from training.report import MAX_POINTS, average_points, main, write_report


@pytest.fixture
def config() -> TrainConfig:
    return parse(["data.shards=<b>shards</b>", "model.mask_ratio=0.9"])


@pytest.fixture
def run(tmp_path: Path, config: TrainConfig) -> Path:
    """A run of 1,000 of 2,000 steps, with hostile names."""
    folder = tmp_path / "run <script>alert(1)"
    (folder / "figures").mkdir(parents=True)
    (folder / "checkpoints/step-00001000").mkdir(parents=True)
    Image.new("RGB", (1600, 400), "navy").save(folder / "figures/<i>clip.png")
    lines = [
        {"step": step, "reconstruction_loss": 1000 / step, "loss": 1.0, "lr": 1e-4, "clips_per_second": 12.0,
         "step_time_ms": 500.0, "data_wait_fraction": 0.25, "grad_norm": float("nan")}
        for step in range(10, 1001, 10)
    ]  # fmt: skip
    lines.insert(50, {"step": 500, "evaluation/reconstruction_loss": 0.75, "evaluation/knn_top1": 0.5})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + "no line of a run\n" + '{"step": 1010, "lo')
    bad = [{"key": f"bad{i}", "where": "shard", "reason": "<u>cut off"} for i in range(60)]
    (folder / "quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bad) + '{"ke')
    write_report(folder, config, 2000)
    return folder


def test_it_says_what_was_run_and_where_it_stands(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert "step 1,000 of 2,000 (50%), about 08:20 left" in text
    assert re.search(r'<td>data stall \(%\)</td><td class="number">25</td>', text)
    assert "<td>model.mask_ratio</td><td>0.9</td>" in text
    assert '<td>evaluation/knn_top1</td><td class="number">0.5</td>' in text
    assert "Corrupt videos: 60" in text
    assert text.count("cut off") == 50
    assert "step-00001000" in text
    titles = re.findall(r'aria-label="([^"]*)"', text)
    assert titles[:2] == ["loss", "accuracy"]
    assert "gradient norm" not in titles  # it was never a number


def test_it_is_complete_in_itself_and_no_name_is_obeyed(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert not re.search(r"https?://|<link(?! rel=\"icon\" href=\"data:)|@import|url\(", text)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)', text))
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert not {"script", "b", "i", "u"} & set(found)


def test_a_run_without_a_step_has_a_report_too(tmp_path: Path, config: TrainConfig) -> None:
    write_report(tmp_path, config)
    assert "no step has been logged yet" in (tmp_path / "report.html").read_text()


def test_a_curve_has_few_points_and_the_means_of_all() -> None:
    points = [(float(step), float(step % 7)) for step in range(10_001)]
    few = average_points(points)
    assert len(few) <= MAX_POINTS
    assert all(abs(value - 3) < 0.2 for _, value in few[:-1])
    assert average_points(points[:3]) == points[:3]
    assert average_points([]) == []


def test_only_what_is_no_default_is_named(config: TrainConfig) -> None:
    assert changed_keys(config) == {"data.shards": "<b>shards</b>", "model.mask_ratio": 0.9}


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_it_without_complaint_and_without_scrolling_sideways(
    run: Path, tmp_path: Path, browser: str, width: int
) -> None:
    probe = """<script>onload = () => parent.postMessage(
      innerWidth + " " + document.documentElement.scrollWidth + " " + document.images[0].naturalWidth, "*")</script>"""
    (run / "inner.html").write_text((run / "report.html").read_text().replace("</html>", probe))
    outer = tmp_path / "outer.html"  # a frame has any width; a window of a headless browser is never so narrow
    outer.write_text(f"""<iframe src="{(run / "inner.html").as_uri()}" width="{width}" height="900" frameborder="0">
      </iframe><script>onmessage = event => document.body.dataset.sizes = event.data</script>""")
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--virtual-time-budget=3000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", outer.as_uri(),
        ],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    sizes = re.search(r'data-sizes="(\d+) (\d+) (\d+)"', done.stdout)
    assert sizes, done.stdout[-500:] + done.stderr[-2000:]
    inner, scrolled, picture = map(int, sizes.groups())
    assert (inner, picture) == (width, 1600)
    assert scrolled <= inner


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run directory: it has no config\.yaml"):
        main([str(tmp_path)])


def test_a_single_point_and_the_loss_of_the_mean_are_drawn(tmp_path: Path, config: TrainConfig) -> None:
    rows = [{"step": step, "reconstruction_loss": loss} for step, loss in ((1, 1.5), (2, 0.5))]
    rows.append({"step": 2, "evaluation/rankme": 7.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(tmp_path, config)
    text = (tmp_path / "report.html").read_text()
    assert 'd="M0 110.0H600"' in text, "halfway between 0.5 and 1.5"
    assert text.count("<circle") == text.count("<polyline") == 1
