"""The picture of memory_vs_ratio's table: memory against ratio, strategy and decoder depth, with the paper's."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.accounting import AT_PEAK
from benchmarks.harness import Row
from common.atomic_io import atomic_write

STRATEGY_COLOURS = {"adaptive": "#c0392b", "random": "#2471a3", "tube": "#229954", "frame": "#b9770e"}
PAPER: dict[str, Any] = {"color": "black", "marker": "D", "linestyle": "none", "markersize": 5, "label": "paper"}


def draw(rows: list[Row], path: Path, batch_size: int) -> None:
    """Three panels, written as PNG."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 5), layout="constrained", sharey=True)
    again = [row for row in rows if row["activation_checkpointing"]]
    rows = [row for row in rows if not row["activation_checkpointing"]]
    by_ratio = [row for row in rows if row["axis"] == "ratio"]
    adaptive = [row for row in by_ratio if row["masking"] == "adaptive"]
    _stack(left, adaptive, again, "mask_ratio")
    left.set(
        title="adaptive, by part", xlabel="share of tokens hidden, ρ", ylabel=f"GPU memory at batch {batch_size}, GB"
    )
    _strategies(middle, by_ratio)
    middle.set(title="strategies", xlabel="share of tokens hidden, ρ")
    depths = [row for row in rows if row["axis"] == "decoder depth"]
    depths += [row for row in adaptive if row["mask_ratio"] == 0.95]
    _stack(right, sorted(depths, key=lambda row: row["decoder_depth"]), again, "decoder_depth")
    right.set(title="adaptive, ρ = 0.95, by decoder depth", xlabel="decoder blocks")
    left.legend(fontsize="small", ncols=2)
    middle.legend(fontsize="small")
    figure.suptitle("Memory of a pre-training step: ours (predicted), the paper's" + _measured(rows))
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=120)
    plt.close(figure)


def _stack(axes: Axes, rows: list[Row], again: list[Row], x: str) -> None:
    """`again`: rows of the same models and others with activation checkpointing, of which the peak is marked."""
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for label, colour in zip(AT_PEAK, plt.get_cmap("tab20").colors, strict=False):  # type: ignore[attr-defined]
        heights = [row[f"at_peak_{label}_mib"] * 2**20 / 1e9 for row in rows]
        if any(height > 0.01 for height in heights):  # a slice of less than 10 MB cannot be seen
            axes.bar(places, heights, bottom=bottom, color=colour, width=0.7, label=label.replace("_", " "))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    peaks = {(row["mask_ratio"], row["decoder_depth"]): row["predicted_peak_gib"] * 2**30 / 1e9 for row in again}
    marks = [peaks.get((row["mask_ratio"], row["decoder_depth"]), float("nan")) for row in rows]
    axes.plot(places, marks, "w_", markersize=24, markeredgewidth=5)  # a rim, so that it is seen on any colour
    axes.plot(places, marks, "k_", markersize=24, markeredgewidth=2.5, label="with checkpointing")
    axes.plot(places, [row["paper_gb"] for row in rows], **PAPER)
    if "measured_peak_gib" in rows[0]:
        axes.plot(
            places, [row["measured_peak_gib"] * 2**30 / 1e9 for row in rows], "mx", markersize=9, label="measured"
        )
    axes.set_xticks(places, [str(row[x]) for row in rows])


def _strategies(axes: Axes, rows: list[Row]) -> None:
    for masking, colour in STRATEGY_COLOURS.items():
        mine = [row for row in rows if row["masking"] == masking]
        ratios = [row["mask_ratio"] for row in mine]
        axes.plot(ratios, [row["predicted_peak_gib"] * 2**30 / 1e9 for row in mine], "o-", color=colour, label=masking)
        axes.plot(ratios, [row["paper_gb"] for row in mine], **{**PAPER, "color": colour, "label": f"{masking}, paper"})


def _measured(rows: list[Row]) -> str:
    return " and ours measured" if any("measured_peak_gib" in row for row in rows) else ""
