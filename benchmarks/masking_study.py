"""Compare masking strategies: pre-train, probe and fine-tune every one with each seed.

    python benchmarks/masking_study.py --preset cpu_clips --shards shards/train \
        --validation shards/validation

A point is a strategy, a mask ratio and a seed. Every point is pre-trained on the same number of
clips. With a preset's `linear`, its features are classified by ridge regression and k-NN, as
compare.py does. Then an attentive probe and a fine-tuning run (or one of them, --tasks) are
evaluated on --validation by evaluate.py, with their last weights. `scratch` is fine-tuned without
pre-training.

They learn from all labels of --shards. `--labels 50 100` gives a curve over labels: a point for
each number, whose videos the seed chooses, after the same pre-training. The number of steps
with few labels is the preset's.

A strategy is a masking or `scratch`. An objective of the preset before it says how the point is
pre-trained: `views/random`. Overrides after it are for all runs of the point, with labels too:
`adaptive:model.sampler_depth=2,steps=900`. `section.key=value` applies to all points. The presets
are in benchmarks/masking_study.yaml. Re-running the command with the same --output resumes; copy
points/ to resume on another machine. Further strategies, ratios or seeds are added to the table, by
several commands at the same time too (CUDA_VISIBLE_DEVICES=1 … --seeds 1).
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import ROOT, Report, Row, print_table, results_folder
from adamae.common.arguments import between
from adamae.common.atomic_io import write_json
from adamae.common.devices import choose_device
from adamae.common.errors import InputError, run_command
from adamae.common.logging import log
from adamae.common.yaml_io import read_yaml
from adamae.evaluate import evaluate
from adamae.evaluate import parse_arguments as parse_evaluation
from adamae.model.encoders.open_encoder import open_encoder
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning.sample_order import choose_subset
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.train import train
from adamae.training.checkpoint import list_checkpoints
from adamae.training.config import EvaluationConfig, parse
from adamae.training.extraction import ExtractionOptions
from adamae.training.frozen_classifiers import fit_linear
from adamae.training.measures import choose_neighbors, predict_by_neighbors
from adamae.training.video_features import extract_vectors, match_videos

SCRATCH = "scratch"
LABELED_TASKS = ["attentive_probe", "finetune"]
BASELINE = "random"
PRESETS: dict[str, dict[str, Any]] = read_yaml(ROOT / "benchmarks/masking_study.yaml")
# In this order they sort the table: the later ones decide between rows that are equal so far.
MEASURES = ("finetune_top1", "attentive_probe_top1", "linear_top1", "knn_top1")
NOTES = [
    "Top-1 of the last weights, mean over seeds; _std: their standard deviation.",
    "_gain: mean difference to random masking of the same ratio and seed, _over_scratch: to"
    " training from scratch with the same seed, _over_masks: of another objective to masked"
    " prediction with the same masking and seed, at the only ratio of that; _error: the"
    " difference's standard error over seeds.",
]


# Strategy, mask ratio and number of labels, of points that differ by their seeds alone.
Group = tuple[str, float | None, int | None]


@dataclass(frozen=True)
class Point:
    """A strategy, ratio and seed, trained and evaluated once."""

    strategy: str
    # None: from scratch.
    mask_ratio: float | None
    seed: int
    # None: all.
    labels: int | None = None

    @property
    def name(self) -> str:
        """The name of the point's result file and of the folder of its runs with labels.

        "random:steps=7" at ratio 0.9 with seed 3 and 50 labels is
        random_steps_7-0.9-seed3-50labels.
        """
        if self.labels is None:
            return self.pretraining
        return f"{self.pretraining}-{self.labels}labels"

    @property
    def pretraining(self) -> str:
        """The name of the folder of the run without labels, which points share."""
        strategy = re.sub("[^0-9A-Za-z._-]", "_", self.strategy)
        if self.mask_ratio is None:
            return f"{strategy}-seed{self.seed}"
        return f"{strategy}-{self.mask_ratio:g}-seed{self.seed}"

    @property
    def choice(self) -> DataConfig:
        """Which labeled videos the point learns from."""
        return DataConfig(subset=self.labels, subset_seed=self.seed)

    @property
    def objective(self) -> str:
        """The name of the preset's objective; "" is to predict masked tokens."""
        return self.strategy.partition(":")[0].rpartition("/")[0]

    def overrides(self) -> list[str]:
        """List the overrides that the strategy, the ratio and the seed stand for, in all runs."""
        name, _, strategy_overrides = self.strategy.partition(":")
        masking = name.rpartition("/")[2]
        overrides = []
        if self.mask_ratio is not None:
            overrides += [f"model.masking={masking}", f"model.mask_ratio={self.mask_ratio:g}"]
        if strategy_overrides:
            overrides += strategy_overrides.split(",")
        return [*overrides, f"seed={self.seed}"]


