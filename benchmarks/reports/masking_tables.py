"""What benchmarks/masking_quality.py says of its points: means, spreads, paired differences, and a figure of them."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import Row
from common.errors import InputError

PROBE = "attentive_probe"
FINETUNED = "finetune_top1"
MEASURES = (f"{PROBE}_top1", FINETUNED)
POINT = ("strategy", "mask_ratio", "seed", "label_set")  # what tells a row from others
MADE_BY = ("device", "commit")
TABLE = ("preset", "equal", "overrides", "drawn", "labels")  # what all rows of a table have alike
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933", "#882255", "#44aa99")
NOTES = [
    "A table may be of many calls: device and commit above are the last one's, those of a point stand in its row of"
    " points.md.",
    "Top-1 of the last weights; _std: standard deviation over the seeds, of each seed's mean over label sets.",
    "_lead: mean difference to the baseline of the same ratio, seed and label set; _lead_error: its standard error,"
    " taken over the means of seeds and over the means of label sets, whichever is larger.",
    "error_moving, error_still: reconstruction loss of masked tokens, under random masks of the point's ratio. Moving"
    " are the 20 % of a clip's tokens whose brightness changes most. correlation: of P with that change.",
]
Pair = tuple[str, float | None]


def earlier_rows(file: Path, about: Mapping[str, Any], steps: Mapping[Pair, int]) -> list[Row]:
    """The table of points that earlier calls have made; raises InputError where what is made now does not go with it.

    steps: of the pre-trainings that are made now; 0 where a recipe counts epochs.
    """
    if not file.is_file():
        return []
    table = json.loads(file.read_text(encoding="utf-8"))
    rows: list[Row] = table["rows"]
    said = {name: (table["about"].get(name, about[name]), about[name]) for name in TABLE}
    for row in rows:
        pair = row["strategy"], row["mask_ratio"]
        if (planned := steps.get(pair)) and "pretrain_steps" in row:
            said[f"pretrain_steps of {pair[0]} at {pair[1]}"] = row["pretrain_steps"], planned
    for name, (before, now) in said.items():
        if before != now:
            raise InputError(
                f"the table {file} was made with other settings ({name}: '{before}', now '{now}'): choose another"
                " --output"
            )
    return rows


def added(earlier: Sequence[Row], found: Sequence[Row]) -> list[Row]:
    """Both, without the earlier ones of what is found now."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in POINT)

    now = set(map(key, found))
    return [*(row for row in earlier if key(row) not in now), *found]


def summarise(rows: Sequence[Row], baseline: str) -> list[Row]:
    """A line for each strategy and ratio, the best first."""
    summary = []
    groups = grouped(rows)
    for pair, group in groups.items():
        seeds = {row["seed"] for row in group}
        line: Row = {"strategy": pair[0], "mask_ratio": pair[1], "seeds": len(seeds)}
        line["label_sets"] = len({row["label_set"] for row in group})
        for name in sorted(numbers_of(group), key=lambda name: name not in MEASURES):
            means = seed_means(group, name)
            line[name] = round(statistics.mean(means), 4)
            if name in MEASURES:
                line |= spread(name, means, group, groups.get((baseline, pair[1])))
        summary.append(line)
    return sorted(summary, key=lambda line: -line[FINETUNED])


def spread(name: str, means: list[float], group: Sequence[Row], base: Sequence[Row] | None) -> Row:
    found: Row = {}
    if len(means) > 1:
        found[f"{name}_std"] = round(statistics.stdev(means), 4)
    if base is not None and base is not group and name in base[0]:
        for what, value in zip(("lead", "lead_error"), paired(group, base, name), strict=True):
            if value is not None:
                found[f"{name}_{what}"] = round(value, 4)
    return found


