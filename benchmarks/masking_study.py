"""Compare masking strategies: pre-train, probe and fine-tune every one with each seed.

    python benchmarks/masking_study.py --preset cpu_clips --shards shards/train --validation shards/validation

Each point is pre-trained on the same number of clips. Its features of whole videos are classified by ridge regression
and 20-NN (linear_baseline.py). Then an attentive probe and a fine-tuning run with the labels of --shards are evaluated
on --validation by evaluate.py, with their last weights. `scratch` is fine-tuned without pre-training. Re-running the
command with the same --output resumes; further strategies, ratios or seeds are added to the tables, by several commands
at the same time too (CUDA_VISIBLE_DEVICES=1 … --seeds 1). `section.key=value` applies to all runs.

A strategy is a masking or `scratch`, optionally with settings: `adaptive:model.sampler_depth=2,steps=900`. With
--label-sets, every pre-trained model is probed and fine-tuned with several sets of --labels videos. Differences to
random masking are paired by seed and label set. The presets are in benchmarks/masking_study.yaml.
"""

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import ArgumentParser, PositiveInt
from benchmarks.harness import ROOT, Report, Row, print_table, results_folder
from benchmarks.linear_baseline import classify
from common.atomic_io import write_json
from common.devices import choose_device
from common.errors import InputError, run_command
from common.logging import log
from common.yaml_io import read_yaml
from evaluate import evaluate
from evaluate import parse_arguments as parse_evaluation
from extract_features import main as extract_features
from extract_features import parse_arguments as parse_extraction
from train import train
from training.config import parse

SCRATCH, BASELINE = "scratch", "random"
PRESETS: dict[str, dict[str, Any]] = read_yaml(ROOT / "benchmarks/masking_study.yaml")
MEASURES = ("finetune_top1", "attentive_probe_top1", "linear_top1", "knn_top1")
NOTES = [
    "Top-1 of the last weights; _std: standard deviation over seeds, of each seed's mean over label sets.",
    "_gain: mean difference to random masking of the same ratio, seed and label set; _gain_error: its standard error,"
    " over the means of seeds or over the means of label sets, whichever is larger.",
]


@dataclass(frozen=True)
class Point:
    """What is pre-trained once."""

    strategy: str
    mask_ratio: float | None  # None: from scratch
    seed: int

    @property
    def name(self) -> str:
        ratio = "" if self.mask_ratio is None else f"-{self.mask_ratio:g}"
        return f"{re.sub('[^0-9A-Za-z._-]', '_', self.strategy)}{ratio}-seed{self.seed}"

    def overrides(self) -> list[str]:
        masking, _, settings = self.strategy.partition(":")
        more = [*filter(None, settings.split(",")), f"seed={self.seed}"]
        if self.mask_ratio is None:
            return more
        return [f"model.masking={masking}", f"model.mask_ratio={self.mask_ratio:g}", *more]


def main() -> None:
    print_table(run_study(parse_arguments(None)))


def run_study(options: argparse.Namespace) -> list[Row]:
    """Run what is missing in --output and write its tables; return the summary."""
    study = Study(options, options.output or results_folder(choose_device()) / "masking_study")
    for number, point in enumerate(study.points, start=1):
        log(f"{point.name} ({number} of {len(study.points)})")
        study.run_point(point)
    rows = [row for file in sorted(study.folder.glob("points/*/result.json")) for row in read_json(file)["rows"]]
    summary = summarize(rows)
    study.report.write(rows, "points")
    study.report.write(summary)
    return summary


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__, "benchmark_results/<gpu or cpu>/masking_study")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--shards", required=True, help="labeled training shards")
    parser.add_argument("--validation", required=True, help="labeled validation shards")
    parser.add_argument("--strategies", nargs="+", help=f"MASKING[:section.key=value,...] or {SCRATCH}")
    parser.add_argument("--ratios", nargs="+", type=float, help="mask ratios")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--labels", type=PositiveInt, help="labeled videos to learn from (default: all)")
    parser.add_argument("--label-sets", type=PositiveInt, default=1, help="number of label sets for each model")
    options = parser.parse_args(arguments)
    if options.label_sets > 1 and options.labels is None:
        raise InputError("--label-sets needs --labels: all labels of --shards are one set")
    return options


