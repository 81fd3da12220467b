"""Measure training from shards beside training on a batch that is already on the device.

    python benchmarks/end_to_end.py VIDEOS [--encodes h264 mjpeg] [--size base] [--batch-size N] [--output FOLDER]

VIDEOS is a folder; shards are made of it with every encode (kept in --work). Both take train.py's own step; one reads
batches from the loader, the other reuses one random batch. Each has a process of its own in every round, and rounds
alternate between them.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path

import torch

from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import Report, Row, in_fresh_process, noise_clip, print_table, require
from benchmarks.pipeline_throughput import PACKAGES, cpu_seconds, open_loader, prepare_shards
from common.devices import choose_device, choose_precision, explain_out_of_memory
from common.errors import run_command
from common.progress import progress_bar
from model.config import SIZES, ModelConfig
from pipeline.config import DataConfig
from pipeline.loader import Batch, ClipLoader
from pipeline.shards.dataset import ShardDataset
from train import train_step
from training.config import TrainConfig
from training.distributed import Distributed
from training.logger import peak_memory_gib
from training.optimizer import make_optimizer
from training.parallelize import parallelize
from training.tasks.pretraining import Pretraining

WARM_UP_STEPS = 3
NOTES = [
    f"A round: {WARM_UP_STEPS} warm-up steps, then steps_per_round by the wall clock, synchronized with the device at"
    " both ends. clips_per_second: of the median round; lower and upper: of the slowest and the fastest.",
    "data_stall: fraction of the time spent waiting for a batch. cores_busy: by this process.",
]


@dataclass(frozen=True)
class Source:
    """Where batches come from."""

    encode: str | None  # of the shards; None: one random batch
    repeats: int = 1  # clips per decoded video

    @property
    def name(self) -> str:
        if self.encode is None:
            return "cached batch"
        return f"{self.encode} shards" + (f", {self.repeats} clips per decoded video" if self.repeats > 1 else "")


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_videos()
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--steps", type=at_least(1), help="timed steps per round; default: 100 on a GPU, 4 on a CPU")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    options = parser.parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    work = prepare_shards(options.videos, options.work, options.encodes)
    batch_size = options.batch_size or (64 if on_gpu else 2)
    steps = options.steps or (100 if on_gpu else 4)
    sources = [Source(None), *(Source(encode, repeats) for encode in options.encodes for repeats in (1, 2))]
    report = Report(
        "end_to_end", options.output, device, NOTES, PACKAGES, model=options.size, batch_size=batch_size,
        compiled=options.compile, precision=choose_precision(device, TrainConfig.precision), steps_per_round=steps,
        videos=len(ShardDataset.open(work / options.encodes[0]).samples),
    )  # fmt: skip
    found: dict[Source, list[Row]] = {source: [] for source in sources}
    for number in progress_bar(range(options.rounds), unit="round"):
        for source in sources:
            config = make_config(source, work, options.size, batch_size, options.compile)
            found[source].append(in_fresh_process(measure, source, config, steps))
            rows = [summarize(source, measured) for source, measured in found.items() if measured]
            for row in rows:
                row["relative_to_cached"] = round(row["clips_per_second"] / rows[0]["clips_per_second"], 3)
            report.about["rounds"] = number + 1
            report.write(rows)
        print_table(rows)


def make_config(source: Source, work: Path, size: str, batch_size: int, compiled: bool) -> TrainConfig:
    """Configure the paper's pre-training over these shards; for the cached batch, `shards` is only a name."""
    data = DataConfig(shards=str(work / (source.encode or "none")), repeats=source.repeats)
    model = ModelConfig(size=size)  # type: ignore[arg-type]
    return TrainConfig(model=model, data=data, batch_size=batch_size, compile=compiled)


@explain_out_of_memory("lower --batch-size")
def measure(source: Source, config: TrainConfig, steps: int) -> Row:
    """Measure one round, in a process of its own."""
    dist = Distributed()
    task, device = Pretraining(config, None, dist), dist.device
    optimizer = make_optimizer(task.parameter_groups(), config.optimizer)
    model = parallelize(task, optimizer, config, dist, config.batch_size)
    with open_batches(source, config, device) as (batches, loader):
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
        "data_stall": waited / seconds,
        "cores_busy": cpu / seconds,
        "peak_memory_gib": peak_memory_gib(device),
    }


@contextmanager
def open_batches(
    source: Source, config: TrainConfig, device: torch.device
) -> Iterator[tuple[Iterator[Batch], ClipLoader | None]]:
    """Open endless batches, and the loader that they come from, if any."""
    size = config.batch_size
    if source.encode is None:
        clip = noise_clip(config.model, size, device)
        labels = torch.full((size,), -1, dtype=torch.int64, device=device)
        yield repeat(Batch(clip, labels, [""] * size, list(range(size)))), None
        return
    model, folder = config.model, Path(str(config.data.shards))
    with open_loader(folder, config.data, size, model.num_frames, model.frame_size[0], device) as loader:
        yield loader.batches(0), loader


def waited_for(loader: ClipLoader | None) -> float:
    return loader.counters["wait_seconds"] if loader else 0.0


def now(device: torch.device) -> float:
    """Return the time in seconds after all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def summarize(source: Source, rounds: list[Row]) -> Row:
    speeds = [measured["clips_per_second"] for measured in rounds]
    row: Row = {"batches": source.name, "clips_per_second": statistics.median(speeds)}
    row |= {"lower": min(speeds), "upper": max(speeds)}
    for name in ("data_stall", "cores_busy"):
        row[name] = statistics.median(measured[name] for measured in rounds)
    return {**row, "peak_memory_gib": max(measured["peak_memory_gib"] for measured in rounds)}


if __name__ == "__main__":
    run_command(main)
