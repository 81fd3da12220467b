"""What the input pipeline lets through: training from shards against training from clips that the device already has.

    python benchmarks/end_to_end.py VIDEOS [--encodes h264 mjpeg] [--size base] [--batch-size N] [--output FOLDER]

VIDEOS is a folder; shards are made of it with every encode (kept in --work for the next time). Both take `train.py`'s
own step; one gets its batches from the loader, the other the same noise again and again. Every contender gets a process
of its own in every round, and rounds alternate between them.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import common.openmp  # noqa: F401

import torch
from matplotlib.figure import Figure

from benchmarks.harness import (
    Row,
    describe_machine,
    in_fresh_process,
    print_table,
    require,
    results_folder,
    write_results,
)
from benchmarks.pipeline_throughput import PACKAGES, check_clips, cpu_seconds, prepare_shards, shards_folder
from benchmarks.step import noise_clip
from common.atomic_io import atomic_write
from common.devices import choose_device, choose_precision, explain_out_of_memory
from common.errors import InputError, run_command
from common.progress import progress_bar
from model.config import SIZES, ModelConfig
from pipeline.config import DataConfig
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.shards.dataset import ShardDataset
from train import train_step
from training.config import TrainConfig
from training.distributed import Distributed
from training.logger import peak_memory_gib
from training.optimizer import make_optimizer
from training.parallelize import parallelize
from training.tasks.pretraining import Pretraining

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Source:
    """Where a contender's batches come from."""

    encode: str | None  # of the shards; None: noise that is there already
    repeats: int = 1  # clips cut from one decode

    @property
    def name(self) -> str:
        if self.encode is None:
            return "synthetic"
        return f"{self.encode} shards" + (f", {self.repeats} clips a decode" if self.repeats > 1 else "")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    work = options.work or shards_folder(options.videos)
    for encode in options.encodes:
        prepare_shards(options.videos, work / encode, encode)
    batch_size = options.batch_size or (64 if on_gpu else 2)
    steps = options.steps or (100 if on_gpu else 4)
    sources = [Source(None), *(Source(encode, repeats) for encode in options.encodes for repeats in (1, 2))]
    about = describe_machine(device, PACKAGES)
    about |= {"model": options.size, "batch_size": batch_size, "compiled": options.compile}
    about["precision"] = choose_precision(device, TrainConfig.precision)
    about |= {"steps_a_round": steps, "videos": len(ShardDataset.open(work / options.encodes[0]).samples)}
    folder = options.output or results_folder(device)
    found: dict[Source, list[Row]] = {source: [] for source in sources}
    for _ in progress_bar(range(options.rounds), unit="round"):
        for source in sources:
            config = config_of(source, work, options.size, batch_size, options.compile)
            found[source].append(in_fresh_process(measure, source, config, steps))
        report(found, about, folder)


def report(found: dict[Source, list[Row]], about: dict[str, Any], folder: Path) -> None:
    """After each round: what is cut off has what it found."""
    rows = [summary(source, measured) for source, measured in found.items()]
    for row in rows:
        row["share_of_synthetic"] = round(row["clips_per_second"] / rows[0]["clips_per_second"], 3)
    about = about | {"rounds": len(found[Source(None)])}
    write_results(folder, "end_to_end", rows, about, NOTES)
    print_table(rows)
    draw(rows, f"{about['model']}, {about['batch_size']} clips a step, {about['device']}", folder / "end_to_end.png")


NOTES = [
    f"A round: {WARM_UP_STEPS} steps of warm-up, then steps_a_round by the clock on the wall, the device waited for at"
    " both ends. clips_per_second: the median round's; lower and upper: the slowest's and the fastest's.",
    "data_wait_share: of the time, how much the loop stood waiting for a batch. cores_busy: by this process.",
]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path, help="folder of videos")
    parser.add_argument("--encodes", nargs="+", default=["h264", "mjpeg"], help="of make_shards.py")
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--batch-size", type=int, help="default: 64 on a GPU, 2 on a CPU")
    parser.add_argument("--steps", type=int, help="timed, in each round; default: 100 on a GPU, 4 on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--work", type=Path, help="folder that keeps the shards")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu> or .../cpu")
    options = parser.parse_args(arguments)
    if not options.videos.is_dir():
        raise InputError(f"{options.videos} is no folder of videos")
    if min(number for number in (options.batch_size, options.steps, options.rounds) if number is not None) < 1:
        raise InputError("--batch-size, --steps and --rounds must be whole numbers of at least 1")
    return options


