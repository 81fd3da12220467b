"""The confusion matrix of a classifier."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adamae.common.logging import escape

# With more classes, their names beside the matrix overlap.
MAX_TICKS = 40
# With more classes, the numbers of videos in its cells cannot be read.
MAX_COUNTS = 25


def write_counts(axes: Axes, table: np.ndarray, fractions: np.ndarray) -> None:
    """Write the number of videos into each cell of the matrix."""
    for (row, column), count in np.ndenumerate(table):
        # Cells are the darker, the larger their fraction is.
        color = "white" if fractions[row, column] > 0.5 else "black"
        text = axes.text(column, row, f"{count:.0f}", ha="center", va="center", fontsize=8)
        text.set_color(color)


def plot_confusion(results: dict[str, Any], names: Sequence[str]) -> Figure:
    """Plot the row-normalized confusion matrix, with the counts where they can be read."""
    table = np.array(results["confusion"], dtype=float)
    # A class without videos keeps a row of zeros.
    fractions = table / np.maximum(1, table.sum(1, keepdims=True))
    # In inches; the title needs a width of 4.5, however few classes there are.
    side = min(14.0, 3 + 0.35 * len(names))
    figure = Figure(figsize=(max(side, 4.5), side), layout="compressed")
    axes = figure.subplots()
    image = axes.imshow(fractions, vmin=0, vmax=1, cmap="Blues")
    figure.suptitle(f"top-1 {results['top1']:.3f}, {table.sum():.0f} videos", fontsize=11)
    axes.set(xlabel="predicted label", ylabel="true label")
    if len(names) <= MAX_COUNTS:
        write_counts(axes, table, fractions)
    if len(names) <= MAX_TICKS:
        # matplotlib reads text between two dollars as a formula.
        ticks = [escape(name).replace("$", r"\$") for name in names]
        axes.set_xticks(range(len(names)), ticks, rotation=90)
        axes.set_yticks(range(len(names)), ticks)
    figure.colorbar(image, ax=axes, fraction=0.046, label="fraction of the true label's videos")
    return figure
