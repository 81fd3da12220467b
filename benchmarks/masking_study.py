"""A study of maskings: every point is pre-trained, probed and fine-tuned by this project's commands, and made once."""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import common.openmp  # noqa: F401

import torch

from benchmarks import motion_report
from benchmarks.harness import ROOT, Row, describe_machine, time_calls, write_results
from benchmarks.reports.masking_tables import MADE_BY, PROBE, Pair, earlier_rows
from benchmarks.step import PretrainingStep, noise_clip
from common.atomic_io import write_json, write_text
from common.errors import InputError
from common.progress import progress_bar
from common.yaml_io import read_yaml
from figures.clips import read_clips
from model.adamae import AdaMAE
from model.weights import pretrained
from training.checkpoint import existing
from training.config import TrainConfig, parse
from training.logger import read_rows
from training.schedule import Horizon

SCRATCH = "scratch"
NUM_CLIPS = 200  # whose reconstruction is looked at
PRESETS: dict[str, dict[str, Any]] = read_yaml(ROOT / "benchmarks/masking_quality.yaml")


@dataclass(frozen=True)
class Point:
    """What is pre-trained once."""

    strategy: str
    mask_ratio: float | None  # None: nothing is masked, as nothing is pre-trained
    seed: int

    @property
    def pair(self) -> Pair:
        return self.strategy, self.mask_ratio

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


class Stage(NamedTuple):
    """A run of a point: the pre-training, or one that learns from a set of labels."""

    objective: str
    label_set: int | None = None

    @property
    def name(self) -> str:
        """Of its folder; the first label set's, as before there were several."""
        return f"{self.objective}-labels{self.label_set}" if self.label_set else self.objective


PRETRAIN = Stage("pretrain")


