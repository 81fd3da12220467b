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
from torch import Tensor

from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import Report, Row, in_fresh_process, noise_clip, print_table, require
from benchmarks.pipeline_throughput import cpu_seconds, open_loader, prepare_shards
from benchmarks.step import PretrainingStep
from common.devices import choose_device, choose_precision, explain_out_of_memory
from common.errors import run_command
from common.progress import progress_bar
from model.config import SIZES, ModelConfig
from pipeline.config import DataConfig
from pipeline.loader import ClipLoader
from pipeline.shards.dataset import ShardDataset
from training.logger import peak_memory_gib

WARM_UP_STEPS = 3
NOTES = [
    f"A round: {WARM_UP_STEPS} warm-up steps, then steps_per_round by the wall clock, synchronized with the device at"
    " both ends. clips_per_second: of the median round; lower and upper: of the slowest and the fastest.",
    "data_stall: fraction of the time spent waiting for a batch. cores_busy: by this process and its workers.",
]


@dataclass(frozen=True)
class Source:
    """Where batches come from."""

    shards: Path | None  # in a folder named for their encoding; None: one random batch
    repeats: int = 1  # clips per decoded video

    @property
    def name(self) -> str:
        if self.shards is None:
            return "cached batch"
        return f"{self.shards.name} shards" + (f", {self.repeats} clips per decoded video" if self.repeats > 1 else "")


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
    batch_size, steps = options.batch_size or (64 if on_gpu else 2), options.steps or (100 if on_gpu else 4)
    sources = [Source(None), *(Source(work / encode, repeats) for encode in options.encodes for repeats in (1, 2))]
    report = Report(
        "end_to_end", options.output, device, NOTES, model=options.size, batch_size=batch_size,
        compiled=options.compile, precision=choose_precision(device, "bf16"), steps_per_round=steps,
        videos=len(ShardDataset.open(work / options.encodes[0]).samples),
    )  # fmt: skip
    found: dict[Source, list[Row]] = {source: [] for source in sources}
    for number in progress_bar(range(options.rounds), unit="round"):
        for source, rounds in found.items():
            rounds.append(in_fresh_process(measure, source, options.size, batch_size, steps, options.compile))
            rows = [summarize(source, measured) for source, measured in found.items() if measured]
            for row in rows:
                row["relative_to_cached"] = round(row["clips_per_second"] / rows[0]["clips_per_second"], 3)
            report.about["rounds"] = number + 1
            report.write(rows)
    print_table(rows)


@explain_out_of_memory("lower --batch-size")
def measure(source: Source, size: str, batch_size: int, steps: int, compiled: bool) -> Row:
    """Measure one round of the paper's pre-training, in a process of its own."""
    config, device = ModelConfig(size=size), choose_device()  # type: ignore[arg-type]
    step = PretrainingStep.of(config, device, compiled)
    with open_clips(source, config, batch_size, device) as (clips, loader):
        for clip in islice(clips, WARM_UP_STEPS):
            step(clip)
        waited, cpu, started = waited_for(loader), cpu_seconds(), now(device)
        for clip in islice(clips, steps):
            scalars = step(clip)
        seconds = now(device) - started
        waited, cpu = waited_for(loader) - waited, cpu_seconds() - cpu
    loss = scalars["loss"].item()
    require("the loss is a number", loss == loss, f"{source.name}: {loss}")
    return {
        "clips_per_second": steps * batch_size / seconds,
        "data_stall": waited / seconds,
        "cores_busy": cpu / seconds,
        "peak_memory_gib": peak_memory_gib(device),
    }


@contextmanager
def open_clips(
    source: Source, config: ModelConfig, batch_size: int, device: torch.device
) -> Iterator[tuple[Iterator[Tensor], ClipLoader | None]]:
    """Open an endless iterator of clips uint8 [B, T, H, W, C], and the loader that they come from, if any."""
    if source.shards is None:
        yield repeat(noise_clip(config, batch_size, device)), None
        return
    data = DataConfig(repeats=source.repeats)
    shape = config.num_frames, config.frame_size[0]
    with open_loader(source.shards, data, batch_size, *shape, device) as loader:
        yield (batch.clip for batch in loader.batches(0)), loader


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
