"""Write RUN/report.html: configuration, progress and results of a run in one self-contained file.

It is made only of what lies in the run directory, at every checkpoint; `python -m training.report RUN` makes it again.
"""

import argparse
import base64
import sys
import time
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jinja2
from tqdm import tqdm

from common.atomic_io import write_text
from common.errors import run_command
from common.logging import format_number, log, printable
from model.weights.pretrained import run_config
from pipeline.jsonl import JsonlFile
from training.config import TrainConfig, changed_keys
from training.logger import read_rows

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MAX_POINTS = 300  # of a curve: each stands for the mean of its steps
MAX_CORRUPT_VIDEOS = 50  # listed
RECENT = 20  # rows of metrics.jsonl whose median is "current"
BASELINE = 1.0  # the loss of predicting each patch's mean, with normalized targets
WIDTH, HEIGHT = 600, 220  # of a chart, in units of its own
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # Okabe and Ito's, for any color vision
CHARTS = (
    ("loss", ("reconstruction_loss", "loss", "evaluation/reconstruction_loss", "evaluation/nll")),
    ("accuracy", tuple(f"evaluation/{name}" for name in ("knn_top1", "majority_top1", "top1", "top5", "mAP"))),
    ("accuracy in training", ("accuracy",)),
    ("RankMe", ("evaluation/rankme",)),
    ("clips/s", ("clips_per_second",)),
    ("data stall (%)", ("data_wait_fraction",)),
    ("learning rate", ("lr",)),
    ("gradient norm", ("grad_norm",)),
    ("sampler entropy", ("sampler_entropy",)),
)
CURRENT = {
    "reconstruction_loss": "reconstruction loss",
    "loss": "loss",
    "clips_per_second": "clips/s",
    "step_time_ms": "ms/step",
    "data_wait_fraction": "data stall (%)",
    "peak_memory_gib": "peak memory (GiB)",
    "skipped_updates": "skipped updates (%)",
}
PERCENTAGES = ("data_wait_fraction", "skipped_updates")


def write_report(run: Path, config: TrainConfig | dict[str, Any], total_steps: int | None = None) -> None:
    """Write RUN/report.html; reads all of metrics.jsonl: a second for 50,000 rows."""
    rows = read_metrics(run)
    corrupt = JsonlFile(run / "quarantine.jsonl").read()
    images = [
        (printable(file.stem), "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode())
        for file in sorted((run / "figures").glob("*.png"))
    ]
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE.read_text())
    html = page.render(
        title=printable(run.resolve().name),
        updated=time.strftime("%Y-%m-%d %H:%M"),
        progress=describe_progress(rows, total_steps),
        current=current_metrics(rows),
        charts=[chart for title, names in CHARTS if (chart := make_chart(title, names, rows)) is not None],
        images=images,
        configuration=changed_keys(config),
        checkpoints=[printable(folder.name) for folder in sorted((run / "checkpoints").glob("*")) if folder.is_dir()],
        num_corrupt=len(corrupt),
        corrupt=[
            {name: printable(line.get(name, "")) for name in ("key", "reason", "where")}
            for line in corrupt[:MAX_CORRUPT_VIDEOS]
        ],
        recent=RECENT,
        width=WIDTH,
        height=HEIGHT,
    )
    write_text(run / "report.html", html)


def describe_progress(rows: Sequence[dict[str, Any]], total_steps: int | None) -> str:
    timed = [row for row in rows if "step_time_ms" in row]
    if not timed:
        return "no step has been logged yet"
    step = timed[-1]["step"]
    if total_steps is None:
        return f"step {step:,}"
    seconds = (total_steps - step) * median(row["step_time_ms"] for row in timed[-RECENT:]) / 1000
    remaining = f"about {tqdm.format_interval(seconds)} left" if step < total_steps else "finished"
    return f"step {step:,} of {total_steps:,} ({step / total_steps:.0%}), {remaining}"


def current_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return values by title: medians of the newest rows, and the last evaluation."""
    recent = {title: [row[name] for row in rows if name in row][-RECENT:] for name, title in CURRENT.items()}
    medians = {title: median(values) for title, values in recent.items() if values}
    evaluation = {name: row[name] for row in rows for name in row if name.startswith("evaluation/")}
    return {title: _format(value) for title, value in (medians | evaluation).items()}


def make_chart(title: str, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the page needs to draw curves over the steps; None if none of these metrics was logged."""
    series = {name: average_points([(row["step"], row[name]) for row in rows if name in row]) for name in names}
    if series.get("reconstruction_loss"):
        del series["loss"]  # of pre-training it is nearly the same
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    steps, values = zip(*(point for points in series.values() for point in points), strict=True)
    (first, last), (low, high) = (min(steps), max(steps)), (min(values), max(values))

    def locate(step: float, value: float) -> str:
        x = (step - first) / max(last - first, 1) * WIDTH
        y = HEIGHT - (value - low) / max(high - low, 1e-12) * HEIGHT
        return f"{x:.1f},{y:.1f}"

    curves = [
        {"name": name, "color": color, "last": _format(points[-1][1]), "points": [locate(*point) for point in points]}
        for (name, points), color in zip(series.items(), COLORS, strict=False)
    ]
    baseline = locate(first, BASELINE).partition(",")[2] if title == "loss" and low <= BASELINE <= high else None
    return {
        "title": title, "curves": curves, "low": _format(low), "high": _format(high), "steps": (first, last),
        "baseline": baseline,
    }  # fmt: skip


def average_points(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a curve to at most MAX_POINTS points, each the mean of as many neighbors."""
    size = -(-len(points) // MAX_POINTS) or 1
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(fmean(step for step, _ in group), fmean(value for _, value in group)) for group in groups]


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Read the finite numbers of a run's metrics.jsonl, fractions as percentages."""
    return [
        {name: value * (100 if name in PERCENTAGES else 1) for name, value in row.items() if _is_number(value)}
        for row in read_rows(run / "metrics.jsonl")
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _format(value: float) -> str:
    return format_number(value) if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    run = parser.parse_args(arguments).run
    write_report(run, run_config(run))
    log(f"wrote {run}/report.html")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
