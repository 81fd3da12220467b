"""RUN/report.html: one file, right about the run, in which no name is obeyed as HTML."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from adamae.training.config import TrainConfig, parse
from adamae.training.report import write_report


@pytest.fixture
def config() -> TrainConfig:
    return parse(["data.shards=<b>shards</b>", "model.mask_ratio=0.9"])


@pytest.fixture
def run(tmp_path: Path, config: TrainConfig) -> Path:
    """Write a run after 1,000 of 2,000 steps, with hostile names, and its report."""
    folder = tmp_path / "run <script>alert(1)"
    (folder / "figures").mkdir(parents=True)
    (folder / "checkpoints/step-00001000").mkdir(parents=True)
    Image.new("RGB", (1600, 400), "navy").save(folder / "figures/<i>clip.png")
    lines = [
        {
            "step": step,
            "reconstruction_loss": 1000 / step,
            "loss": 1.0,
            "lr": 1e-4,
            "clips_per_second": 12.0,
            "step_time_ms": 500.0,
            "data_wait_fraction": 0.25,
            "grad_norm": float("nan"),
        }
        for step in range(10, 1001, 10)
    ]
    scores = {
        "reconstruction_loss": 0.75,
        "knn_top1": 0.5,
        "knn_error": 0.16,
        "knn_neighbors": 4,
        "num_videos": 9,
        "majority_top1": 0.4,
    }
    evaluation = {f"evaluation/{name}": value for name, value in scores.items()}
    lines.insert(50, {"step": 500, **evaluation})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + "no line of a run\n" + '{"step": 1010, "lo')
    bad = [{"key": f"bad{i}", "where": "shard", "reason": "<u>cut off"} for i in range(60)]
    # Another rank has met some of them, too.
    bad += bad[20:30]
    text = "".join(json.dumps(line) + "\n" for line in bad)
    (folder / "quarantine.jsonl").write_text(text + '{"ke')
    write_report(folder, config, 2000)
    return folder


def test_it_says_what_was_run_and_where_it_stands(
    run: Path, config: TrainConfig, tmp_path: Path
) -> None:
    write_report(tmp_path, config, 10)
    assert "no step has been logged yet" in (tmp_path / "report.html").read_text()
    text = (run / "report.html").read_text()
    assert "step 1,000 of 2,000 (50%), about 8.3 min left; step 500: held-out loss 0.750" in text
    assert "held-out loss 0.750, k-NN 0.500 ±" in text
    assert "trained on &lt;b&gt;shards&lt;/b&gt;; evaluated on nothing" in text
    assert "/config.yaml" in text[text.index("To repeat the run:") : text.index("<h2>")]
    assert "<td>model.mask_ratio</td><td>0.9</td>" in text
    assert "Corrupt videos: 60" in text
    assert text.count("cut off") == 50
    assert "step-00001000" in text
    configuration = text[text.index("<h2>Configuration") : text.index("<h2>Checkpoints")]
    assert configuration.count("<tr>") == 2, "defaults are not listed"


def test_it_is_complete_in_itself_and_no_name_is_obeyed(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert not re.search(r"https?://|<link(?! rel=\"icon\" href=\"data:)|@import|url\(", text)
    sources = re.findall(r'src="([^"]*)', text)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    tags: set[str] = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.add(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert not tags & {"script", "b", "i", "u"}
