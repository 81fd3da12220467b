"""Draw the plots of docs/ from the files in benchmarks/results/; results_page.py writes them."""

import json
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from adamae.benchmarks.harness import RESULTS, Row

LOADING = "cpu/pipeline_throughput.json"
MEMORY = "nvidia-h200/memory_vs_ratio.json"
# The bars. Decoding alone is a line, as nobody can train from it.
LOADERS = ("adamae", "spdl", "torchcodec", "decord")
BLUE = "#2471a3"
GRAY = "#95a5a6"
RED = "#c0392b"
# Column, whether with activation checkpointing, label, and Matplotlib's marker, line and color.
MEMORY_SERIES = (
    ("paper_gib", False, "the paper's code on its GPUs (converted from GB)", "s--C7"),
    ("predicted_peak_gib", False, "predicted", "-C0"),
    ("measured_peak_gib", False, "measured", "oC0"),
    ("compiled_measured_peak_gib", False, "measured, compiled", "DC3"),
    ("predicted_peak_gib", True, "predicted, with activation checkpointing", ":C0"),
    ("measured_peak_gib", True, "measured, with activation checkpointing", "^C0"),
)


def read_rows(file: str) -> list[Row]:
    """Read the rows of a result file, whose path is relative to benchmarks/results/."""
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]


def plot_loading(rows: Sequence[Row]) -> Figure:
    """Plot the clips per CPU-second of every loader and, as a bound, of decoding alone."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    original, h264, small = figure.subplots(1, 3)
    # Our shards of the original files are those of `--encode copy`.
    plot_loaders(
        original, [row for row in rows if row["encode"] in ("original", "copy")], "original files"
    )
    plot_loaders(h264, [row for row in rows if row["encode"] == "h264"], "h264 shards")
    plot_loaders(
        small, [row for row in rows if row["encode"] == "h264-size"], "h264 shards, --tune size"
    )
    return figure


def plot_loaders(axes: Axes, rows: Sequence[Row], title: str) -> None:
    """Plot a bar for each loader, and a line for decoding alone, from the rows of one encode."""
    speeds = {}
    for row in rows:
        label = row["loader"]
        if row["repeats"] == 2:
            label += ",\n2 clips per decode"
        speeds[label] = row["clips_per_cpu_second"]
    bound = speeds["decoding"]
    shown = {label: speed for label, speed in speeds.items() if label.startswith(LOADERS)}
    # CPU-seconds, since other programs disturb them least: on a machine whose cores are all busy,
    # clips/s would depend on who else runs.
    bars = plot_sorted_bars(axes, shown, highlighted="adamae")
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.axvline(bound, color=RED, linestyle="--", label=f"decoding alone: {bound:.3g}")
    axes.margins(x=0.25)
    axes.legend(loc="lower right", fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("clips per CPU-second")


def plot_memory(rows: Sequence[Row]) -> Figure:
    """Plot the memory of a step over the mask ratio.

    The lines are predictions and the paper's numbers, the markers measurements.
    """
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for column, checkpointing, label, style in MEMORY_SERIES:
        points = []
        for row in rows:
            gib = paper_memory_gib(row) if column == "paper_gib" else row.get(column)
            if row["activation_checkpointing"] == checkpointing and gib is not None:
                points.append((row["mask_ratio"], gib))
        if points:
            ratios, sizes = zip(*sorted(points), strict=True)
            axes.plot(ratios, sizes, style, label=label)
    axes.set_xlabel("mask ratio")
    axes.set_ylabel("peak GPU memory of a step (GiB)")
    axes.set_xticks(sorted({row["mask_ratio"] for row in rows}))
    axes.set_title(f"pre-training, {rows[0]['batch_size']} clips per step", fontsize=10)
    # From 0: an axis that begins at the least value would make small savings look large.
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


def paper_memory_gib(row: Row) -> float | None:
    """Return the paper's GB of a row in GiB; None if the paper has no such row."""
    if row.get("paper_gb") is None:
        return None
    return row["paper_gb"] * 1e9 / 2**30


def plot_sorted_bars(axes: Axes, values: Mapping[str, float], highlighted: str) -> BarContainer:
    """Plot horizontal bars, the largest on top; those with `highlighted` in the label are blue."""
    labels = sorted(values, key=values.__getitem__)
    colors = [BLUE if highlighted in label else GRAY for label in labels]
    return axes.barh(labels, [values[label] for label in labels], color=colors)


def plot_pretraining_memory() -> Figure:
    """Plot the rows of the paper's objective; the file also has other maskings and targets."""
    rows = read_rows(MEMORY)
    return plot_memory(
        [row for row in rows if row["masking"] == "adaptive" and row["target"] == "pixels"]
    )


# The plots by their names in docs/.
PLOTS: dict[str, Callable[[], Figure]] = {
    "loading": lambda: plot_loading(read_rows(LOADING)),
    "memory": plot_pretraining_memory,
}
