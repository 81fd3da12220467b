"""RUN/report.html: what was run, how it goes, where it stands; complete in itself, drawn anew at every checkpoint.

Made of what lies in the run's folder and of nothing else: `python -m training.report RUN` draws it of any run.
"""

import argparse
import base64
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jinja2

from common.atomic_io import write_text
from common.errors import run_command
from common.logging import format_duration, format_number, log, printable
from model.weights.pretrained import run_config
from training.config import TrainConfig, changed_keys
from training.logger import read_rows

MOST_POINTS = 300  # of a curve: each stands for the mean of its steps
MOST_BAD_VIDEOS = 50  # named
RECENT = 20  # lines of metrics.jsonl that "now" means
WIDTH, HEIGHT = 600, 220  # of a chart, in units of its own
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito's, for any colour vision
CHARTS = (
    ("loss", ("reconstruction_loss", "loss", "evaluation/reconstruction_loss", "evaluation/nll")),
    ("quality on held-out videos", ("evaluation/knn_top1", "evaluation/top1", "evaluation/top5", "accuracy")),
    ("RankMe of the features", ("evaluation/rankme",)),
    ("clips a second", ("clips_per_second",)),
    ("share of the time that is spent waiting for data", ("data_wait_fraction",)),
    ("learning rate", ("lr",)),
    ("norm of the gradient", ("grad_norm",)),
    ("entropy of the sampler", ("sampler_entropy",)),
)
NOW = (
    ("reconstruction_loss", "reconstruction loss"),
    ("loss", "loss"),
    ("clips_per_second", "clips a second"),
    ("step_time_ms", "milliseconds a step"),
    ("data_wait_fraction", "share of the time spent waiting for data"),
    ("peak_memory_gib", "peak memory, GiB"),
    ("skipped_updates", "share of updates skipped"),
)


class Curve(NamedTuple):
    name: str
    colour: str
    points: str  # of an SVG polyline
    last: str


class Chart(NamedTuple):
    title: str
    curves: list[Curve]
    low: str
    high: str
    steps: tuple[str, str]


def write_report(run: Path, config: TrainConfig | dict[str, Any], total_steps: int | None = None) -> None:
    """Draw RUN/report.html; reads all of metrics.jsonl: a second for 50,000 lines."""
    lines = list(read_rows(run / "metrics.jsonl"))
    bad = list(_json_lines(run / "quarantine.jsonl"))
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)
    write_text(
        run / "report.html",
        page.render(
            title=printable(run.resolve().name),
            written=time.strftime("%Y-%m-%d %H:%M"),
            stands=_stands(lines, total_steps),
            now=_now(lines),
            charts=[chart for title, names in CHARTS if (chart := _chart(title, names, lines)) is not None],
            pictures=[(printable(file.stem), _embedded(file)) for file in sorted((run / "figures").glob("*.png"))],
            changed=changed_keys(config),
            checkpoints=[
                printable(folder.name) for folder in sorted((run / "checkpoints").glob("*")) if folder.is_dir()
            ],
            num_bad=len(bad),
            bad=[
                {name: printable(line.get(name, "")) for name in ("key", "reason", "where")}
                for line in bad[:MOST_BAD_VIDEOS]
            ],
            width=WIDTH,
            height=HEIGHT,
        ),
    )


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):  # cut short by a kill
                continue
            if isinstance(value, dict):
                yield value


def _stands(lines: Sequence[dict[str, Any]], total_steps: int | None) -> str:
    timed = [line for line in lines if isinstance(line.get("step_time_ms"), int | float)]
    if not timed:
        return "no step has been logged yet"
    step = timed[-1]["step"]
    if total_steps is None:
        return f"step {step:,}"
    left = (total_steps - step) * median(line["step_time_ms"] for line in timed[-RECENT:]) / 1000
    rest = f"about {format_duration(left)} left" if step < total_steps else "finished"
    return f"step {step:,} of {total_steps:,} ({step / total_steps:.0%}), {rest}"


