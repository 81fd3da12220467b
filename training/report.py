"""Write RUN/report.html, one self-contained file of a run's progress, curves, images and configuration."""

import base64
import io
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from matplotlib.figure import Figure

from adamae.common.atomic_io import write_text
from adamae.common.jsonl import read_jsonl
from adamae.common.logging import format_duration, printable
from adamae.training.config import TrainConfig, changed_keys
from adamae.training.logger import read_rows
from adamae.training.summary import describe_scores, find_result

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MAX_CORRUPT_VIDEOS = 50  # listed
RECENT = 20  # rows whose median tells how long a step takes
CHARTS = [
    chart.split()
    for chart in (
        "loss reconstruction_loss evaluation/reconstruction_loss evaluation/nll",
        "evaluation/knn_top1 evaluation/majority_top1 evaluation/pixel_top1 evaluation/top1 evaluation/top5",
        *(
            "evaluation/mAP",
            "evaluation/rankme",
            "accuracy",
            "sampler_entropy",
            "lr",
            "grad_norm",
            "skipped_updates",
        ),
        *("clips_per_second", "data_wait_fraction", "peak_memory_gib"),
    )
]


def write_report(run: Path, config: TrainConfig, total_steps: int) -> None:
    """Write RUN/report.html; reads all of metrics.jsonl: a second for 50,000 rows."""
    rows = read_metrics(run)
    corrupt = read_jsonl(run / "quarantine.jsonl")
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        TEMPLATE.read_text()
    )
    images = {"Training curves": plot_curves(rows)} if rows else {}
    images |= {file.stem: file.read_bytes() for file in sorted(run.glob("figures/*.png"))}
    html = page.render(
        title=printable(run.resolve().name),
        updated=time.strftime("%Y-%m-%d %H:%M"),
        progress=describe_progress(rows, total_steps),
        images={printable(name): base64.b64encode(png).decode() for name, png in images.items()},
        configuration=changed_keys(asdict(config)),
        checkpoints=[
            printable(folder.name)
            for folder in sorted(run.glob("checkpoints/*"))
            if folder.is_dir()
        ],
        num_corrupt=len(corrupt),
        corrupt=[
            [printable(line.get(name, "")) for name in ("key", "reason", "where")]
            for line in corrupt[:MAX_CORRUPT_VIDEOS]
        ],
    )
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


def plot_curves(rows: Sequence[dict[str, float]]) -> bytes:
    """Plot the metrics over the steps, each chart with what is compared in it; return a PNG."""
    logged = {name for row in rows for name in row}
    charts = [names for chart in CHARTS if (names := [name for name in chart if name in logged])]
    figure = Figure(figsize=(14, 0.5 + 2.7 * ceil(len(charts) / 3)), layout="constrained")
    for number, names in enumerate(charts, 1):
        axes = figure.add_subplot(ceil(len(charts) / 3), 3, number, xlabel="step")
        for name in names:
            steps, values = zip(
                *((row["step"], row[name]) for row in rows if name in row), strict=True
            )
            axes.plot(
                steps,
                values,
                marker="." if len(steps) < 50 else None,
                label=f"{name}: {values[-1]:.3g}",
            )
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(png := io.BytesIO(), format="png", dpi=110)
    return png.getvalue()


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Read the finite numbers of a run's metrics.jsonl."""
    return [
        {
            name: value
            for name, value in row.items()
            if isinstance(value, int | float) and isfinite(value)
        }
        for row in read_rows(run / "metrics.jsonl")
    ]