def main() -> None:
    """Run the study that the command line describes, and print its table."""
    print_table(run_study(parse_arguments(None)))


def run_study(options: argparse.Namespace) -> list[Row]:
    """Run the points that --output does not hold yet, and return and write the table of all."""
    default_folder = results_folder(choose_device()) / "masking_study"
    study = Study(options, options.output or default_folder)
    study.check_labels()
    for number, point in enumerate(study.points, start=1):
        log(f"{point.name} ({number} of {len(study.points)})")
        study.run_point(point)
    # The folder may also hold points of other commands, other GPUs or other machines.
    results = sorted(study.folder.glob("points/*.json"))
    summary = summarize(read_json(file)["row"] for file in results)
    study.report.write(summary)
    return summary


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__, "benchmark_results/<gpu or cpu>/masking_study")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--shards", required=True, help="labeled training shards")
    parser.add_argument("--validation", required=True, help="labeled validation shards")
    parser.add_argument(
        "--strategies", nargs="+", help=f"[OBJECTIVE/]MASKING[:section.key=value,...] or {SCRATCH}"
    )
    parser.add_argument("--ratios", nargs="+", type=float, help="mask ratios")
    # Three seeds show large differences only. The gain of one seed had a standard deviation of
    # 0.054, so that a gain of 0.02 takes 30 of them (benchmarks/experiments.md).
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--labels",
        nargs="+",
        type=between(1),
        metavar="N",
        help="numbers of labeled videos to learn from (default: all)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=LABELED_TASKS,
        default=LABELED_TASKS,
        help="what is trained with labels (default: both)",
    )
    return parser.parse_args(arguments)


