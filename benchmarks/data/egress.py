"""How often a dataset is downloaded in an epoch, over the number of nodes and of lanes, by the plan that runs use.

    python benchmarks/data/egress.py [--shards 3907] [--lanes 1 100 400] [--nodes 1 4 16 100] [--output FOLDER]

Shards are made up; no byte moves. Every node asks for the shards of its clips, in their order, and keeps the last ones
that it has used; a shard that it does not have is a download.
"""

import argparse
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import torch

from benchmarks.harness import Row, default_output, machine, require, side_by_side, write_results
from common.atomic_io import atomic_write
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.planning.order import Order
from pipeline.planning.split import passes
from pipeline.shards.dataset import ShardOf

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PER_SHARD = 256
GPUS = 8  # of a node
GLOBAL_BATCH = 6400
KEPT = 500  # shards that a node keeps: 50 GiB (data.cache_gib) of 100 MiB each
NOTE = (
    f"Shards of {PER_SHARD} clips, data.shuffle_shards={DataConfig().shuffle_shards}, {GLOBAL_BATCH} clips a step,"
    f" {GPUS} processes a node, whose cache keeps {KEPT} shards. downloads: of all nodes in the first epoch, in"
    " datasets; most: of one node, in shares of the dataset."
)


def main() -> None:
    options = parse(sys.argv[1:])
    cases = [(options.shards, nodes, lanes, rounds) for lanes in options.lanes for nodes in options.nodes
             for rounds in ((1, 2) if nodes == max(options.nodes) else (1,))]  # fmt: skip
    rows = list(side_by_side(egress, cases))
    output = options.output or default_output(torch.device("cpu"))
    write_results(output, "egress", rows, machine(torch.device("cpu"), ("numpy",)), [NOTE])
    draw(rows, output / "egress.png")
    print((output / "egress.md").read_text(encoding="utf-8"))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=3907, help=f"of {PER_SHARD} clips; default 3907, a million clips")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 100, 400], help="data.canonical_nodes; default 1 …")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 100], help="default 1 4 16 100")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if min(options.shards, *options.lanes, *options.nodes) < 1:
        raise InputError("--shards, --lanes and --nodes: give whole numbers of at least 1")
    return options


def egress(case: tuple[int, int, int, int]) -> Row:
    """Downloads of an epoch. `rounds`: forward passes that each process takes its clips of a step in."""
    num_shards, nodes, lanes, rounds = case
    dataset = made_up(num_shards)
    order = Order(dataset, DataConfig(canonical_nodes=lanes), 0, step=GLOBAL_BATCH, served=lanes)
    node_of = nodes_of_places(nodes, rounds)
    caches = [Kept() for _ in range(nodes)]
    seen = np.zeros(order.per_epoch, bool)
    for draw in range(order.per_epoch):
        sample = order.sample(draw)
        seen[sample] = True
        caches[node_of[draw % GLOBAL_BATCH]].read(sample // PER_SHARD)
    share = float(seen.mean())
    require("an epoch shows all but what lanes are apart by", share > 0.98, f"{share:.3f} of the videos")
    downloads = [cache.downloads for cache in caches]
    return {
        "lanes": lanes, "nodes": nodes, "passes": rounds, "shards": num_shards,
        "downloads": sum(downloads) / num_shards, "most": max(downloads) / num_shards,
    }  # fmt: skip


def made_up(num_shards: int) -> Any:
    """What Order needs of a dataset."""
    counts = np.full(num_shards, PER_SHARD)
    shard_of = ShardOf(np.cumsum(counts) - counts, int(counts.sum()))
    return SimpleNamespace(shard_of=shard_of, part_of=np.zeros(num_shards, np.int64))


def nodes_of_places(nodes: int, rounds: int) -> list[int]:
    """The node that takes each clip of a step."""
    found = np.zeros(GLOBAL_BATCH, np.int64)
    for rank in range(nodes * GPUS):
        most = -(-GLOBAL_BATCH // (nodes * GPUS * rounds))
        for part in passes(GLOBAL_BATCH, most, 1, nodes * GPUS, rank):
            found[part.start : part.stop] = rank // GPUS
    return found.tolist()


class Kept:
    """The shards that a node has."""

    def __init__(self) -> None:
        self.downloads = 0
        self._shards: OrderedDict[int, None] = OrderedDict()

    def read(self, shard: int) -> None:
        if shard in self._shards:
            self._shards.move_to_end(shard)
            return
        self.downloads += 1
        self._shards[shard] = None
        if len(self._shards) > KEPT:
            self._shards.popitem(last=False)


def draw(rows: list[Row], path: Path) -> None:
    """Downloads over nodes, a line for every number of lanes, written as PNG."""
    figure, axis = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    for lanes in dict.fromkeys(row["lanes"] for row in rows):
        chosen = [row for row in rows if row["lanes"] == lanes and row["passes"] == 1]
        axis.loglog(
            [row["nodes"] for row in chosen], [row["downloads"] for row in chosen], "o-", label=f"{lanes} lanes"
        )
    axis.set(xlabel="nodes", ylabel="datasets downloaded an epoch")
    axis.grid(alpha=0.3)
    axis.legend()
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    run_command(main)
