"""How well a stream of clips is shuffled, beside a full shuffle of the dataset and WebDataset's buffers.

    python benchmarks/data/shuffle_quality.py [--shards 2000] [--step 1024] [--output FOLDER]

Shards are made up; no byte moves. Every stream is one epoch of it. WebDataset's own filters shuffle shards and buffer
samples, its workers taking turns a sample at a time.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from webdataset.filters import shuffle

from benchmarks.data.egress import PER_SHARD, made_up
from benchmarks.harness import Row, default_output, machine, require, write_results
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.planning.order import Order

CLASSES = 400
NOTE = (
    f"Shards of {PER_SHARD} clips of {CLASSES} classes. Of a full shuffle all columns but `shards` are 1, up to chance."
    " same_shard: pairs of clips of a step that are of one shard; neighbours: clips followed by one of their own; both"
    " in shares of what a full shuffle has. shards: in a step. chi_square: of the classes in a step against the"
    " dataset's, over its degrees of freedom, where the videos were dealt out to the shards at random, as by"
    " make_shards; sorted: the same where shards were filled class by class."
)
Stream = Int[np.ndarray, " clips"]


def main() -> None:
    options = parse(sys.argv[1:])
    rows = [{"order": name, **quality(stream, options.step)} for name, stream in streams(options.shards, options.step)]
    output = options.output or default_output(torch.device("cpu"))
    write_results(output, "shuffle_quality", rows, machine(torch.device("cpu"), ("numpy", "webdataset")), [NOTE])
    print((output / "shuffle_quality.md").read_text(encoding="utf-8"))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2000, help=f"of {PER_SHARD} clips; default 2000")
    parser.add_argument("--step", type=int, default=1024, help="clips; default 1024")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if options.shards < 2 or not 2 <= options.step <= options.shards * PER_SHARD:
        raise InputError("--shards and --step: give at least 2 shards, and a step of 2 clips to an epoch")
    return options


def streams(num_shards: int, step: int) -> Iterator[tuple[str, Stream]]:
    """Every order's first epoch."""
    yield "full shuffle", np.random.default_rng(0).permutation(num_shards * PER_SHARD)
    for config in (DataConfig(), DataConfig(shuffle_shards=64), DataConfig(canonical_nodes=16)):
        order = Order(made_up(num_shards), config, 0, step=step, served=config.canonical_nodes)
        lanes = f", {config.canonical_nodes} lanes" if config.canonical_nodes > 1 else ""
        found = np.array([order.sample(draw) for draw in range(order.per_epoch)])
        yield f"ours, {config.shuffle_shards} shards{lanes}", found
    for size, workers in ((1_000, 1), (5_000, 1), (1_000, 16)):
        name = f"WebDataset, buffer {size}" + (f", {workers} workers" if workers > 1 else "")
        yield name, buffered(num_shards, size, workers)


def buffered(num_shards: int, size: int, workers: int) -> Stream:
    shards = list(range(num_shards))
    random.Random(0).shuffle(shards)

    def samples(worker: int) -> Iterator[int]:
        ordered = chain.from_iterable(range(s * PER_SHARD, (s + 1) * PER_SHARD) for s in shards[worker::workers])
        return iter(shuffle(size, initial=size, seed=worker)(ordered))

    taken = chain.from_iterable(zip_longest(*map(samples, range(workers))))
    return np.array([sample for sample in taken if sample is not None])


def quality(stream: Stream, step: int) -> Row:
    """Figures of one epoch."""
    size = len(stream)
    shards = stream // PER_SHARD
    require("nothing comes twice", len(np.unique(stream)) == size, f"{len(np.unique(stream))} of {size}")
    by_chance = (PER_SHARD - 1) / (size - 1)
    steps = shards[: size // step * step].reshape(-1, step)
    counts = [np.unique(shown, return_counts=True)[1] for shown in steps]
    pairs = np.mean([(count * (count - 1)).sum() for count in counts]) / (step * (step - 1))
    dealt = np.random.default_rng(1).permutation(size) * CLASSES // size
    return {
        "same_shard": pairs / by_chance,
        "shards": float(np.mean([len(count) for count in counts])),
        "neighbours": float((shards[1:] == shards[:-1]).mean()) / by_chance,
        "chi_square": chi_square(dealt[stream], step),
        "sorted": chi_square(stream * CLASSES // size, step),
    }


def chi_square(classes: Stream, step: int) -> float:
    """Mean over the steps, over its degrees of freedom: 1 where every clip's class is drawn by itself."""
    shares = np.bincount(classes, minlength=CLASSES) / len(classes)
    steps = classes[: len(classes) // step * step].reshape(-1, step)
    counts = np.stack([np.bincount(shown, minlength=CLASSES) for shown in steps])
    return float((((counts - step * shares) ** 2) / (step * shares)).sum(axis=1).mean() / (CLASSES - 1))


if __name__ == "__main__":
    run_command(main)