class Study:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        """List the points, and check all configurations, so that no error comes after hours.

        Raise InputError if one of them is wrong.
        """
        self.preset = PRESETS[options.preset]
        self.options = options
        self.folder = folder
        self.report = Report("masking_study", folder, choose_device(), NOTES)
        pairs = make_grid(options.strategies, options.ratios) or self.preset["points"]
        # Seeds are the outer loop: all strategies are compared once before any is repeated.
        self.points = [
            Point(strategy, ratio, seed, labels)
            for seed, labels, (strategy, ratio) in product(
                options.seeds, options.labels or [None], pairs
            )
        ]
        if "finetune" not in options.tasks and any(is_scratch(strategy) for strategy, _ in pairs):
            raise InputError(f"{SCRATCH} is fine-tuned and nothing else: add finetune to --tasks")
        for point in self.points:
            for task in self.list_tasks(point):
                parse([*self.make_overrides(point, task), f"data.shards={options.shards}"])

    def check_labels(self) -> None:
        """Raise InputError if a point without a result takes more labeled videos than there are."""
        missing = [point for point in self.points if not self.find_result(point).is_file()]
        if missing:
            dataset = ShardDataset.open(self.options.shards)
            for point in missing:
                choose_subset(dataset, point.choice)

    def find_result(self, point: Point) -> Path:
        return self.folder / "points" / f"{point.name}.json"

    def list_tasks(self, point: Point) -> list[str]:
        """List the training runs of a point in order."""
        if point.mask_ratio is None:
            return ["finetune"]
        return ["pretrain", *self.options.tasks]

    def make_overrides(self, point: Point, task: str) -> list[str]:
        """List the overrides of one of a point's runs, without its paths."""
        is_labeled = task != "pretrain"
        kinds = ["common", "labeled", task] if is_labeled else ["common", task]
        if is_labeled and point.labels:
            kinds.append(f"{task}_few_labels")
        if point.mask_ratio is None:
            kinds.append(SCRATCH)
        overrides = [f"task={task}"]
        # The most specific overrides come last, since later ones override earlier ones.
        for kind in kinds:
            overrides += self.preset.get(kind, [])
        if not is_labeled and point.objective:
            overrides += self._find_objective(point)
        # No evaluation on the way: it costs time, and a checkpoint that was chosen by its accuracy
        # on the validation videos would look better than it is.
        overrides += [*self.options.overrides, *point.overrides(), "evaluation.every=null"]
        # Every seed learns from other labeled videos, since an accuracy depends on them, too: with
        # another choice of 160, training from scratch was much worse.
        if is_labeled and point.labels:
            overrides += [f"data.subset={point.labels}", f"data.subset_seed={point.seed}"]
        return overrides

    def _find_objective(self, point: Point) -> list[str]:
        """Return the overrides of a point's objective; raise InputError if the preset has none."""
        objectives = self.preset.get("objectives", {})
        if point.objective not in objectives:
            names = ", ".join(objectives) or "none"
            raise InputError(
                f"{point.objective!r} of {point.strategy!r} is no objective of the preset"
                f" {self.options.preset} (it has {names})"
            )
        return objectives[point.objective]

    def run_point(self, point: Point) -> None:
        """Train and evaluate a point, and write its result, unless it is there.

        Raise InputError if it was made with other overrides.
        """
        result = self.find_result(point)
        overrides = {task: self.make_overrides(point, task) for task in self.list_tasks(point)}
        if result.is_file():
            if read_json(result)["settings"] != overrides:
                raise InputError(
                    f"{result} was made with other overrides;"
                    " restore them or choose another --output"
                )
            return
        row: Row = asdict(point)
        # Each point names its own machine, as points of several machines share a table.
        for name in ("device", "commit"):
            row[name] = self.report.about[name]
        for task in overrides:
            row |= self.run_task(point, task, overrides[task])
        result.parent.mkdir(parents=True, exist_ok=True)
        write_json(result, {"settings": overrides, "row": row})

    def run_task(self, point: Point, task: str, overrides: list[str]) -> Row:
        """Train; return the top-1 accuracies of the features or of the classifier."""
        runs = self.folder / "runs"
        pretrained = runs / point.pretraining / "pretrain"
        run = pretrained if task == "pretrain" else runs / point.name / task
        shards = self.options.shards
        validation = self.options.validation
        arguments = [*overrides, f"data.shards={shards}", f"run={run}"]
        if task != "pretrain":
            # Given only so that a class mismatch is refused early.
            arguments.append(f"evaluation.shards={validation}")
            if point.mask_ratio is not None:
                arguments.append(f"init_from={pretrained}")
        # train returns False when a signal has stopped it. The same command resumes the run.
        if not train(parse(arguments)):
            raise KeyboardInterrupt
        if task == "pretrain":
            if not self.preset.get("linear"):
                return {}
            return classify_frozen(run, shards, validation, point.choice)
        newest = list_checkpoints(run / "checkpoints")[-1]
        arguments = [str(newest), validation, f"--output={run / 'evaluation'}"]
        for name, count in self.preset.get("views", {}).items():
            arguments.append(f"--{name}={count}")
        evaluate(parse_evaluation(arguments))
        return {f"{task}_top1": float(read_json(run / "evaluation/results.json")["top1"])}


def classify_frozen(run: Path, shards: str, validation: str, choice: DataConfig) -> Row:
    """Return the top-1 accuracies of a linear classifier and of k-NN on the features of a run.

    They learn from the videos of `choice.subset`.
    """
    encoder = open_encoder(run).to(choose_device())
    datasets = [ShardDataset.open(shards), ShardDataset.open(validation)]
    vectors = []
    for name, location in (("training", shards), ("validation", validation)):
        folder = run / "features" / name
        vectors.append(extract_vectors(location, folder, encoder, str(run), ExtractionOptions()))
    chosen = choose_subset(datasets[0], choice)
    keys = {datasets[0].samples[int(sample)].key for sample in chosen}
    vectors[0] = {key: vector for key, vector in vectors[0].items() if key in keys}
    training, queries = match_videos(datasets, vectors, EvaluationConfig().group)
    predictions = {
        "linear_top1": fit_linear(queries, training).predicted,
        "knn_top1": predict_by_neighbors(queries, training, choose_neighbors(training.labels)),
    }
    row: Row = {}
    for name, predicted in predictions.items():
        row[name] = (predicted == queries.labels).double().mean().item()
    return row


