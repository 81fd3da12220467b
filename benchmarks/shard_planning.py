"""What it costs to plan shards of many videos, and to keep the books of one part of a job array: memory and time.

    python benchmarks/shard_planning.py [--sources 1000000] [--parts 100] [--work FOLDER]

Sources are made up, each in a process of its own: no video is read, all are rejected at once. What is left is the
planning, the plan that a part reads, and what a shard costs from the first to the last.
"""

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import in_fresh_process
from errors import run_command
from shard_tools.build import Build
from shard_tools.inputs import Item
from shard_tools.settings import PURPOSES, Settings
from shard_tools.work import Job, Outcome
from terminal import say

LOOKS = 20  # shards, of which the first and the last are compared


class Rejecting:
    """A runner that does what a worker does with a file that is no video, and notes when each job came back."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Any]]:
        for job in jobs:
            outcome = Outcome(job.source, [], "made up")
            outcome.save(job.stem)
            yield job, outcome
            self.times.append(time.perf_counter())


def plan(folder: Path, sources: int, parts: int) -> dict[str, float]:
    """Of the process that plans."""
    before = peak()
    items = [Item(f"folder/{number:09d}.mp4", f"/videos/folder/{number:09d}.mp4", None, 1) for number in range(sources)]
    listed, started = peak(), time.perf_counter()
    Build(folder, settings(), (0, parts)).plan(items, [], False)
    return {"seconds": time.perf_counter() - started, "MiB": peak() - before, "MiB of them the list": listed - before}


def part(folder: Path, sources: int, parts: int) -> dict[str, float]:
    """Of part 1, which reads the plan and finds all its videos broken."""
    before, started = peak(), time.perf_counter()
    build = Build(folder, settings(), (0, parts))
    made = build.plan([], [], False)
    assert made is not None
    read = time.perf_counter() - started
    items = [Item(entry.source, "/gone") for entries in made.shards.values() for entry in entries]
    runner = Rejecting()
    build.run(made, items, runner, lambda outcome: None)
    per_shard = settings().samples_per_shard
    ends = runner.times[per_shard - 1 :: per_shard]
    costs = [(end - start) * 1000 for start, end in pairwise(ends)]
    return {
        "reading, s": read,
        "MiB": peak() - before,
        "shards": len(ends),
        "first shards, ms": statistics.median(costs[:LOOKS]),
        "last shards, ms": statistics.median(costs[-LOOKS:]),
    }


def settings() -> Settings:
    return Settings(**PURPOSES["pretrain"])


def peak() -> float:
    """MiB of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=100)
    parser.add_argument("--work", type=Path, help="folder of what is made, which is removed again")
    options = parser.parse_args(sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        for measure in (plan, part):
            figures = in_fresh_process(measure, Path(folder), options.sources, options.parts)
            say(f"{measure.__name__}: " + ", ".join(f"{name} {figure:.3g}" for name, figure in figures.items()))


if __name__ == "__main__":
    run_command(main)
