"""Where does adaptive masking pay? Its lead over random by the size of what moves and by clutter.

    python benchmarks/masking_map.py --object-sizes 0.35 0.5 0.7 --distractors 0 2 4 --strategies random adaptive \\
        --ratios 0.9 [what else benchmarks/masking_quality.py takes] [--output FOLDER]

For every object size (of the largest, of the picture's side) and number of distractors (objects that move to and fro),
videos are drawn and benchmarks/masking_quality.py is run on them, in a folder of its own. Started again, the command
goes on with what is not done. The map shows each strategy's lead over --baseline, and beside it what may tell why: how
much harder moving tokens are than still ones, and how much of what is shown moves.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import common.openmp  # noqa: F401

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import masking_quality
from benchmarks.harness import Row, describe_machine, results_folder, write_results
from benchmarks.reports.masking_tables import COLOURS, MEASURES, NOTES, Pair
from common.atomic_io import atomic_write
from common.devices import choose_device
from common.errors import InputError, run_command

EXPLAINED = [
    "error_ratio: error_moving by error_still. moving_share_of_visible, moving_share_of_all: of tokens, as"
    " benchmarks/motion_report.py defines them, where P is learnt. The baseline's lines have no lead.",
]
WHY = ("error_moving", "error_still", "correlation", "moving_share_of_visible", "moving_share_of_all")
KEPT = ("seeds", *MEASURES, *(f"{name}_{what}" for name in MEASURES for what in ("lead", "lead_error")), *WHY)
LARGE_LEAD = 0.15  # at which the colours end


class Cell(NamedTuple):
    """What is drawn at one place of the map."""

    object_size: float
    distractors: int

    @property
    def name(self) -> str:
        return f"size{self.object_size:g}-distractors{self.distractors}"

    @property
    def drawn(self) -> list[str]:
        return [f"object-size={self.object_size:g}", f"distractors={self.distractors}"]


def main(arguments: list[str] | None = None) -> None:
    options, study = parse(arguments)
    baseline = masking_quality.parse_arguments(study).baseline
    device = choose_device()
    folder = options.output or results_folder(device) / "masking_map"
    rows: list[Row] = []
    for cell in (Cell(*place) for place in product(options.object_sizes, options.distractors)):
        output = folder / cell.name
        masking_quality.main([*study, "--drawn", *options.drawn, *cell.drawn, "--output", str(output)])
        summary = json.loads((output / "masking_quality.json").read_text(encoding="utf-8"))["rows"]
        rows += [line(cell, row) for row in summary]
    write_results(
        folder, "masking_map", rows, describe_machine(device) | {"command": " ".join(study)}, [*NOTES, *EXPLAINED]
    )
    with atomic_write(folder / "masking_map.png") as aside:
        draw(rows, baseline).savefig(aside, format="png", dpi=130, bbox_inches="tight")
    print(f"wrote {folder}/masking_map.json and .png, and each place's study beside them")


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those of masking_quality.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--object-sizes", nargs="+", type=float, default=[0.35, 0.5, 0.7])
    parser.add_argument("--distractors", nargs="+", type=int, default=[0, 2, 4])
    parser.add_argument("--drawn", nargs="+", default=[], metavar="OPTION=VALUE", help="more of synthetic_motion.py")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu or cpu>/masking_map")
    options, study = parser.parse_known_args(arguments)
    if not all(0 < size <= 1 for size in options.object_sizes) or min(options.distractors) < 0:
        raise InputError(
            "--object-sizes are shares of the picture's side, above 0 and at most 1; --distractors at least 0"
        )
    return options, study


def line(cell: Cell, row: Row) -> Row:
    """Of the map, from one of a study's summary."""
    found: Row = {**cell._asdict(), "strategy": row["strategy"], "mask_ratio": row["mask_ratio"]}
    found |= {name: row[name] for name in KEPT if name in row}
    if "error_moving" in row:  # not from scratch
        found["error_ratio"] = round(row["error_moving"] / row["error_still"], 4)
    return found


