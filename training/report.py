"""Write RUN/report.html, one self-contained file of what lies in the run directory, at every checkpoint: configuration,
progress and results of a run.
"""

import base64
import time
from collections.abc import Sequence
from math import ceil, floor, isfinite, log10
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jinja2

from common.atomic_io import write_text
from common.logging import format_duration, format_number, printable
from pipeline.jsonl import JsonlFile
from training.config import TrainConfig, changed_keys
from training.logger import read_rows
from training.summary import describe_scores, find_result

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MAX_POINTS = 300  # of a curve: each stands for the mean of its steps
MAX_CORRUPT_VIDEOS = 50  # listed
RECENT = 20  # rows of metrics.jsonl whose median is "current"
WIDTH, HEIGHT = 600, 220  # of a chart, in units of its own
MAX_TICKS = 6
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # Okabe and Ito's, for any color vision
CHARTS = (
    ("reconstruction_loss", "loss", "evaluation/reconstruction_loss", "evaluation/nll"),
    tuple(f"evaluation/{name}" for name in "knn_top1 majority_top1 pixel_top1 top1 top5 mAP".split()),
    *([name] for name in ("accuracy", "evaluation/rankme", "clips_per_second", "data_wait (%)", "lr", "grad_norm")),
    ("sampler_entropy",),
)
CURRENT = (
    *("reconstruction_loss", "loss", "clips_per_second", "step_time_ms", "data_wait (%)", "peak_memory_gib"),
    "skipped_updates",
)


def write_report(run: Path, config: TrainConfig, total_steps: int) -> None:
    """Write RUN/report.html; reads all of metrics.jsonl: a second for 50,000 rows."""
    rows = read_metrics(run)
    corrupt = JsonlFile(run / "quarantine.jsonl").read()
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE.read_text())
    html = page.render(
        title=printable(run.resolve().name),
        updated=time.strftime("%Y-%m-%d %H:%M"),
        progress=describe_progress(rows, total_steps),
        current=current_metrics(rows),
        charts=[chart for names in CHARTS if (chart := make_chart(names, rows)) is not None],
        images=[
            (printable(file.stem), "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode())
            for file in sorted(run.glob("figures/*.png"))
        ],
        configuration=changed_keys(config),
        checkpoints=[printable(folder.name) for folder in sorted(run.glob("checkpoints/*")) if folder.is_dir()],
        num_corrupt=len(corrupt),
        corrupt=[
            [printable(line.get(name, "")) for name in ("key", "reason", "where")]
            for line in corrupt[:MAX_CORRUPT_VIDEOS]
        ],
        recent=RECENT, width=WIDTH, height=HEIGHT,
    )  # fmt: skip
    write_text(run / "report.html", html)


def describe_progress(rows: Sequence[dict[str, Any]], total_steps: int) -> str:
    timed = [row for row in rows if "step_time_ms" in row]
    if not timed:
        return "no step has been logged yet"
    step = timed[-1]["step"]
    seconds = (total_steps - step) * median(row["step_time_ms"] for row in timed[-RECENT:]) / 1000
    remaining = f"about {format_duration(seconds)} left" if step < total_steps else "finished"
    title, metrics = find_result(rows)
    result = f"; {title}: {describe_scores(metrics)}" if metrics else ""
    return f"step {step:,} of {total_steps:,} ({step / total_steps:.0%}), {remaining}{result}"


def current_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return values by name: medians of the newest rows, and the last evaluation."""
    recent = {name: [row[name] for row in rows if name in row][-RECENT:] for name in CURRENT}
    medians = {name: median(values) for name, values in recent.items() if values}
    evaluation = {name: row[name] for row in rows for name in row if name.startswith("evaluation/")}
    return {name: _format(value) for name, value in (medians | evaluation).items()}


def make_chart(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
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
        y = (high - value) / max(high - low, 1e-12) * HEIGHT
        return f"{x:.1f},{y:.1f}"

    curves = [
        {"name": name, "color": color, "last": _format(points[-1][1]), "points": [locate(*point) for point in points]}
        for (name, points), color in zip(series.items(), COLORS, strict=False)
    ]
    rows_at = [(_format(value), locate(first, value).split(",")[1]) for value in choose_ticks(low, high)]
    columns_at = [
        (f"{step:,.0f}", locate(step, low).split(",")[0]) for step in choose_ticks(first, last) if step % 1 == 0
    ]
    return {"curves": curves, "rows": rows_at, "columns": columns_at}


def choose_ticks(low: float, high: float) -> list[float]:
    """Return the multiples, between these, of 1, 2 or 5 times a power of ten, of which there are 3 to 7."""
    if low == high:
        return [low]
    power = 10.0 ** floor(log10((high - low) / MAX_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if high - low <= MAX_TICKS * power * factor)
    return [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def average_points(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduce a curve to at most MAX_POINTS points, each the mean of as many neighbors."""
    size = -(-len(points) // MAX_POINTS) or 1
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(fmean(step for step, _ in group), fmean(value for _, value in group)) for group in groups]


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Read the finite numbers of a run's metrics.jsonl; what the progress bar shows in percent is in percent here."""
    rows = [
        {name: value for name, value in row.items() if isinstance(value, int | float) and isfinite(value)}
        for row in read_rows(run / "metrics.jsonl")
    ]
    for row in rows:
        if "data_wait_fraction" in row:
            row["data_wait (%)"] = 100 * row.pop("data_wait_fraction")
    return rows


def _format(value: float) -> str:
    return format_number(value) if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"
