"""Write RUN/report.html: a run's progress, curves, images and configuration in one file."""

import base64
import io
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from matplotlib.figure import Figure

from adamae.common.atomic_io import write_text
from adamae.common.commands import command_line
from adamae.common.jsonl import read_jsonl
from adamae.common.logging import escape, format_duration, printable
from adamae.training.config import TrainConfig, changed_keys
from adamae.training.logger import read_rows
from adamae.training.summary import describe_scores, find_result

TEMPLATE = Path(__file__).with_name("report.html.jinja")
# A run that loses a disk may list thousands; quarantine.jsonl has all of them.
MAX_CORRUPT_VIDEOS = 50
# The time per step is the median of so many rows: a run may slow down on a shared machine.
NUM_TIMED_ROWS = 20
# The metrics of each chart, by what they should do.
CHARTS = {
    "falls; 1: the mean of each patch (normalized pixels)": (
        "loss",
        "reconstruction_loss",
        "evaluation/reconstruction_loss",
        "evaluation/nll",
    ),
    "falls below log(clips of a step), that of a guess": ("views_loss",),
    "rises above majority, pixel and difference": (
        "evaluation/knn_top1",
        "evaluation/majority_top1",
        "evaluation/pixel_top1",
        "evaluation/difference_top1",
        "evaluation/top1",
        "evaluation/top5",
    ),
    "rises above chance": ("evaluation/mAP", "evaluation/chance_mAP"),
    "rises; near 1: all features are alike": ("evaluation/rankme",),
    "rises": ("accuracy",),
    "falls a little; constant: masks are random": ("sampler_entropy",),
    "warm-up, then a cosine": ("lr",),
    "settles": ("grad_norm",),
    "0": ("skipped_updates",),
    "constant": ("clips_per_second",),
    "near 0; else the run waits for data": ("data_wait_fraction",),
    "constant, below the device's": ("peak_memory_gib",),
}
COLUMNS = 3
# Of a chart with its margins, in inches.
CHART_WIDTH = 4.7
CHART_HEIGHT = 2.7


def write_report(run: Path, config: TrainConfig, total_steps: int) -> None:
    """Write RUN/report.html.

    It takes a second for every 50,000 rows of metrics.jsonl, in a thread beside training.
    """
    rows = read_metrics(run)
    images = {}
    if rows:
        images["Training curves"] = plot_curves(rows)
    for file in sorted(run.glob("figures/*.png")):
        images[file.stem] = file.read_bytes()
    checkpoints = [path.name for path in sorted(run.glob("checkpoints/*")) if path.is_dir()]
    # Each rank that meets a corrupt video lists it.
    videos = {str(video.get("key", "")): video for video in read_jsonl(run / "quarantine.jsonl")}
    # Names of videos and folders are not trusted: they may hold HTML.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    html = environment.from_string(TEMPLATE.read_text()).render(
        title=printable(run.resolve().name),
        updated=time.strftime("%Y-%m-%d %H:%M"),
        progress=describe_progress(rows, total_steps),
        data=describe_data(config),
        command=escape(command_line("train", "--config", run / "config.yaml", f"run={run}-again")),
        images={printable(name): base64.b64encode(png).decode() for name, png in images.items()},
        configuration=changed_keys(asdict(config)),
        checkpoints=[printable(name) for name in checkpoints],
        num_corrupt=len(videos),
        corrupt=[
            (
                printable(key),
                printable(video.get("reason", "")),
                printable(video.get("where", "")),
            )
            for key, video in islice(videos.items(), MAX_CORRUPT_VIDEOS)
        ],
    )
    write_text(run / "report.html", html)


def describe_progress(rows: Sequence[dict[str, Any]], total_steps: int) -> str:
    """Return how far the run is, how long it will take, and its evaluation, as one line:
    `step 500 of 1,200 (42%), about 5.6 min left; step 500: held-out loss 0.960, 63 videos`."""
    timed_rows = [row for row in rows if "step_time_ms" in row]
    if not timed_rows:
        return "no step has been logged yet"
    step = timed_rows[-1]["step"]
    line = f"step {step:,} of {total_steps:,} ({step / total_steps:.0%})"
    if step < total_steps:
        step_ms = median(row["step_time_ms"] for row in timed_rows[-NUM_TIMED_ROWS:])
        line += f", about {format_duration((total_steps - step) * step_ms / 1000)} left"
    else:
        line += ", finished"
    title, metrics = find_result(rows)
    if metrics:
        line += f"; {title}: {describe_scores(metrics)}"
    return line


def describe_data(config: TrainConfig) -> str:
    """Return the shards of a run as one line."""
    shards = config.data.shards
    locations = [shards] if isinstance(shards, str) else shards
    held_out = config.evaluation.shards or "nothing, as evaluation.shards is not set"
    return printable(f"trained on {', '.join(locations)}; evaluated on {held_out}")


def plot_curves(rows: Sequence[dict[str, float]]) -> bytes:
    """Plot the metrics of a run over its steps, in CHARTS; return a PNG."""
    logged_names = set().union(*rows)
    charts = []
    for expectation, metrics in CHARTS.items():
        names = [name for name in metrics if name in logged_names]
        if names:
            charts.append((expectation, names))
    num_rows = ceil(len(charts) / COLUMNS)
    figure = Figure(figsize=(CHART_WIDTH * COLUMNS, CHART_HEIGHT * num_rows))
    set_margins(figure, num_rows)
    for number, (expectation, names) in enumerate(charts, 1):
        axes = figure.add_subplot(num_rows, COLUMNS, number, xlabel="step")
        # A third of the time of a chart is its ticks.
        axes.locator_params(nbins=5)
        axes.set_title(f"should: {expectation}", fontsize=9)
        for name in names:
            steps = [row["step"] for row in rows if name in row]
            values = [row[name] for row in rows if name in row]
            # Without markers, a run of one row would have an empty chart.
            marker = "." if len(steps) < 50 else None
            axes.plot(steps, values, marker=marker, label=f"{name}: {values[-1]:.3g}")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()


def set_margins(figure: Figure, num_rows: int) -> None:
    """Leave room for the text around each chart, which is 0.15 to 0.8 inches wide or high.

    Matplotlib's constrained layout would measure it, which takes as long as drawing the charts.
    """
    left = 0.8
    right = 0.15
    bottom = 0.5
    top = 0.35
    figure.subplots_adjust(
        left=left / (CHART_WIDTH * COLUMNS),
        right=1 - right / (CHART_WIDTH * COLUMNS),
        bottom=bottom / (CHART_HEIGHT * num_rows),
        top=1 - top / (CHART_HEIGHT * num_rows),
        # These are relative to a chart without its margins.
        wspace=(left + right) / (CHART_WIDTH - left - right),
        hspace=(bottom + top) / (CHART_HEIGHT - bottom - top),
    )


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Read the finite numbers of a run's metrics.jsonl, a dict per row."""
    rows = []
    for row in read_rows(run / "metrics.jsonl"):
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        rows.append({name: value for name, value in numbers.items() if isfinite(value)})
    return rows