def is_scratch(strategy: str) -> bool:
    """Return whether a strategy, whose overrides follow a colon, trains from scratch."""
    return strategy.partition(":")[0] == SCRATCH


def make_grid(
    strategies: list[str] | None, ratios: list[float] | None
) -> list[tuple[str, float | None]]:
    """Combine every strategy with every ratio; scratch has none.

    Raise InputError if there are ratios without a strategy that masks, or the other way round.
    """
    strategies = strategies or []
    masks_tokens = not all(map(is_scratch, strategies))
    if masks_tokens != bool(ratios):
        raise InputError(
            "give --ratios with --strategies that mask (not for scratch alone), or neither"
        )
    pairs: list[tuple[str, float | None]] = []
    for strategy in strategies:
        if is_scratch(strategy):
            pairs.append((strategy, None))
        else:
            pairs += [(strategy, ratio) for ratio in ratios or []]
    return list(dict.fromkeys(pairs))


def summarize(rows: Iterable[Row]) -> list[Row]:
    """Average over seeds, with paired gains: a row for each strategy, ratio and number of labels.

    The fewest labels come first, and of as many the best.
    """
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        key = row["strategy"], row["mask_ratio"], row["labels"]
        groups.setdefault(key, []).append(row)
    summary = []
    for (strategy, ratio, labels), group in groups.items():
        line: Row = {"strategy": strategy, "mask_ratio": ratio, "labels": labels}
        line["seeds"] = len(group)
        baselines = find_baselines((strategy, ratio, labels), groups)
        for measure in MEASURES:
            by_seed = select(group, measure)
            if not by_seed:
                continue
            line[measure] = round(statistics.mean(by_seed.values()), 4)
            line[f"{measure}_std"] = round_or_none(deviation(by_seed.values()))
            for name, key in baselines.items():
                gains = pair_up(by_seed, select(groups.get(key, []), measure))
                if gains:
                    line[f"{measure}_{name}"] = round(statistics.mean(gains), 4)
                    line[f"{measure}_{name}_error"] = round_or_none(standard_error(gains))
        summary.append(line)

    def order(line: Row) -> list[float]:
        return [line["labels"] or math.inf, *[-line.get(measure, 0) for measure in MEASURES]]

    return sorted(summary, key=order)


def find_baselines(group: Group, groups: Iterable[Group]) -> dict[str, Group]:
    """Return what a group is compared with, by the name of the gain; never with itself."""
    strategy, ratio, labels = group
    baselines: dict[str, Group] = {}
    if strategy != BASELINE:
        baselines["gain"] = (BASELINE, ratio, labels)
    if strategy != SCRATCH:
        baselines["over_scratch"] = (SCRATCH, None, labels)
    _, _, masking = strategy.partition("/")
    masks = [other for other in groups if (other[0], other[2]) == (masking, labels)]
    if len(masks) == 1:
        baselines["over_masks"] = masks[0]
    return baselines


def select(rows: list[Row], measure: str) -> dict[int, float]:
    """Return a measure by seed, of the rows that have it."""
    return {row["seed"]: row[measure] for row in rows if measure in row}


def pair_up(by_seed: dict[int, float], baseline_by_seed: dict[int, float]) -> list[float]:
    """Return the gains over a baseline with the same seed, in order of the seeds.

    A seed decides which videos are labeled and how all strategies begin, so the difference within a
    seed varies less than accuracies do. {0: 0.54, 1: 0.65} over {0: 0.5, 1: 0.6, 2: 0.7} gains
    [0.04, 0.05].
    """
    seeds = by_seed.keys() & baseline_by_seed.keys()
    return [by_seed[seed] - baseline_by_seed[seed] for seed in sorted(seeds)]


def deviation(values: Iterable[float]) -> float | None:
    """Return the standard deviation; None of a single value."""
    numbers = list(values)
    return statistics.stdev(numbers) if len(numbers) > 1 else None


def standard_error(values: list[float]) -> float | None:
    """Return the standard error of the mean; None of a single value."""
    std = deviation(values)
    return None if std is None else std / math.sqrt(len(values))


def round_or_none(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main, resumable=True)
