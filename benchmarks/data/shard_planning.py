"""What it costs to plan shards of many videos, and to keep the books of one part of a job array: memory and time.

    python benchmarks/data/shard_planning.py [--sources 100000 1000000] [--parts 100] [--work FOLDER]

Sources are made up, each in a process of its own: no video is read, all are rejected at once. What is left is the
planning, the plan that a part reads, and what a shard costs from the first to the last.
"""

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, Row, in_fresh_process, machine, write_results
from common.errors import run_command
from common.logging import log
from shard_tools.build import Build
from shard_tools.inputs import Inputs, Item
from shard_tools.settings import PURPOSES, Settings
from shard_tools.workers.work import Job, Outcome

LOOKS = 20  # shards, of which the first and the last are compared
NOTES = [
    "Peaks are what a process grows by, in MiB, with its list of sources; its temporary files are not in them.",
    f"First and last shards: the median of {LOOKS} of part 1, all of whose videos are rejected at once.",
]


class Rejecting:
    """A runner that does what a worker does with a file that is no video, and notes when each shard was done."""

    def __init__(self) -> None:
        self.ends: dict[str, float] = {}

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Any]]:
        for job in jobs:
            outcome = Outcome(job.source, [], "made up")
            outcome.save(job.stem)
            yield job, outcome
            self.ends[job.stem.parent.name] = time.perf_counter()


def made_up(numbers: Iterable[int]) -> Inputs:
    inputs = Inputs()
    names = (f"folder/{number:09d}.mp4" for number in numbers)
    inputs.add(Item(name, f"/videos/{name}", None, 1) for name in names)
    inputs.settle(unlabelled=False)
    return inputs


def plan(folder: Path, sources: int, parts: int) -> Row:
    """Of the process that lists the sources and plans."""
    before, started = peak(), time.perf_counter()
    inputs = made_up(range(sources))
    listed = time.perf_counter()
    Build(folder, settings(), (0, parts)).plan(inputs, [], False)
    return {
        "listing_s": listed - started,
        "planning_s": time.perf_counter() - listed,
        "planning_peak_mib": peak() - before,
    }


def part(folder: Path, sources: int, parts: int) -> Row:
    """Of part 1, which lists the sources, reads the plan and finds all its videos broken."""
    before = peak()
    inputs = made_up(range(sources))
    started = time.perf_counter()
    build = Build(folder, settings(), (0, parts))
    made = build.plan(inputs, [], False)
    assert made is not None
    read = time.perf_counter() - started
    runner = Rejecting()
    build.run(made, inputs, runner, lambda outcome: None)
    costs = [(end - start) * 1000 for start, end in pairwise(runner.ends.values())]
    return {
        "part_reading_s": read,
        "part_peak_mib": peak() - before,
        "part_shards": len(runner.ends),
        "first_shards_ms": statistics.median(costs[:LOOKS]) if costs else None,
        "last_shards_ms": statistics.median(costs[-LOOKS:]) if costs else None,
    }


def settings() -> Settings:
    return Settings(**PURPOSES["pretrain"])


def peak() -> float:
    """MiB of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--parts", type=int, default=100)
    parser.add_argument("--work", type=Path, help="folder of what is made, which is removed again")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu")
    options = parser.parse_args(sys.argv[1:])
    rows: list[Row] = []
    for sources in options.sources:
        row: Row = {"sources": sources, "parts": options.parts}
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            for measure in (plan, part):
                row |= in_fresh_process(measure, Path(folder), sources, options.parts)
        rows.append(row)
        log(", ".join(f"{name} {_shown(figure)}" for name, figure in row.items()))
    write_results(options.output, "shard_planning", rows, machine(torch.device("cpu")), NOTES)


def _shown(figure: float | None) -> str:
    return "none" if figure is None else f"{figure:.4g}"


if __name__ == "__main__":
    run_command(main)