class Study:
    """All points of one call."""

    def __init__(self, options: argparse.Namespace, folder: Path, device: torch.device) -> None:
        """Raises InputError about what cannot be trained before hours are spent on what can."""
        self.preset, self.extra, self.folder, self.device = PRESETS[options.preset], options.overrides, folder, device
        pairs = grid(options.strategies, options.ratios) or [tuple(pair) for pair in self.preset["points"]]
        self.points = [Point(*pair, seed) for seed in options.seeds for pair in pairs]
        self.num_labels: int | None = options.labels
        self.label_sets = range(options.label_sets)
        self.drawn = ""
        if options.shards is None:
            if self.num_labels is None:
                self.num_labels = min(self.preset.get("drawn_labels", options.num_videos), options.num_videos)
            # Of an option that stands twice, the last counts.
            self.drawn = " ".join([self.preset["drawn"], *options.drawn, f"--num-videos={options.num_videos}"])
            self.shards, self.validation = draw_synthetic_motion(folder, self.drawn, options.num_videos)
        else:
            self.shards, self.validation = options.shards, options.validation
        self.steps = dict.fromkeys(self.points, options.pretrain_steps or 0)  # 0: as the preset says
        configs = {point: self.config(point, PRETRAIN) for point in self.points}
        for config in configs.values():
            if config.steps:
                Horizon.of(config, clips_per_epoch=1, world_size=1)  # refuses a ramp longer than the run
        self.steps = {point: config.steps or 0 for point, config in configs.items()}
        self.about = describe_machine(device) | {"preset": options.preset, "equal": options.equal}
        self.about |= {"overrides": " ".join(self.extra), "drawn": self.drawn, "labels": self.num_labels}
        if options.equal == "seconds":
            masked = {point: config for point, config in configs.items() if point.mask_ratio is not None}
            self.steps |= steps_of_equal_time(masked, device, folder, self.about)
        planned = {point.pair: steps for point, steps in self.steps.items()}
        self.earlier = earlier_rows(folder / "points.json", self.about, planned)
        self.num_places = torch.cuda.device_count() or options.parallel
        self.places = places(self.num_places)

    def stages_of(self, point: Point) -> list[Stage]:
        """In the order in which they run; the last of a label set is its fine-tuning."""
        learning = ["finetune"] if point.mask_ratio is None else [PROBE, "finetune"]
        labelled = [Stage(objective, labels) for labels in self.label_sets for objective in learning]
        return labelled if point.mask_ratio is None else [PRETRAIN, *labelled]

    def run_all(self) -> list[Row]:
        """A row for each point and label set."""
        pool = ThreadPoolExecutor(self.num_places)
        failures: list[BaseException] = []

        def run(point: Point) -> list[Row]:
            if failures:
                raise failures[0]  # no point begins after one that failed
            try:
                return self.run(point)
            except BaseException as failure:
                failures.append(failure)
                raise

        try:
            found = progress_bar(pool.map(run, self.points), unit="point", total=len(self.points))
            return [row for rows in found for row in rows]
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C, nothing new begins

    def run(self, point: Point) -> list[Row]:
        """The rows of a point: read, if they are there, else made."""
        runs = self.folder / "points" / point.name
        file = runs / "result.json"
        known = [row for row in self.earlier if row_names(row, point) and row["label_set"] in self.label_sets]
        if len(known) == len(self.label_sets) and not file.is_file():
            return known
        settings = {stage.name: self.overrides(point, stage) for stage in self.stages_of(point)} | {"drawn": self.drawn}
        if not file.is_file():
            place = self.places.get()
            try:
                write_json(file, {"settings": settings, "rows": self.made(point, runs, place)})
            finally:
                self.places.put(place)
        result = json.loads(file.read_text(encoding="utf-8"))
        if result["settings"] != settings:
            raise InputError(f"{file} was made with other settings: put them back, or choose another --output")
        rows: list[Row] = result["rows"]
        return rows

    def made(self, point: Point, runs: Path, place: dict[str, str]) -> list[Row]:
        pretrained_row: Row = {}
        found: dict[int, Row] = {labels: {} for labels in self.label_sets}
        for stage in self.stages_of(point):
            self.train(point, stage, runs, place)
            if stage.label_set is None:
                pretrained_row = time_spent(runs / stage.name) | self.reconstruction(runs / stage.name)
            else:
                found[stage.label_set][f"{stage.objective}_top1"] = self.judged(stage, runs, place)
        here = {name: self.about[name] for name in MADE_BY}
        return [asdict(point) | {"label_set": labels} | pretrained_row | row | here for labels, row in found.items()]

    def train(self, point: Point, stage: Stage, runs: Path, place: dict[str, str]) -> None:
        runs.mkdir(parents=True, exist_ok=True)
        starts = stage.label_set is not None and point.mask_ratio is not None
        start = [f"finetune.checkpoint={runs / PRETRAIN.name}"] if starts else []
        command = ["train.py", *self.overrides(point, stage), *start, f"run={runs / stage.name}"]
        self.call(command, place, runs / f"{stage.name}.log")

    def judged(self, stage: Stage, runs: Path, place: dict[str, str]) -> float:
        """Top-1 of a classifier's last weights."""
        output = runs / stage.name / "evaluation"
        views = [f"--{name}={count}" for name, count in self.preset.get("views", {}).items()]
        newest = existing(runs / stage.name / "checkpoints")[-1]
        command = ["evaluate.py", str(newest), str(self.validation), *views, f"--output={output}"]
        self.call(command, place, runs / f"{stage.name}.log")
        return float(json.loads((output / "results.json").read_text(encoding="utf-8"))["top1"])

    def call(self, command: list[str], place: dict[str, str], log: Path) -> None:
        """Run one of this project's scripts; raises InputError if it fails."""
        with log.open("a", encoding="utf-8") as file:
            script, *arguments = command
            done = subprocess.run(
                [sys.executable, str(ROOT / script), *arguments],
                stdout=file, stderr=file, env=os.environ | place, check=False,
            )  # fmt: skip
        if done.returncode == 130:
            raise KeyboardInterrupt
        if done.returncode:
            raise InputError(f"{log.parent.name} failed at {script}: {log} says why")

    def overrides(self, point: Point, stage: Stage) -> list[str]:
        scratch = self.preset.get("scratch", []) if point.mask_ratio is None else []
        given = [*self.preset["common"], *self.preset[stage.objective], *scratch, *self.extra, *point.overrides]
        if stage.label_set is None:
            length = [f"steps={self.steps[point]}"] if self.steps[point] else []
            return [f"data.shards={self.shards}", "evaluation.every=null", *given, *length]
        labels = [
            f"data.subset={self.num_labels or 'null'}",
            f"data.subset_seed={stage.label_set}",
            f"evaluation.shards={self.validation}",  # classes that do not fit are said before hours are spent
            "evaluation.every=1000000000",
        ]
        return [f"task={stage.objective}", f"data.shards={self.shards}", *labels, *given]

    def config(self, point: Point, stage: Stage) -> TrainConfig:
        return parse(self.overrides(point, stage))

    @torch.no_grad()
    def reconstruction(self, run: Path) -> Row:
        """Errors of moving and of still tokens under random masks, and what an adaptive sampler looks at."""
        state_dict, config, _ = pretrained.load(run)
        stride = self.config(self.points[0], PRETRAIN).data.frame_stride
        clips = list(read_clips([Path(self.validation)], config.num_frames, config.image_size, stride, NUM_CLIPS))
        trained = AdaMAE(config).eval()
        trained.load_state_dict(state_dict)
        model = trained.remasked(masking="random")
        moving, still = [], []
        for place, clip in enumerate(clips):
            output = model(clip.frames[None], seed=0, offset=place)
            is_moving = motion_report.brightness_change(clip, config).is_moving[output.masked_ids[0]]
            moving.append(output.loss_per_token[0][is_moving])
            still.append(output.loss_per_token[0][~is_moving])
        row: Row = {"error_moving": torch.cat(moving).mean().item(), "error_still": torch.cat(still).mean().item()}
        if config.masking == "adaptive":
            report = motion_report.measure(trained, clips)
            row |= {name: report[name] for name in ("correlation", "moving_share_of_visible", "moving_share_of_all")}
        return row


