"""Measure training from shards beside training on a batch that is already on the device.

    python benchmarks/end_to_end.py VIDEOS [--encodes h264 mjpeg] [--size base] [--batch-size N] \
        [--decoder dali] [--output FOLDER]

VIDEOS is a folder; shards are made of it with every encode (kept in --work). Both take train.py's
own step. One reads batches from the loader, the other reuses one random batch. Each has a process
of its own in every round, and rounds alternate between them. To see what a decoder on the GPU is
worth where cores are few, put `taskset -c 0-3` before the command.
"""

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product, repeat
from pathlib import Path
from statistics import median
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import (
    Report,
    Row,
    in_fresh_process,
    measure_cases,
    print_table,
    require,
)
from adamae.benchmarks.pipeline_throughput import open_loader, prepare_shards
from adamae.benchmarks.step import measure_step
from adamae.common.arguments import between
from adamae.common.cpus import count_cpus
from adamae.common.devices import choose_device, choose_precision, explain_out_of_memory
from adamae.common.errors import run_command
from adamae.model.config import SIZES, ModelConfig
from adamae.pipeline.config import DataConfig, Decoder
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training.timing import PretrainingStep, noise_clip

NOTES = [
    "A round: warm-up steps, then steps_per_round. clips_per_second: of the median round; lower"
    " and upper: of the slowest and the fastest.",
    "data_stall: fraction of the time spent waiting for a batch. cores_busy: by this process and"
    " its workers.",
]


class Source(NamedTuple):
    """Where batches come from."""

    # In a folder named for their encoding; None: one random batch.
    shards: Path | None
    # Clips per decoded video.
    repeats: int = 1
    decoder: Decoder = "pyav"

    @property
    def name(self) -> str:
        if self.shards is None:
            return "cached batch"
        if self.repeats == 1:
            return f"{self.shards.name} shards"
        return f"{self.shards.name} shards, {self.repeats} clips per decoded video"


# The baseline and the bound: no loader lets a step be faster than one whose clips are on the
# device.
CACHED = Source(None)


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_videos(["h264", "mjpeg"])
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument(
        "--steps", type=between(1), help="timed steps per round; default: 100 on a GPU, 4 on a CPU"
    )
    # An odd number, so that the median round is one that was measured.
    parser.add_argument("--rounds", type=between(1), default=3)
    parser.add_argument(
        "--decoder", choices=get_args(Decoder), default="pyav", help="data.decoder of the loader"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    options = parser.parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    work = prepare_shards(options.videos, options.work, options.encodes)
    options.batch_size = options.batch_size or (64 if on_gpu else 2)
    # A step takes 50 ms on an H200 and 2.5 s on 2 CPU cores. A hundred steps are more than a loader
    # can have prefetched, so that its own speed shows.
    options.steps = options.steps or (100 if on_gpu else 4)
    report = Report(
        "end_to_end",
        options.output,
        device,
        NOTES,
        model=options.size,
        batch_size=options.batch_size,
        compiled=options.compile,
        decoder=options.decoder,
        # Fewer than the machine has behind `taskset -c 0-3`.
        cores=count_cpus(),
        precision=choose_precision(device, "bf16"),
        steps_per_round=options.steps,
        videos=len(ShardDataset.open(work / options.encodes[0]).samples),
    )
    sources = [CACHED]
    # Two clips per decoded video share its decoding, for machines with few cores per GPU: 1.4 times
    # the clips/s of h264 shards (docs/results.md).
    for encode, repeats in product(options.encodes, (1, 2)):
        sources.append(Source(work / encode, repeats, options.decoder))
    measure_source = partial(in_fresh_process, measure, options)
    print_table(measure_cases(report, sources, measure_source, make_rows, options.rounds))


@explain_out_of_memory("lower --batch-size")
def measure(options: argparse.Namespace, source: Source) -> Row:
    """Measure one round of the paper's pre-training, in a process of its own."""
    config = ModelConfig(size=options.size)
    device = choose_device()
    step = PretrainingStep.of(config, device, options.compile)
    waits: list[float] = []
    with open_clips(source, config, options.batch_size, device) as clips:

        def step_on_next_clip() -> Tensor:
            # This is the host's wait. The GPU still has queued steps to work on meanwhile, so a
            # wait may cost less than it takes.
            start = time.perf_counter()
            clip = next(clips)
            waits.append(time.perf_counter() - start)
            return step(clip)["loss"]

        measured = measure_step(step_on_next_clip, options.steps, device)
        # Without the waits of the warm-up, which measure_step does not time either.
        waited = sum(waits[-options.steps :])
        # After the timed steps, since reading a loss waits for the GPU, as training does only when
        # it logs.
        loss = step_on_next_clip().item()
    require("the loss is a number", not math.isnan(loss), str(loss))
    seconds = sum(measured["milliseconds"]) / 1e3
    return {
        "clips_per_second": options.steps * options.batch_size / seconds,
        "data_stall": waited / seconds,
        "cores_busy": measured["cpu_seconds"] / seconds,
        "peak_memory_gib": measured["peak_memory_gib"],
    }


@contextmanager
def open_clips(
    source: Source, config: ModelConfig, batch_size: int, device: torch.device
) -> Iterator[Iterator[Tensor]]:
    """Open an endless iterator of clips uint8 [B, T, H, W, C]."""
    if source.shards is None:
        yield repeat(noise_clip(config, batch_size, device))
        return
    data = DataConfig(repeats=source.repeats, decoder=source.decoder)
    with open_loader(source.shards, data, batch_size, device) as loader:
        yield (batch.clip for batch in loader.batches(0))


def make_rows(results: dict[Source, list[Row]]) -> list[Row]:
    """Make a row of medians over rounds for each source; speeds are relative to no loading."""
    rows = []
    for source, rounds in results.items():
        row: Row = {"batches": source.name}
        # A median, since a round that another program disturbed would pull a mean.
        for column in rounds[0]:
            row[column] = median(measured[column] for measured in rounds)
        speeds = [measured["clips_per_second"] for measured in rounds]
        row |= {"lower": min(speeds), "upper": max(speeds), "rounds": len(rounds)}
        if CACHED in results:
            cached = median(measured["clips_per_second"] for measured in results[CACHED])
            row["relative_to_cached"] = round(row["clips_per_second"] / cached, 3)
        rows.append(row)
    return rows


if __name__ == "__main__":
    run_command(main)