def paired(group: Sequence[Row], base: Sequence[Row], name: str) -> tuple[float | None, float | None]:
    """Mean difference between rows of the same seed and label set, None if there are none, and its standard error, None
    of a single one.

    Rows of one seed share a pre-training and rows of one label set their videos: neither are independent.
    """
    others = {(row["seed"], row["label_set"]): row[name] for row in base}

    def difference(row: Row) -> float:
        return float(row[name] - others[row["seed"], row["label_set"]])

    matched = [row for row in group if (row["seed"], row["label_set"]) in others]
    if not matched:
        return None, None
    errors = []
    for key in ("seed", "label_set"):
        means = means_over(matched, key, difference)
        if len(means) > 1:
            errors.append(statistics.stdev(means) / len(means) ** 0.5)
    return statistics.mean(map(difference, matched)), max(errors, default=None)


def means_over(rows: Sequence[Row], key: str, value: Callable[[Row], float]) -> list[float]:
    groups: dict[object, list[float]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(value(row))
    return [statistics.mean(values) for values in groups.values()]


def numbers_of(group: Sequence[Row]) -> list[str]:
    return [name for name in group[0] if name not in (*POINT, *MADE_BY)]


def grouped(rows: Sequence[Row]) -> dict[Pair, list[Row]]:
    groups: dict[Pair, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["strategy"], row["mask_ratio"]), []).append(row)
    return groups


def plot(rows: Sequence[Row], baseline: str, equal: str) -> Figure:
    """Top-1 of the two ways of judging: over ratios a line a strategy with its spread, of one ratio a dot a seed."""
    figure = Figure(figsize=(12, 4.5))
    several = len({row["mask_ratio"] for row in rows} - {None}) > 1
    best_first = dict(sorted(grouped(rows).items(), key=lambda item: -statistics.mean(seed_means(item[1], FINETUNED))))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure in zip(panels, MEASURES, strict=True):
        (over_ratios if several else over_strategies)(axes, best_first, measure)
        axes.set_title(f"{measure.removesuffix('_top1').replace('_', ' ')}, top-1, equal {equal}")
    if several:
        panels[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside: points lie anywhere inside
    else:
        panels[0].set_yticks(range(len(best_first)), [named(pair) for pair in best_first], fontsize=8)
        panels[0].invert_yaxis()
    figure.suptitle(f"shaded or as bars: standard deviation over seeds; compared with {baseline}", fontsize=9)
    return figure


def named(pair: Pair) -> str:
    return " ".join(str(part) for part in pair if part)


def over_ratios(axes: Axes, groups: Mapping[Pair, Sequence[Row]], measure: str) -> None:
    judged = {pair: seed_means(group, measure) for pair, group in groups.items() if measure in group[0]}
    for number, strategy in enumerate(dict.fromkeys(pair[0] for pair in groups)):
        colour = COLOURS[number % len(COLOURS)]
        lines = sorted((pair[1] or 0.0, means) for pair, means in judged.items() if pair[0] == strategy)
        if not lines:  # not judged so, as from scratch there is nothing to probe
            continue
        ratios = [ratio for ratio, _ in lines]
        mean = np.array([statistics.mean(means) for _, means in lines])
        deviation = np.array([statistics.stdev(means) if len(means) > 1 else 0.0 for _, means in lines])
        if ratios == [0.0]:  # from scratch: no ratio
            axes.axhline(mean[0], color=colour, label=strategy, linestyle=":")
            continue
        axes.plot(ratios, mean, color=colour, label=strategy, marker="o")
        axes.fill_between(ratios, mean - deviation, mean + deviation, color=colour, alpha=0.2)
    axes.set_xlabel("masking ratio")


def over_strategies(axes: Axes, groups: Mapping[Pair, Sequence[Row]], measure: str) -> None:
    """A bar each, in the order of `groups` whatever is judged."""
    for place, group in enumerate(groups.values()):
        if measure in group[0]:
            means = seed_means(group, measure)
            deviation = statistics.stdev(means) if len(means) > 1 else 0.0
            axes.barh(place, statistics.mean(means), xerr=deviation, color="#9ecae1", capsize=4)
            axes.scatter(means, [place] * len(means), color="black", s=12, zorder=3)


def seed_means(group: Sequence[Row], measure: str) -> list[float]:
    return means_over(group, "seed", lambda row: row[measure])
