"""What a node's cache costs and saves: a miss over the number of files, and downloads over the size of the cache.

    python benchmarks/data/node_cache.py [--files 100 1000 10000 40000] [--shards 400] [--output FOLDER]

Shards are made up; the ledger, the cache and the order are those of runs. The peers: a miss that looks through the
folder, as each did before there was a ledger, and a cache that drops what was used least recently.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import torch

from benchmarks.harness import Row, Timing, describe_machine, print_table, require, results_folder, write_results
from common.errors import InputError, run_command
from pipeline.config import DataConfig
from pipeline.planning.order import Order
from pipeline.reading.ledger import Ledger
from pipeline.reading.store import Cache
from pipeline.shards.dataset import ShardOf

SIZE = 1000  # bytes of a shard
MISSES = 15
PER_SHARD, STEP, EPOCHS = 16, 64, 6
SHARES = (0.25, 0.5, 0.75, 0.9)
STORE = "memory://bucket/data"
NOTE = (
    f"Shards of {SIZE} bytes. A miss is a download from memory with its two flushes to the disk, an eviction, and what"
    " the ledger takes; walk: the look through the folder alone. downloads: of an epoch after the first, in datasets,"
    f" of one node and {EPOCHS} epochs of shards of {PER_SHARD} clips, {STEP} clips a step."
)


def main() -> None:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        rows = [miss(Path(scratch) / str(count), count) for count in options.files]
        rows += [downloads(Path(scratch) / f"{share}", options.shards, share) for share in SHARES]
    output = options.output or results_folder(torch.device("cpu"))
    write_results(output, "node_cache", rows, describe_machine(torch.device("cpu"), ("numpy", "fsspec")), [NOTE])
    print_table(rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, nargs="+", default=[100, 1000, 10_000, 40_000], help="in the cache")
    parser.add_argument("--shards", type=int, default=400, help="of the dataset whose downloads are counted")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args(arguments)
    if min(options.shards, *options.files) < 1:
        raise InputError("--shards and --files: give whole numbers of at least 1")
    return options


def miss(folder: Path, count: int) -> Row:
    """A full cache of `count` files, then shards that are not in it."""
    cache = Cache(folder, max_gib=count * SIZE / 2**30)
    top = folder / hashlib.sha256(STORE.encode()).hexdigest()[:16]
    for number in range(count):
        copy = top / version_of(number)[:16] / f"shard-{number:06d}.tar"
        copy.parent.mkdir(parents=True)
        copy.write_bytes(bytes(SIZE))
    taken = [fetched(cache, count + number) for number in range(MISSES)]
    started = time.perf_counter()
    left = sum(path.stat().st_size for path in folder.rglob("*.tar"))
    walk = time.perf_counter() - started
    require("the cache keeps to its size", left == count * SIZE, f"{left} bytes")
    timing = Timing.of([1e3 * seconds for seconds in taken[1:]])  # the first one makes the ledger
    return {"what": "a miss", "files": count, "ms": timing.median_ms, "walk_ms": 1e3 * walk}


def fetched(cache: Cache, number: int) -> float:
    """Seconds that a shard takes to come."""
    data = number.to_bytes(SIZE, "big")
    fsspec.filesystem("memory").pipe(f"{STORE}/shard-{number:06d}.tar", data)
    started = time.perf_counter()
    cache.fetch(f"{STORE}/shard-{number:06d}.tar", version=hashlib.sha256(data).hexdigest(), size=SIZE)
    return time.perf_counter() - started


def version_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def downloads(folder: Path, num_shards: int, share: float) -> Row:
    """Of an epoch, with a cache for this share of the dataset."""
    by_turn, by_use = (kept(folder / str(turns), num_shards, share, turns) for turns in (True, False))
    return {"what": "downloads", "cache": share, "downloads": by_turn, "least_recently_used": by_use}


def kept(folder: Path, num_shards: int, share: float, turns: bool) -> float:
    counts = np.full(num_shards, PER_SHARD)
    dataset: Any = SimpleNamespace(
        shard_of=ShardOf(np.cumsum(counts) - counts, int(counts.sum())), part_of=np.zeros(num_shards, np.int64)
    )
    order = Order(dataset, DataConfig(), 0, step=STEP, served=1)
    per_epoch = num_shards * PER_SHARD
    read = [order.sample(draw) // PER_SHARD for draw in range(EPOCHS * per_epoch)]
    last = {(shard, draw // per_epoch): draw for draw, shard in enumerate(read)}
    ledger = Ledger(folder, int(share * num_shards) * SIZE)
    holder, held, came = ledger.holder(), set[int](), 0
    for draw, shard in enumerate(read):
        path = folder / f"{shard}.tar"
        if shard not in held:
            held.add(shard)
            came += draw >= per_epoch and not path.exists()
            ledger.admit(path, SIZE, holder)
            path.touch()
        if last[shard, draw // per_epoch] == draw:
            held.remove(shard)
            step = order.next_use(shard, draw / STEP, [0]) if turns else None
            ledger.release({path: None if step is None else step * 1e4}, holder)  # no step is over while we count
    holder.close()
    return came / num_shards / (EPOCHS - 1)


if __name__ == "__main__":
    run_command(main)