def config_of(source: Source, work: Path, size: str, batch_size: int, compiled: bool) -> TrainConfig:
    """A run of the paper's pre-training over these shards; of the synthetic contender, `shards` is only a name."""
    data = DataConfig(shards=str(work / (source.encode or "none")), repeats=source.repeats)
    model = ModelConfig(size=size)  # type: ignore[arg-type]
    return TrainConfig(model=model, data=data, batch_size=batch_size, compile=compiled)


@explain_out_of_memory("lower --batch-size")
def measure(source: Source, config: TrainConfig, steps: int) -> Row:
    """One round of one contender; called in a process of its own."""
    dist = Distributed()
    task, device = Pretraining(config, None, dist), dist.device
    model = parallelize(task, config, dist, config.batch_size)
    optimizer = make_optimizer(task.parameter_groups(), config.optimizer)
    with batches_of(source, config, device) as (batches, loader):
        for _ in range(WARM_UP_STEPS):
            train_step(model, task, islice(batches, 1), optimizer, 1e-4, config)
        waited, cpu, started = waited_for(loader), cpu_seconds(), now(device)
        for _ in range(steps):
            scalars = train_step(model, task, islice(batches, 1), optimizer, 1e-4, config)
        seconds = now(device) - started
        waited, cpu = waited_for(loader) - waited, cpu_seconds() - cpu
    loss = scalars["loss"].item()
    require("the loss is a number", loss == loss, f"{source.name}: {loss}")
    return {
        "clips_per_second": steps * config.batch_size / seconds,
        "data_wait_share": waited / seconds,
        "cores_busy": cpu / seconds,
        "peak_memory_gib": peak_memory_gib(device),
    }


@contextmanager
def batches_of(
    source: Source, config: TrainConfig, device: torch.device
) -> Iterator[tuple[Iterator[Batch], ClipLoader | None]]:
    """Endless batches, and the loader that they come from, if any; its first batch is checked against the plan."""
    size = config.batch_size
    if source.encode is None:
        clip = noise_clip(config.model, size, device)
        labels = torch.full((size,), -1, dtype=torch.int64, device=device)
        yield repeat(Batch(clip, labels, [""] * size, list(range(size)))), None
        return
    dataset, shape = ShardDataset.open(config.data.shards), config.model
    plan = TrainingPlan(
        dataset, config.data, num_frames=shape.num_frames, image_size=shape.image_size, seed=0, batch_size=size
    )
    with ClipLoader(dataset, plan, device, config.data, None) as loader:
        batches = loader.batches(0)
        check_clips(dataset, plan, next(batches).clip.cpu().numpy())
        yield batches, loader


def waited_for(loader: ClipLoader | None) -> float:
    return loader.counters["wait_seconds"] if loader else 0.0


def now(device: torch.device) -> float:
    """Seconds, when the device has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def summary(source: Source, rounds: list[Row]) -> Row:
    speeds = [measured["clips_per_second"] for measured in rounds]
    row: Row = {"batches": source.name, "clips_per_second": statistics.median(speeds)}
    row |= {"lower": min(speeds), "upper": max(speeds)}
    for name in ("data_wait_share", "cores_busy"):
        row[name] = statistics.median(measured[name] for measured in rounds)
    return {**row, "peak_memory_gib": max(measured["peak_memory_gib"] for measured in rounds)}


def draw(rows: list[Row], title: str, path: Path) -> None:
    """A bar a contender, its share of the first one's speed, and the slowest and the fastest round, as PNG."""
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.5), layout="constrained")
    axes = figure.subplots()
    speeds = [row["clips_per_second"] for row in rows]
    spread = [
        [row["clips_per_second"] - row["lower"] for row in rows],
        [row["upper"] - row["clips_per_second"] for row in rows],
    ]
    colors = ["#85929e", *["#c0392b"] * (len(rows) - 1)]
    bars = axes.barh([row["batches"] for row in rows], speeds, xerr=spread, color=colors, ecolor="#444444")
    axes.bar_label(
        bars, [f"{row['clips_per_second']:.3g} ({row['share_of_synthetic']:.0%})" for row in rows], padding=8
    )
    axes.axvline(0.9 * speeds[0], color="black", linewidth=0.8, linestyle=":")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set(xlabel="clips trained on a second; dotted: 90 % of synthetic", title=f"Training end to end: {title}")
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=120)


if __name__ == "__main__":
    run_command(main)