class Study:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        """Check all configurations first, so that no error comes after hours."""
        self.preset, self.options, self.folder = PRESETS[options.preset], options, folder
        self.report = Report("masking_study", folder, choose_device(), NOTES)
        pairs = make_grid(options.strategies, options.ratios) or [tuple(pair) for pair in self.preset["points"]]
        self.points = [Point(*pair, seed) for seed in options.seeds for pair in pairs]
        for point in self.points:
            for task, label_set in self.stages(point):
                parse(self.overrides(point, task, label_set))

    def stages(self, point: Point) -> list[tuple[str, int | None]]:
        """List the training runs of a point in order: (task, label set)."""
        tasks = ["finetune"] if point.mask_ratio is None else ["attentive_probe", "finetune"]
        labeled: list[tuple[str, int | None]] = [
            (task, label_set) for label_set in range(self.options.label_sets) for task in tasks
        ]
        return labeled if point.mask_ratio is None else [("pretrain", None), *labeled]

    def overrides(self, point: Point, task: str, label_set: int | None) -> list[str]:
        kinds = ["common", *(["labeled"] if label_set is not None else []), task]
        kinds += ["scratch"] if point.mask_ratio is None else []
        given = [f"task={task}", f"data.shards={self.options.shards}"]
        given += [override for kind in kinds for override in self.preset.get(kind, [])]
        given += [*self.options.overrides, *point.overrides(), "evaluation.every=null"]
        if label_set is None:
            return given
        # The validation shards only refuse classes that do not match before the run: evaluate.py evaluates.
        labels = [f"data.subset={self.options.labels or 'null'}", f"data.subset_seed={label_set}"]
        return [*given, *labels, f"evaluation.shards={self.options.validation}"]

    def run_point(self, point: Point) -> None:
        """Train and evaluate a point, and write its result; refuse a result that was made with other settings."""
        runs = self.folder / "points" / point.name
        settings = [self.overrides(point, *stage) for stage in self.stages(point)]
        if (runs / "result.json").is_file():
            if read_json(runs / "result.json")["settings"] != settings:
                raise InputError(f"{runs} was made with other settings; restore them or choose another --output")
            return
        made_by = {name: self.report.about[name] for name in ("device", "commit")}
        rows: list[Row] = [
            {**asdict(point), "label_set": label_set, **made_by} for label_set in range(self.options.label_sets)
        ]
        for (task, label_set), overrides in zip(self.stages(point), settings, strict=True):
            run = runs / (task if label_set is None else f"{task}-labels{label_set}")
            start = [f"init_from={runs / 'pretrain'}"] if label_set is not None and point.mask_ratio else []
            if not train(parse([*overrides, *start, f"run={run}"])):
                raise KeyboardInterrupt
            if label_set is None:
                found = self.classify_features(run)
                rows = [row | found for row in rows]
            else:
                views = [f"--{name}={count}" for name, count in self.preset.get("views", {}).items()]
                newest, output = max((run / "checkpoints").glob("step-*")), f"--output={run / 'evaluation'}"
                evaluate(parse_evaluation([str(newest), self.options.validation, *views, output]))
                rows[label_set][f"{task}_top1"] = float(read_json(run / "evaluation/results.json")["top1"])
        write_json(runs / "result.json", {"settings": settings, "rows": rows})

    def classify_features(self, run: Path) -> Row:
        """Classify the validation videos by the features of whole videos, with nothing trained but a linear layer."""
        folders = []
        for name, shards in (("train", self.options.shards), ("validation", self.options.validation)):
            folders.append(run / "features" / name)
            extract_features(parse_extraction([shards, str(folders[-1]), f"--model={run}"]))
        return {f"{measure}_top1": top1 for measure, top1 in classify(*folders)["encoder"].items()}


def is_scratch(strategy: str) -> bool:
    return strategy.partition(":")[0] == SCRATCH


def make_grid(strategies: list[str] | None, ratios: list[float] | None) -> list[tuple[str, float | None]]:
    """Combine every strategy with every ratio, training from scratch once."""
    strategies, ratios = strategies or [], ratios or []
    if all(map(is_scratch, strategies)) == bool(ratios):
        raise InputError("give --ratios with --strategies that mask (not for scratch alone), or neither")
    pairs = [(s, ratio) for s in strategies for ratio in ([None] if is_scratch(s) else ratios)]
    return list(dict.fromkeys(pairs))


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Average the points: a row for each strategy and ratio, the best first, with paired gains over random masking."""
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["strategy"], row["mask_ratio"]), []).append(row)
    summary = []
    for (strategy, ratio), group in groups.items():
        line: Row = {"strategy": strategy, "mask_ratio": ratio, "seeds": len({row["seed"] for row in group})}
        for name in (name for name in MEASURES if name in group[0]):
            means = group_means([(row["seed"], row[name]) for row in group])
            line[name] = statistics.mean(means)
            line[f"{name}_std"] = statistics.stdev(means) if len(means) > 1 else None
            if strategy != BASELINE and not is_scratch(strategy):
                gain, error = paired_gain(group, groups.get((BASELINE, ratio), []), name)
                line |= {f"{name}_gain": gain, f"{name}_gain_error": error}
        summary.append({name: round(value, 4) if isinstance(value, float) else value for name, value in line.items()})
    return sorted(summary, key=lambda line: [-line.get(name, 0) for name in MEASURES])


def paired_gain(group: Sequence[Row], base: Sequence[Row], name: str) -> tuple[float | None, float | None]:
    """Return the mean difference between rows of the same seed and label set, and its standard error; None if unknown.

    Rows of one seed share a pre-training and rows of one label set their videos: neither are independent.
    """
    others = {(row["seed"], row["label_set"]): row[name] for row in base}
    keys = [(row["seed"], row["label_set"]) for row in group]
    gains = {key: row[name] - others[key] for key, row in zip(keys, group, strict=True) if key in others}
    if not gains:
        return None, None
    both = [group_means([(key[place], gain) for key, gain in gains.items()]) for place in (0, 1)]
    errors = [statistics.stdev(means) / len(means) ** 0.5 for means in both if len(means) > 1]
    return statistics.mean(gains.values()), max(errors, default=None)


def group_means(values: Sequence[tuple[object, float]]) -> list[float]:
    """Return the mean of the values of each key."""
    groups: dict[object, list[float]] = {}
    for key, value in values:
        groups.setdefault(key, []).append(value)
    return [statistics.mean(group) for group in groups.values()]


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main, resumable=True)
