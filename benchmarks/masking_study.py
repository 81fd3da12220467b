"""Compare masking strategies: pre-train, probe and fine-tune every one with each seed.

    python benchmarks/masking_study.py --preset cpu_clips --shards shards/train --validation shards/validation

Each point is pre-trained on the same number of clips. With a preset's `linear`, its features are classified by ridge
regression and 20-NN (linear_baseline.py). Then an attentive probe and a fine-tuning run with the labels of --shards
(with --labels of them, others for each seed) are evaluated on --validation by evaluate.py, with their last weights.
`scratch` is fine-tuned without pre-training.

A strategy is a masking or `scratch`, optionally with settings: `adaptive:model.sampler_depth=2,steps=900`.
`section.key=value` applies to all runs. The presets are in benchmarks/masking_study.yaml. Re-running the command with
the same --output resumes, on another machine from its points/*.json; further strategies, ratios or seeds are added to
the table, by several commands at the same time too (CUDA_VISIBLE_DEVICES=1 … --seeds 1).
"""

import argparse
import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import ROOT, Report, Row, print_table, results_folder
from adamae.benchmarks.linear_baseline import classify, encode_videos
from adamae.common.arguments import between
from adamae.common.atomic_io import write_json
from adamae.common.devices import choose_device
from adamae.common.errors import InputError, run_command
from adamae.common.logging import log
from adamae.common.yaml_io import read_yaml
from adamae.evaluate import evaluate
from adamae.evaluate import parse_arguments as parse_evaluation
from adamae.train import train
from adamae.training.config import parse

SCRATCH, BASELINE = "scratch", "random"
PRESETS: dict[str, dict[str, Any]] = read_yaml(ROOT / "benchmarks/masking_study.yaml")
MEASURES = ("finetune_top1", "attentive_probe_top1", "linear_top1", "knn_top1")
NOTES = [
    "Top-1 of the last weights, mean over seeds; _std: their standard deviation.",
    "_gain: mean difference to random masking of the same ratio and seed, _over_scratch: to training from scratch with"
    " the same seed; _error: the difference's standard error over seeds.",
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

    @property
    def tasks(self) -> list[str]:
        """The training runs in order."""
        return (
            ["finetune"] if self.mask_ratio is None else ["pretrain", "attentive_probe", "finetune"]
        )

    def overrides(self) -> list[str]:
        masking, _, settings = self.strategy.partition(":")
        more = [*filter(None, settings.split(",")), f"seed={self.seed}"]
        if self.mask_ratio is None:
            return more
        return [f"model.masking={masking}", f"model.mask_ratio={self.mask_ratio:g}", *more]


def main() -> None:
    print_table(run_study(parse_arguments(None)))


def run_study(options: argparse.Namespace) -> list[Row]:
    """Run what is missing in --output and write its table; return it."""
    study = Study(options, options.output or results_folder(choose_device()) / "masking_study")
    for number, point in enumerate(study.points, start=1):
        log(f"{point.name} ({number} of {len(study.points)})")
        study.run_point(point)
    summary = summarize(
        [read_json(file)["row"] for file in sorted(study.folder.glob("points/*.json"))]
    )
    study.report.write(summary)
    return summary


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__, "benchmark_results/<gpu or cpu>/masking_study")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--shards", required=True, help="labeled training shards")
    parser.add_argument("--validation", required=True, help="labeled validation shards")
    parser.add_argument(
        "--strategies", nargs="+", help=f"MASKING[:section.key=value,...] or {SCRATCH}"
    )
    parser.add_argument("--ratios", nargs="+", type=float, help="mask ratios")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--labels", type=between(1), help="labeled videos to learn from (default: all)"
    )
    return parser.parse_args(arguments)


