"""Compare masking strategies: pre-train, probe and fine-tune every strategy, ratio and seed with equal compute.

    python benchmarks/masking_study.py --preset cpu
    python benchmarks/masking_study.py --preset gpu --shards shards/train --validation shards/validation

Each point is pre-trained on the same number of clips. Then an attentive probe and a fine-tuning run with the labels of
--shards are evaluated on --validation by evaluate.py, with their last weights. `scratch` is fine-tuned without
pre-training. Without --shards, synthetic labeled videos are generated whose class is defined by motion only
(synthetic_videos.py --dataset motion). Reconstruction errors of moving and of static tokens are measured under random
masks, the same for all models. Re-running the command with the same --output resumes; further strategies, ratios or
seeds are added to the tables. Points run in parallel on all GPUs. `section.key=value` applies to all runs.

A strategy is a masking, optionally with model settings: `adaptive`, `adaptive:sampler_depth=2,decoder_share=0.5`. With
--label-sets, every pre-trained model is probed and fine-tuned with several sets of --labels videos; differences to
--baseline are paired by seed and label set. The presets are in benchmarks/masking_study.yaml.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common.openmp  # noqa: F401

import torch

from benchmarks import motion_report
from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import ROOT, Report, Row, print_table, results_folder
from common.atomic_io import write_json, write_text
from common.devices import choose_device
from common.errors import InputError, run_command
from common.progress import progress_bar
from common.yaml_io import read_yaml
from figures.clips import read_clips
from model.adamae import AdaMAE
from training.config import parse

SCRATCH = "scratch"
NUM_CLIPS = 200  # whose reconstruction errors are measured
PRESETS: dict[str, dict[str, Any]] = read_yaml(ROOT / "benchmarks/masking_study.yaml")
MEASURES = ("attentive_probe_top1", "finetune_top1")
KEYS = ("strategy", "mask_ratio", "seed", "label_set")  # of a point's row
NOTES = [
    "Top-1 of the last weights; _std: standard deviation over seeds, of each seed's mean over label sets.",
    "_gain: mean difference to the baseline of the same ratio, seed and label set; _gain_error: its standard error,"
    " over the means of seeds or over the means of label sets, whichever is larger.",
    "error_moving, error_static: reconstruction loss of masked tokens under random masks of the point's ratio. Moving"
    " are the 20 % of a clip's tokens whose brightness changes most. correlation: of the sampling probability with that"
    " change.",
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
    def overrides(self) -> list[str]:
        if self.mask_ratio is None:
            return [f"seed={self.seed}"]
        masking, _, settings = self.strategy.partition(":")
        more = [f"model.{setting}" for setting in settings.split(",") if setting]
        return [f"model.masking={masking}", *more, f"model.mask_ratio={self.mask_ratio:g}", f"seed={self.seed}"]


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
    parser.add_argument("--strategies", nargs="+", help=f"MASKING[:key=value,...] or {SCRATCH}")
    parser.add_argument("--ratios", nargs="+", type=float, help="mask ratios")
    parser.add_argument("--baseline", default="random", help="strategy the others are compared with (default: random)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    count = at_least(1)
    parser.add_argument("--pretrain-steps", type=count, help="optimizer steps of pre-training (default: the preset's)")
    parser.add_argument("--labels", type=count, help="labeled videos to learn from (default: the preset's, or all)")
    parser.add_argument("--label-sets", type=count, default=1, help="number of label sets for each model")
    parser.add_argument(
        "--synthetic", nargs="+", default=[], metavar="OPTION=VALUE",
        help="options of shard_tools/synthetic_videos.py, such as num-frames=32 distractors=3 object-size=0.4",
    )  # fmt: skip
    parser.add_argument("--num-videos", type=count, default=3200, help="synthetic training videos (default: 3200)")
    parser.add_argument("--parallel", type=count, default=1, help="points run in parallel without a GPU")
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
        given = [f"task={task}", f"data.shards={self.shards}", *self.preset["common"], *self.preset[task]]
        if point.mask_ratio is None:
            given += self.preset.get("scratch", [])
        given += [*self.options.overrides, *point.overrides]
        if label_set is None:
            steps = self.options.pretrain_steps
            return [*given, "evaluation.every=null", *([f"steps={steps}"] if steps else [])]
        return [
            *given, f"data.subset={self.num_labels or 'null'}", f"data.subset_seed={label_set}",
            # Only to refuse classes that do not match before the run: evaluate.py evaluates.
            f"evaluation.shards={self.validation}", "evaluation.every=null",
        ]  # fmt: skip

    def run(self) -> None:
        """Run all points that have no result yet, as many in parallel as there are GPUs."""
        if self.synthetic:
            make_motion_shards(self.folder / "data", self.synthetic, self.options.num_videos)
        environments = divide_machine(torch.cuda.device_count() or self.options.parallel)
        waiting = iter(self.points)

        def work(environment: dict[str, str]) -> None:
            try:
                for point in waiting:
                    self.run_point(point, environment)
                    bar.update()
            except BaseException:
                list(waiting)  # no point starts after one that failed
                raise

        with (
            progress_bar(unit="point", total=len(self.points)) as bar,
            ThreadPoolExecutor(len(environments)) as pool,
        ):
            list(pool.map(work, environments))

    def run_point(self, point: Point, environment: dict[str, str]) -> None:
        """Train and evaluate a point, and write its result; refuse a result that was made with other settings."""
        runs = self.folder / "points" / point.name
        settings = [self.overrides(point, *stage) for stage in self.stages(point)] + [[self.synthetic]]
        if (runs / "result.json").is_file():
            if read_json(runs / "result.json")["settings"] != settings:
                raise InputError(f"{runs} was made with other settings; restore them or choose another --output")
            return
        runs.mkdir(parents=True, exist_ok=True)
        shared: Row = asdict(point)
        rows: list[Row] = [{"label_set": label_set} for label_set in range(self.options.label_sets)]
        for task, label_set in self.stages(point):
            run = runs / (task if label_set is None else f"{task}-labels{label_set}")
            start = [f"init_from={runs / 'pretrain'}"] if label_set is not None and point.mask_ratio else []
            command = ["train.py", *self.overrides(point, task, label_set), *start, f"run={run}"]
            run_script(command, environment, log := run.with_suffix(".log"))
            if label_set is None:
                shared |= self.measure_reconstruction(run)
            else:
                views = [f"--{name}={count}" for name, count in self.preset.get("views", {}).items()]
                newest = max((run / "checkpoints").glob("step-*"))
                output = run / "evaluation"
                command = ["evaluate.py", str(newest), self.validation, *views, f"--output={output}"]
                run_script(command, environment, log)
                rows[label_set][f"{task}_top1"] = float(read_json(output / "results.json")["top1"])
        made_by = {name: self.report.about[name] for name in ("device", "commit")}
        write_json(runs / "result.json", {"settings": settings, "rows": [shared | row | made_by for row in rows]})

    @torch.no_grad()
    def measure_reconstruction(self, run: Path) -> Row:
        """Measure errors of moving and static tokens under random masks, and an adaptive sampler by its report."""
        model = AdaMAE.from_pretrained(run)
        config, data = model.config, parse(self.overrides(self.points[0], "pretrain", None)).data
        clips = list(read_clips([Path(self.validation)], config.num_frames, config.image_size, data, NUM_CLIPS))
        randomly = model.with_masking(masking="random")
        moving, static = [], []
        for position, clip in enumerate(clips):
            output = randomly(clip.frames[None], seed=0, offset=position)
            is_moving = motion_report.brightness_change(clip, config).is_moving[output.masked_ids[0]]
            moving.append(output.loss_per_token[0][is_moving])
            static.append(output.loss_per_token[0][~is_moving])
        row: Row = {"error_moving": torch.cat(moving).mean().item(), "error_static": torch.cat(static).mean().item()}
        if model.token_sampler.learns:
            report = motion_report.measure(model, clips)
            row |= {name: report[name] for name in ("correlation", "moving_fraction_visible", "moving_fraction_all")}
        return row


def make_grid(strategies: list[str] | None, ratios: list[float] | None) -> list[tuple[str, float | None]]:
    """Combine every strategy with every ratio, training from scratch once."""
    strategies, ratios = strategies or [], ratios or []
    if any(strategy != SCRATCH for strategy in strategies) != bool(ratios):
        raise InputError("give --ratios with --strategies that mask (not for scratch alone), or neither")
    pairs = [(s, ratio) for s in strategies for ratio in ([None] if s == SCRATCH else ratios)]
    return list(dict.fromkeys(pairs))


def divide_machine(count: int) -> list[dict[str, str]]:
    """Divide cores and GPUs among `count` points: an environment for each."""
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    gpus = [str(number) for number in range(count)]
    if torch.cuda.device_count() and os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return [{"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:count]]


def run_script(command: list[str], environment: dict[str, str], log: Path) -> None:
    """Run one of this project's scripts, its output appended to `log`; raise InputError if it fails."""
    with log.open("a", encoding="utf-8") as file:
        script, *arguments = command
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *arguments], stdout=file, stderr=file, env=os.environ | environment
        )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise InputError(f"{log.parent.name} failed at {script}; see {log}")


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
    return sorted(summary, key=lambda line: -line["finetune_top1"])


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
