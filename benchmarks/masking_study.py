"""Compare masking strategies and other objectives: pre-train, judge, probe and fine-tune every one with each seed.

    python benchmarks/masking_study.py --preset cpu
    python benchmarks/masking_study.py --preset gpu --shards shards/train --validation shards/validation

Each point is pre-trained on the same number of clips, and judged without labels by training/motion.py. Then
an attentive probe and a fine-tuning run with the labels of --shards are evaluated on --validation by evaluate.py, with
their last weights. `scratch` is fine-tuned without pre-training. Without --shards, synthetic labeled videos are
generated whose class is defined by motion only (synthetic_videos.py --dataset motion). Re-running the command with the
same --output resumes; further strategies, ratios or seeds are added to the tables, by several commands at the same time
too (CUDA_VISIBLE_DEVICES=1 … --seeds 1). `section.key=value` applies to all runs.

A strategy is a masking, optionally with settings: `adaptive`, `adaptive:model.sampler_depth=2,steps=900`. In these,
{points} stands for the folder of all points and {seed} for the point's seed. With --label-sets, every pre-trained model
is probed and fine-tuned with several sets of --labels videos; with 0, with none. Differences to --baseline are paired
by seed and label set. The presets are in benchmarks/masking_study.yaml.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import ROOT, Report, Row, print_table, results_folder
from common.atomic_io import write_json, write_text
from common.devices import choose_device
from common.errors import InputError, run_command
from common.logging import log
from common.yaml_io import read_yaml
from evaluate import evaluate
from evaluate import parse_arguments as parse_evaluation
from model.weights.models import load_adamae
from train import train
from training.config import parse
from training.motion import measure

SCRATCH = "scratch"
PRESETS: dict[str, dict[str, Any]] = read_yaml(ROOT / "benchmarks/masking_study.yaml")
MEASURES = ("finetune_top1", "attentive_probe_top1", "displacement_r2", "moving_iou")
KEYS = ("strategy", "mask_ratio", "seed", "label_set")  # of a point's row
NOTES = [
    "Top-1 of the last weights; _std: standard deviation over seeds, of each seed's mean over label sets.",
    "_gain: mean difference to the baseline of the same ratio, seed and label set; _gain_error: its standard error,"
    " over the means of seeds or over the means of label sets, whichever is larger.",
    "What the other columns mean is said in training/motion.py.",
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

    def overrides(self, points: Path) -> list[str]:
        if self.mask_ratio is None:
            return [f"seed={self.seed}"]
        masking, _, settings = self.strategy.format(points=points, seed=self.seed).partition(":")
        more = [f"model.mask_ratio={self.mask_ratio:g}", f"seed={self.seed}"]
        return [f"model.masking={masking}", *filter(None, settings.split(",")), *more]


def main() -> None:
    print_table(run_study(parse_arguments(None)))


def run_study(options: argparse.Namespace) -> list[Row]:
    """Run what is missing in --output and write its tables; return the summary."""
    study = Study(options, options.output or results_folder(choose_device()) / "masking_study")
    study.run()
    rows = [row for file in sorted(study.folder.glob("points/*/result.json")) for row in read_json(file)["rows"]]
    summary = summarize(rows, options.baseline)
    study.report.write(rows, "points")
    study.report.write(summary)
    return summary


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__, "benchmarks/results/<gpu or cpu>/masking_study")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--shards", help="labeled training shards (default: synthetic ones)")
    parser.add_argument("--validation", help="labeled validation shards")
    parser.add_argument("--strategies", nargs="+", help=f"MASKING[:section.key=value,...] or {SCRATCH}")
    parser.add_argument("--ratios", nargs="+", type=float, help="mask ratios")
    parser.add_argument("--baseline", default="random", help="strategy the others are compared with (default: random)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    count = at_least(1)
    parser.add_argument("--pretrain-steps", type=count, help="optimizer steps of pre-training (default: the preset's)")
    parser.add_argument("--labels", type=count, help="labeled videos to learn from (default: the preset's, or all)")
    parser.add_argument("--label-sets", type=at_least(0), default=1, help="number of label sets for each model")
    parser.add_argument(
        "--synthetic", nargs="+", default=[], metavar="OPTION=VALUE",
        help="options of shard_tools/synthetic_videos.py, such as num-frames=32 distractors=3 object-size=0.4",
    )  # fmt: skip
    parser.add_argument("--num-videos", type=count, default=3200, help="synthetic training videos (default: 3200)")
    options = parser.parse_args(arguments)
    if bool(options.shards) != bool(options.validation):
        raise InputError("give --shards and --validation together, or neither for synthetic videos")
    if options.shards is None and "synthetic" not in PRESETS[options.preset]:
        raise InputError(f"--preset {options.preset} has no synthetic videos: give --shards and --validation")
    if options.synthetic and options.shards is not None:
        raise InputError("--synthetic and --shards exclude each other")
    if options.label_sets > 1 and options.shards is not None and options.labels is None:
        raise InputError("--label-sets needs --labels: all labels of --shards are one set")
    return options


class Study:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        """Check all configurations first, so that no error comes after hours."""
        self.preset, self.options, self.folder = PRESETS[options.preset], options, folder
        self.report = Report("masking_study", folder, choose_device(), NOTES)
        pairs = make_grid(options.strategies, options.ratios) or [tuple(pair) for pair in self.preset["points"]]
        self.points = [Point(*pair, seed) for seed in options.seeds for pair in pairs]
        self.shards, self.validation, self.num_labels = options.shards, options.validation, options.labels
        self.synthetic = ""
        if options.shards is None:
            # When an option is given twice, the last one counts.
            given = [f"--{option}" for option in options.synthetic]
            self.synthetic = " ".join([self.preset["synthetic"], *given, f"--num-videos={options.num_videos}"])
            all_labels = min(self.preset.get("synthetic_labels", options.num_videos), options.num_videos)
            self.num_labels = self.num_labels or all_labels
            self.shards, self.validation = (str(folder / "data" / name) for name in ("train", "validation"))
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
        given = [f"task={task}", f"data.shards={self.shards}"]
        given += [override for kind in kinds for override in self.preset.get(kind, [])]
        given += [*self.options.overrides, *point.overrides(self.folder / "points")]
        if label_set is None:
            steps = self.options.pretrain_steps
            return [*given, "evaluation.every=null", *([f"steps={steps}"] if steps else [])]
        return [
            *given, f"data.subset={self.num_labels or 'null'}", f"data.subset_seed={label_set}",
            # Only to refuse classes that do not match before the run: evaluate.py evaluates.
            f"evaluation.shards={self.validation}", "evaluation.every=null",
        ]  # fmt: skip

    def run(self) -> None:
        """Run all points that have no result yet."""
        if self.synthetic:
            make_motion_shards(self.folder / "data", self.synthetic, self.options.num_videos)
        for number, point in enumerate(self.points, start=1):
            log(f"{point.name} ({number} of {len(self.points)})")
            self.run_point(point)

    def run_point(self, point: Point) -> None:
        """Train and evaluate a point, and write its result; refuse a result that was made with other settings."""
        runs = self.folder / "points" / point.name
        settings = [self.overrides(point, *stage) for stage in self.stages(point)] + [[self.synthetic]]
        if (runs / "result.json").is_file():
            if read_json(runs / "result.json")["settings"] != settings:
                raise InputError(f"{runs} was made with other settings; restore them or choose another --output")
            return
        shared: Row = asdict(point)
        rows: list[Row] = [{"label_set": label_set} for label_set in range(self.options.label_sets) or [None]]
        for (task, label_set), overrides in zip(self.stages(point), settings, strict=False):
            run = runs / (task if label_set is None else f"{task}-labels{label_set}")
            start = [f"init_from={runs / 'pretrain'}"] if label_set is not None and point.mask_ratio else []
            if not train(config := parse([*overrides, *start, f"run={run}"])):
                raise KeyboardInterrupt
            if label_set is None:
                videos = self.folder / "data/validation_videos" if self.synthetic else Path(self.validation)
                shared |= measure(load_adamae(run), videos, config.data)
            else:
                views = [f"--{name}={count}" for name, count in self.preset.get("views", {}).items()]
                newest, output = max((run / "checkpoints").glob("step-*")), f"--output={run / 'evaluation'}"
                evaluate(parse_evaluation([str(newest), self.validation, *views, output]))
                rows[label_set][f"{task}_top1"] = float(read_json(run / "evaluation/results.json")["top1"])
        made_by = {name: self.report.about[name] for name in ("device", "commit")}
        write_json(runs / "result.json", {"settings": settings, "rows": [shared | row | made_by for row in rows]})


def make_grid(strategies: list[str] | None, ratios: list[float] | None) -> list[tuple[str, float | None]]:
    """Combine every strategy with every ratio, training from scratch once."""
    strategies, ratios = strategies or [], ratios or []
    if any(strategy != SCRATCH for strategy in strategies) != bool(ratios):
        raise InputError("give --ratios with --strategies that mask (not for scratch alone), or neither")
    pairs = [(s, ratio) for s in strategies for ratio in ([None] if s == SCRATCH else ratios)]
    return list(dict.fromkeys(pairs))


def make_motion_shards(folder: Path, options: str, num_videos: int) -> None:
    """Make labeled shards of synthetic videos for training and, a fifth as many, for validation."""
    made_with = folder / "options.txt"
    if made_with.is_file() and made_with.read_text(encoding="utf-8") != options:
        raise InputError(f"the videos in {folder} were made with other options; choose another --output")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(made_with, options)
    for name, count, seed in (("train", num_videos, 0), ("validation", max(1, num_videos // 5), 1)):
        videos, output = str(folder / f"{name}_videos"), str(folder / name)
        if not (folder / name / "dataset.json").is_file():
            counts = [f"--num-videos={count}", f"--seed={seed}"]
            generate = ["synthetic_videos.py", videos, "--dataset=motion", *options.split(), *counts]
            for script, *arguments in (generate, ["make_shards.py", videos, output, "--frame-stride", "1"]):
                subprocess.run([sys.executable, str(ROOT / "shard_tools" / script), *arguments], check=True)


def summarize(rows: Sequence[Row], baseline: str) -> list[Row]:
    """Average the points: a row for each strategy and ratio, the best first, with paired gains over the baseline."""
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["strategy"], row["mask_ratio"]), []).append(row)
    summary = []
    for (strategy, ratio), group in groups.items():
        line: Row = {"strategy": strategy, "mask_ratio": ratio, "seeds": len({row["seed"] for row in group})}
        numbers = [name for name, value in group[0].items() if name not in KEYS and isinstance(value, float)]
        for name in sorted(numbers, key=lambda name: name not in MEASURES):
            means = group_means([(row["seed"], row[name]) for row in group])
            line[name] = round(statistics.mean(means), 4)
            if name not in MEASURES:
                continue
            if len(means) > 1:
                line[f"{name}_std"] = round(statistics.stdev(means), 4)
            if strategy not in (baseline, SCRATCH):
                found = zip(
                    ("gain", "gain_error"), paired_gain(group, groups.get((baseline, ratio), []), name), strict=True
                )
                line |= {f"{name}_{what}": round(value, 4) for what, value in found if value is not None}
        summary.append(line)
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
