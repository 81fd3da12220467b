"""Draw the plots of docs/ from the files in benchmarks/results/; results_page.py writes them."""

import json
from collections.abc import Callable, Mapping, Sequence
from math import sqrt

from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from adamae.benchmarks.harness import RESULTS, Row

LOADING = "cpu/pipeline_throughput.json"
MEMORY = "nvidia-h200/memory_vs_ratio.json"
FEW_CLIPS = "cpu/few_clips/masking_study.json"
FEW_CLIPS_BASELINES = "cpu/few_clips/comparison.json"
# Those of the ten classes of UCF-101 in docs/results.md.
NUM_TEST_CLIPS = 212
CHANCE = 0.1
MEASURES = {
    "finetune_top1": "fine-tuned",
    "attentive_probe_top1": "attentive probe",
    "linear_top1": "linear",
}
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


def plot_few_clips(rows: Sequence[Row], baselines: Sequence[Row]) -> Figure:
    """Plot the accuracy on clips of unseen people and places, with standard errors over clips."""
    accuracies = {}
    for row in baselines:
        # Chance and the most common class have no features, and so no neighbors.
        if "knn_top1" in row:
            accuracies[f"{row['name']}, linear"] = row["linear_top1"]
    for row in rows:
        for measure, title in MEASURES.items():
            if measure in row:
                accuracies[f"{name_strategy(row['strategy'])}, {title}"] = row[measure]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    # The binomial standard error: how much another choice of as many test clips would change a bar.
    # It is 0.034 at an accuracy of 0.5, and says nothing of how seeds differ.
    errors = {label: sqrt(p * (1 - p) / NUM_TEST_CLIPS) for label, p in accuracies.items()}
    plot_sorted_bars(axes, accuracies, highlighted="fine-tuned", errors=errors)
    axes.axvline(CHANCE, color=RED, linestyle="--", label="chance")
    axes.legend(loc="lower right", fontsize=8)
    axes.set_xlabel(f"top-1 on {NUM_TEST_CLIPS} clips")
    return figure


def name_strategy(strategy: str) -> str:
    """Return the label of a strategy.

    "scratch:steps=9000" becomes "from scratch, steps=9000", and "random" becomes "pre-trained,
    random masks".
    """
    masking, _, settings = strategy.partition(":")
    name = "from scratch" if masking == "scratch" else f"pre-trained, {masking} masks"
    return f"{name}, {settings}" if settings else name


def plot_sorted_bars(
    axes: Axes,
    values: Mapping[str, float],
    highlighted: str,
    errors: Mapping[str, float] | None = None,
) -> BarContainer:
    """Plot horizontal bars, the largest on top; those with `highlighted` in the label are blue."""
    labels = sorted(values, key=values.__getitem__)
    colors = [BLUE if highlighted in label else GRAY for label in labels]
    error_bars = None if errors is None else [errors[label] for label in labels]
    return axes.barh(labels, [values[label] for label in labels], xerr=error_bars, color=colors)


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
    "few_clips": lambda: plot_few_clips(read_rows(FEW_CLIPS), read_rows(FEW_CLIPS_BASELINES)),
}
