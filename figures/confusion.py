"""The confusion matrix of a classifier."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from adamae.common.logging import escape

MAX_TICKS = 40  # class names beside the matrix
MAX_COUNTS = 25  # classes whose numbers of videos can be read in it


def plot_confusion(results: dict[str, Any], names: Sequence[str]) -> Figure:
    """Plot the row-normalized confusion matrix, with the counts where they can be read."""
    table = np.array(results["confusion"], dtype=float)
    fractions = table / np.maximum(1, table.sum(1, keepdims=True))
    side = min(14.0, 3 + 0.35 * len(names))
    figure = Figure(figsize=(max(side, 4.5), side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(fractions, vmin=0, vmax=1, cmap="Blues")
    figure.suptitle(f"top-1 {results['top1']:.3f}, {table.sum():.0f} videos", fontsize=11)
    axes.set(xlabel="predicted label", ylabel="true label")
    if len(names) <= MAX_COUNTS:
        for (row, column), count in np.ndenumerate(table):
            color = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(
                column, row, f"{count:.0f}", ha="center", va="center", color=color, fontsize=8
            )
    if len(names) <= MAX_TICKS:
        ticks = [
            escape(name).replace("$", r"\$") for name in names
        ]  # between two dollars would be a formula
        axes.set_xticks(range(len(names)), ticks, rotation=90)
        axes.set_yticks(range(len(names)), ticks)
    figure.colorbar(image, ax=axes, fraction=0.046, label="fraction of the true label's videos")
    return figure
