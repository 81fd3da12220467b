"""The picture of pipeline_throughput's table."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.harness import Row
from common.atomic_io import atomic_write


def draw(rows: list[Row], path: Path) -> None:
    """One bar a loader, grouped by what it reads, written as PNG."""
    figure, axes = plt.subplots(figsize=(9, 0.35 * len(rows) + 1.5), layout="constrained")
    names = [
        f"{row['encode']}: {row['loader']} ({row['decoder']}{', R=2' if row['repeats'] == 2 else ''})" for row in rows
    ]
    colours = ["#c0392b" if row["loader"] == "ours" else "#85929e" for row in rows]
    bars = axes.barh(names, [row["clips_per_cpu_second"] for row in rows], color=colours)
    axes.bar_label(
        bars, [f"{row['clips_per_cpu_second']:.1f} ({row['times_reference']:.1f}×)" for row in rows], padding=3
    )
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(xlabel="clips of 16×224² per CPU-second", title="Input pipelines over the same videos")
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=120)
    plt.close(figure)