def _now(lines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Medians of the newest lines, and the newest figures on held-out videos."""
    found = []
    for name, title in NOW:
        values = [line[name] for line in lines if _is_number(line.get(name))][-RECENT:]
        if values:
            found.append((title, _text(median(values))))
    newest = {name: line[name] for line in lines for name in line if name.startswith("evaluation/")}
    return found + [(f"{name} (held out)", _text(value)) for name, value in newest.items() if _is_number(value)]


def _chart(title: str, names: Sequence[str], lines: Sequence[dict[str, Any]]) -> Chart | None:
    """Curves over the steps; None where none of these figures was logged."""
    series = {
        name: thinned([(line["step"], line[name]) for line in lines if _is_number(line.get(name))]) for name in names
    }
    if "reconstruction_loss" in names and series["reconstruction_loss"]:
        del series["loss"]  # of pre-training it is nearly the same
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    steps = [step for points in series.values() for step, _ in points]
    values = [value for points in series.values() for _, value in points]
    (first, last), (low, high) = (min(steps), max(steps)), (min(values), max(values))

    def place(step: float, value: float) -> str:
        x = (step - first) / max(last - first, 1) * WIDTH
        y = HEIGHT - (value - low) / max(high - low, 1e-12) * HEIGHT
        return f"{x:.1f},{y:.1f}"

    curves = [
        Curve(name, colour, " ".join(place(*point) for point in points), _text(points[-1][1]))
        for (name, points), colour in zip(series.items(), COLOURS, strict=False)
    ]
    return Chart(title, curves, _text(low), _text(high), (f"{first:,.0f}", f"{last:,.0f}"))


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS points, each the mean of as many neighbours."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = (list(islice(points, start, start + size)) for start in range(0, len(points), size))
    return [(sum(s for s, _ in group) / len(group), sum(v for _, v in group) / len(group)) for group in groups]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def _text(value: float) -> str:
    return format_number(value) if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"


def _embedded(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<style>
  body { font: 16px/1.4 sans-serif; margin: 0 auto; padding: 1em; max-width: 1400px; color: #222; }
  .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 1.5em; }
  figure { margin: 0; } svg { width: 100%; height: auto; border-left: 1px solid #888; border-bottom: 1px solid #888; }
  polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
  .axis { display: flex; justify-content: space-between; font-size: 13px; color: #555; }
  .picture { overflow-x: auto; } img { width: 100%; min-width: 800px; } table { border-collapse: collapse; }
  td { padding: 2px 1em 2px 0; vertical-align: top; }
  td, li, pre { overflow-wrap: anywhere; white-space: pre-wrap; }
  .number { overflow-wrap: normal; white-space: nowrap; }
</style>
<h1>{{ title }}</h1>
<p><strong>{{ stands }}</strong>; drawn {{ written }}</p>
<h2>Now</h2>
<table>{% for name, value in now %}<tr><td>{{ name }}</td><td class="number">{{ value }}</td></tr>{% endfor %}</table>
<h2>So far</h2>
<div class="charts">
{% for chart in charts %}<figure>
  <figcaption>{{ chart.title }}{% for curve in chart.curves %}<br>
    <span style="color: {{ curve.colour }}">&#9644;</span> {{ curve.name }}: {{ curve.last }}{% endfor %}
  </figcaption>
  <div class="axis"><span>{{ chart.high }}</span></div>
  <svg viewBox="0 -3 {{ width }} {{ height + 6 }}" role="img" aria-label="{{ chart.title }}">
  {% for curve in chart.curves %}<polyline stroke="{{ curve.colour }}" points="{{ curve.points }}"/>{% endfor %}</svg>
  <div class="axis"><span>{{ chart.low }}</span></div>
  <div class="axis"><span>step {{ chart.steps[0] }}</span><span>{{ chart.steps[1] }}</span></div>
</figure>{% endfor %}
</div>
{% if pictures %}<h2>What it makes of clips</h2>{% endif %}
{% for name, picture in pictures %}<h3>{{ name }}</h3>
<div class="picture"><img src="{{ picture }}" alt="rows of frames and maps"></div>{% endfor %}
<h2>Videos that did not decode: {{ num_bad }}</h2>
{% if bad %}<table>{% for video in bad %}<tr>
<td>{{ video.key }}</td><td>{{ video.reason }}</td><td>{{ video.where }}</td></tr>{% endfor %}</table>{% endif %}
{% if num_bad > bad | length %}<p>The others are in quarantine.jsonl.</p>{% endif %}
<h2>What was run</h2>
<p>Keys that differ from their defaults; config.yaml has all of them.</p>
<table>{% for key, value in changed.items() %}<tr><td>{{ key }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>Checkpoints</h2>
<ul>{% for name in checkpoints %}<li>{{ name }}</li>{% endfor %}</ul>
</html>
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    run = parser.parse_args(arguments).run
    write_report(run, run_config(run))
    log(f"{run}/report.html")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