def grid(strategies: list[str] | None, ratios: list[float] | None) -> list[tuple[str, float | None]]:
    """Every strategy at every ratio, but training from scratch once."""
    strategies, ratios = strategies or [], ratios or []
    if any(strategy != SCRATCH for strategy in strategies) != bool(ratios):
        raise InputError("give --ratios with --strategies that mask (not for scratch alone), or neither")
    pairs = [(s, ratio) for s in strategies for ratio in ([None] if s == SCRATCH else ratios)]
    return list(dict.fromkeys(pairs))


def places(count: int) -> SimpleQueue[dict[str, str]]:
    """The environments of as many points side by side: each has its share of the cores, and a GPU if there are any."""
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    gpus = [str(place) for place in range(count)]
    if torch.cuda.device_count() and os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")  # of these, not of all that the machine has
    found: SimpleQueue[dict[str, str]] = SimpleQueue()
    for place in range(count):
        found.put({"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": gpus[place]})
    return found


def steps_of_equal_time(
    configs: dict[Point, TrainConfig], device: torch.device, folder: Path, about: dict[str, Any]
) -> dict[Point, int]:
    """Pre-training steps that take as long as the first point's do, by the time of a step on a clip of noise.

    The times stay in the folder's step_times.json: a study that is started again gives its points the steps they had.
    """
    rows = earlier_rows(folder / "step_times.json", about, {})
    here = {name: about[name] for name in MADE_BY}
    times: dict[Pair, float] = {
        (row["strategy"], row["mask_ratio"]): row["median_ms"] for row in rows if row["device"] == here["device"]
    }
    for point, config in configs.items():
        if point.pair not in times:
            step = PretrainingStep(AdaMAE(config.model).to(device))
            clip = noise_clip(config.model, config.batch_size, device)
            timing = time_calls(lambda: step(clip), device, warmup=3, repetitions=10)  # noqa: B023
            times[point.pair] = timing.median_ms
            rows.append({"strategy": point.strategy, "mask_ratio": point.mask_ratio} | asdict(timing) | here)
            del step, clip
            torch.cuda.empty_cache()  # the points are trained by other processes, which want this memory
    write_results(folder, "step_times", rows, about, ["Of a pre-training step, on a clip of noise."])
    budgets = ((config.steps or 0) * times[point.pair] for point, config in configs.items())
    budget = next(budgets, 0)  # the first point's
    return {point: max(1, round(budget / times[point.pair])) for point in configs}


def draw_synthetic_motion(folder: Path, drawn: str, num_videos: int) -> tuple[str, str]:
    """Labelled shards for training and, a fifth as many, for validation; drawn once."""
    said = folder / "data" / "options.txt"
    if said.is_file() and said.read_text(encoding="utf-8") != drawn:
        raise InputError(f"the videos in {folder}/data were drawn with other options: choose another --output")
    said.parent.mkdir(parents=True, exist_ok=True)
    write_text(said, drawn)
    shards = []
    for name, count, seed in (("train", num_videos, 0), ("validation", max(1, num_videos // 5), 1)):
        videos, output = folder / "data" / f"{name}_videos", folder / "data" / name
        if not (output / "dataset.json").is_file():
            draw = ["synthetic_motion.py", videos, *drawn.split(), "--num-videos", count, "--seed", seed]
            make = ["make_shards.py", videos, output, "--frame-stride", 1]
            for script, *given in (draw, make):
                command = [sys.executable, ROOT / "shard_tools" / str(script), *given]
                subprocess.run([str(part) for part in command], check=True)
        shards.append(str(output))
    return shards[0], shards[1]


def time_spent(run: Path) -> Row:
    lines = logged(run)
    before = [0, *(line["step"] for line in lines)]
    seconds = sum(line["step_time_ms"] / 1e3 * (line["step"] - step) for line, step in zip(lines, before, strict=False))
    return {"pretrain_steps": lines[-1]["step"], "pretrain_seconds": round(seconds, 1)}


def logged(run: Path) -> list[dict[str, Any]]:
    return list(read_rows(run / "metrics.jsonl"))


def row_names(row: Row, point: Point) -> bool:
    return all(row[name] == value for name, value in asdict(point).items())