def draw(rows: Sequence[Row], baseline: str) -> Figure:
    """A row of panels for each strategy and ratio: its lead in the two ways of judging, over the map and by how much
    harder moving tokens are than still ones to the baseline."""
    maps: dict[Pair, list[Row]] = {}
    hardness: dict[tuple[Cell, float], float] = {}
    for row in rows:
        if any(f"{name}_lead" in row for name in MEASURES):
            maps.setdefault((row["strategy"], row["mask_ratio"]), []).append(row)
        elif row["strategy"] == baseline and "error_ratio" in row:
            hardness[place_of(row), row["mask_ratio"]] = row["error_ratio"]
    figure = Figure(figsize=(15, 3.6 * max(1, len(maps))), layout="constrained")
    panels = figure.subplots(max(1, len(maps)), len(MEASURES) + 1, squeeze=False)
    for (pair, found), beside in zip(maps.items(), panels, strict=False):
        for axes, measure in zip(beside, MEASURES, strict=False):
            panel(axes, [row for row in found if f"{measure}_lead" in row], measure)
            axes.set_title(" ".join(str(part) for part in (*pair, measure.removesuffix("_top1")) if part), fontsize=9)
        why(beside[-1], [(hardness.get((place_of(row), row["mask_ratio"])), row) for row in found])
    figure.suptitle(
        f"lead over {baseline} in top-1 ± standard error; below, what moves of the shown, of all", fontsize=9
    )
    return figure


def place_of(row: Row) -> Cell:
    return Cell(*(row[name] for name in Cell._fields))


def why(axes: Axes, found: Sequence[tuple[float | None, Row]]) -> None:
    """Every place's leads by its error ratio."""
    axes.axhline(0, color="grey", linewidth=0.8)
    for measure, colour in zip(MEASURES, COLOURS, strict=False):
        lead = f"{measure}_lead"
        judged = [(ratio, row[lead], row.get(f"{lead}_error", 0)) for ratio, row in found if ratio and lead in row]
        if judged:
            ratios, leads, errors = np.array(judged, dtype=float).T
            axes.errorbar(ratios, leads, errors, fmt="o", color=colour, label=measure.removesuffix("_top1"))
    axes.set(xlabel="error of moving by error of still tokens, to the baseline", ylabel="lead")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(MEASURES), frameon=False)


def panel(axes: Axes, rows: Sequence[Row], measure: str) -> None:
    if not rows:  # nothing was judged in this way, as from scratch
        axes.set_axis_off()
        return
    sizes, clutter = (sorted({row[name] for row in rows}) for name in Cell._fields)
    leads = np.full((len(sizes), len(clutter)), np.nan)
    for row in rows:
        down, across = sizes.index(row["object_size"]), clutter.index(row["distractors"])
        leads[down, across] = row[f"{measure}_lead"]
        says = [f"{row[f'{measure}_lead']:+.3f}"]
        if f"{measure}_lead_error" in row:
            says[0] += f" ± {row[f'{measure}_lead_error']:.3f}"
        if "moving_share_of_visible" in row:
            says.append(f"{row['moving_share_of_visible']:.3f} of {row['moving_share_of_all']:.3f}")
        colour = "white" if abs(row[f"{measure}_lead"]) > 0.6 * LARGE_LEAD else "black"
        axes.text(across, down, "\n".join(says), ha="center", va="center", fontsize=8, color=colour)
    axes.imshow(leads, cmap="RdBu", vmin=-LARGE_LEAD, vmax=LARGE_LEAD, aspect="auto")
    axes.set_xticks(range(len(clutter)), clutter)
    axes.set_yticks(range(len(sizes)), sizes)
    axes.set(xlabel="distractors", ylabel="object size")


if __name__ == "__main__":
    run_command(main, resumable=True)