class Study:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        """Check all configurations first, so that no error comes after hours."""
        self.preset, self.options, self.folder = PRESETS[options.preset], options, folder
        self.report = Report("masking_study", folder, choose_device(), NOTES)
        pairs = make_grid(options.strategies, options.ratios) or [
            tuple(pair) for pair in self.preset["points"]
        ]
        self.points = [Point(*pair, seed) for seed in options.seeds for pair in pairs]
        for point in self.points:
            for task in point.tasks:
                parse([*self.settings(point, task), f"data.shards={options.shards}"])

    def settings(self, point: Point, task: str) -> list[str]:
        """List the overrides of one of a point's runs, without its paths."""
        kinds = ["common", task] if task == "pretrain" else ["common", "labeled", task]
        kinds += [SCRATCH] if point.mask_ratio is None else []
        of_preset = [override for kind in kinds for override in self.preset.get(kind, [])]
        given = [
            f"task={task}",
            *of_preset,
            *self.options.overrides,
            *point.overrides(),
            "evaluation.every=null",
        ]
        labels = [f"data.subset={self.options.labels}", f"data.subset_seed={point.seed}"]
        return [*given, *labels] if self.options.labels and task != "pretrain" else given

    def run_point(self, point: Point) -> None:
        """Train and evaluate a point, and write its result; refuse a result that was made with other settings."""
        result = self.folder / "points" / f"{point.name}.json"
        settings = {task: self.settings(point, task) for task in point.tasks}
        if result.is_file():
            if read_json(result)["settings"] != settings:
                raise InputError(
                    f"{result} was made with other settings; restore them or choose another --output"
                )
            return
        row: Row = {
            **asdict(point),
            **{name: self.report.about[name] for name in ("device", "commit")},
        }
        for task, overrides in settings.items():
            row |= self.run_task(task, overrides, self.folder / "runs" / point.name)
        result.parent.mkdir(parents=True, exist_ok=True)
        write_json(result, {"settings": settings, "row": row})

    def run_task(self, task: str, settings: list[str], runs: Path) -> Row:
        """Train; return what the features or the classifier reach."""
        run, shards, validation = runs / task, self.options.shards, self.options.validation
        given = [*settings, f"data.shards={shards}", f"run={run}"]
        if task != "pretrain":
            # The validation shards only refuse classes that do not match before the run: evaluate.py evaluates.
            given.append(f"evaluation.shards={validation}")
        if task != "pretrain" and (runs / "pretrain").is_dir():
            given.append(f"init_from={runs / 'pretrain'}")
        if not train(parse(given)):
            raise KeyboardInterrupt
        if task == "pretrain":
            if not self.preset.get("linear"):
                return {}
            return classify(*(encode_videos(run, videos) for videos in (shards, validation)))
        views = [f"--{name}={count}" for name, count in self.preset.get("views", {}).items()]
        newest, output = max((run / "checkpoints").glob("step-*")), f"--output={run / 'evaluation'}"
        evaluate(parse_evaluation([str(newest), validation, *views, output]))
        return {f"{task}_top1": float(read_json(run / "evaluation/results.json")["top1"])}


def is_scratch(strategy: str) -> bool:
    return strategy.partition(":")[0] == SCRATCH


def make_grid(
    strategies: list[str] | None, ratios: list[float] | None
) -> list[tuple[str, float | None]]:
    """Combine every strategy with every ratio, training from scratch once."""
    strategies, ratios = strategies or [], ratios or []
    if all(map(is_scratch, strategies)) == bool(ratios):
        raise InputError(
            "give --ratios with --strategies that mask (not for scratch alone), or neither"
        )
    pairs = [(s, ratio) for s in strategies for ratio in ([None] if is_scratch(s) else ratios)]
    return list(dict.fromkeys(pairs))


def summarize(rows: Iterable[Row]) -> list[Row]:
    """Average over seeds: a row for each strategy and ratio, the best first, with paired gains."""
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["strategy"], row["mask_ratio"]), []).append(row)
    summary = []
    for (strategy, ratio), group in groups.items():
        line: Row = {"strategy": strategy, "mask_ratio": ratio, "seeds": len(group)}
        bases = {"gain": (BASELINE, ratio), "over_scratch": (SCRATCH, None)}
        for name in MEASURES:
            if not (values := {row["seed"]: row[name] for row in group if name in row}):
                continue
            line |= {
                name: statistics.mean(values.values()),
                f"{name}_std": deviation(values.values()),
            }
            for title, base in bases.items():
                others = {row["seed"]: row[name] for row in groups.get(base, []) if name in row}
                gains = [value - others[seed] for seed, value in values.items() if seed in others]
                if gains and base != (strategy, ratio):
                    std = deviation(gains)
                    line[f"{name}_{title}"] = statistics.mean(gains)
                    line[f"{name}_{title}_error"] = None if std is None else std / len(gains) ** 0.5
        summary.append(
            {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in line.items()
            }
        )
    return sorted(summary, key=lambda line: [-line.get(name, 0) for name in MEASURES])


def deviation(values: Iterable[float]) -> float | None:
    """Return the standard deviation; None of a single value."""
    found = list(values)
    return statistics.stdev(found) if len(found) > 1 else None


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main, resumable=True)
