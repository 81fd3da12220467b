"""Compare cache policies of a node by the fraction of shard visits that the cache serves, over the size of the cache.

    python benchmarks/node_cache.py [--shards 400] [--nodes 4] [--output FOLDER]

Simulated on the sample order of a run, without files. keep_first is what pipeline/reading/cache.py does; optimal is
Belady's eviction, which knows all later visits; lru evicts what was used least recently; unbound keeps what came first
where shards change their node in every epoch.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import Report, Row, print_table, require
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.planning.sample_order import SampleOrder
from pipeline.shards.dataset import ShardOf

PER_SHARD, STEP, EPOCHS = 16, 64, 12
FRACTIONS = (0.25, 0.5, 0.75, 0.9, 1.0)
NOTE = (
    f"Hit rates of one node from the second of {EPOCHS} epochs on; cache: fraction of the node's shards that fits;"
    f" shards of {PER_SHARD} clips, {STEP} clips per step, shuffle_shards 16."
)


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__, "benchmarks/results/cpu")
    parser.add_argument("--shards", type=at_least(20), default=400, help="per node")
    parser.add_argument("--nodes", type=at_least(1), default=4, help="canonical nodes")
    options = parser.parse_args(arguments)
    if STEP % options.nodes:
        raise InputError(f"--nodes is {options.nodes}: give a divisor of {STEP}")
    rows = simulate(options.shards, options.nodes)
    Report("node_cache", options.output, torch.device("cpu"), [NOTE], ("numpy",)).write(rows)
    print_table(rows)


def simulate(num_shards: int, nodes: int) -> list[Row]:
    bound = list_visits(num_shards, nodes)
    random = np.random.default_rng(0)
    unbound = [random.permutation(num_shards * nodes)[:num_shards].tolist() for _ in range(EPOCHS)]
    rows: list[Row] = []
    for fraction in FRACTIONS:
        size = round(fraction * num_shards)
        rates = {name: hit_rate(bound, size, rank) for name, rank in RANKS.items()}
        require("keep-first serves what fits", abs(rates["keep_first"] - fraction) < 0.01, str(rates))
        rows.append({"cache": fraction, **rates, "unbound": hit_rate(unbound, size, rank_by_first)})
    return rows


def list_visits(num_shards: int, nodes: int) -> list[list[int]]:
    """The shards of node 0 in the order in which it comes to them, by epoch."""
    counts = np.full(num_shards * nodes, PER_SHARD)
    dataset: Any = SimpleNamespace(
        shard_of=ShardOf(np.cumsum(counts) - counts, int(counts.sum())),
        part_of=np.zeros(len(counts), np.int64),
        parts=[],
    )
    order = SampleOrder(dataset, DataConfig(canonical_nodes=nodes), 0, STEP, 1)
    share = STEP // nodes
    draws = [step * STEP + place for step in range(EPOCHS * num_shards * PER_SHARD // share) for place in range(share)]
    shards = [order.sample(draw) // PER_SHARD for draw in draws]
    per_epoch = num_shards * PER_SHARD
    return [list(dict.fromkeys(shards[start : start + per_epoch])) for start in range(0, len(shards), per_epoch)]


def hit_rate(visits: list[list[int]], size: int, rank: Callable[[list[int]], Sequence[float]]) -> float:
    """Simulate a cache of `size` shards that evicts the one whose last visit has the highest rank."""
    stream = [shard for epoch in visits for shard in epoch]
    kept: dict[int, float] = {}
    hits = []
    for shard, number in zip(stream, rank(stream), strict=True):
        hits.append(shard in kept)
        kept[shard] = number
        if len(kept) > size:
            del kept[max(kept, key=lambda other: kept[other])]
    counted = hits[len(visits[0]) :]
    return sum(counted) / len(counted)


def rank_by_first(stream: list[int]) -> list[int]:
    """Rank visits by the first one of their shard: what came last is not kept."""
    first: dict[int, int] = {}
    return [first.setdefault(shard, place) for place, shard in enumerate(stream)]


def rank_by_next(stream: list[int]) -> list[float]:
    """Rank visits by the next one of their shard."""
    later: dict[int, float] = {}
    following = [math.inf] * len(stream)
    for place in range(len(stream) - 1, -1, -1):
        following[place] = later.get(stream[place], math.inf)
        later[stream[place]] = place
    return following


def rank_by_age(stream: list[int]) -> Sequence[float]:
    return range(0, -len(stream), -1)


RANKS: dict[str, Callable[[list[int]], Sequence[float]]] = {
    "keep_first": rank_by_first,
    "optimal": rank_by_next,
    "lru": rank_by_age,
}


if __name__ == "__main__":
    run_command(main)
