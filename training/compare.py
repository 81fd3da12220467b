"""Which runs are better without any fine-tuning: `python -m training.compare RUN...`.

A row a run, the best first: held-out loss, k-NN accuracy and RankMe at its last review (`evaluation.shards`).
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from common.errors import InputError, run_command
from common.logging import log, printable
from training.report import lines_of

FIGURES = ("knn_top1", "rankme", "reconstruction_loss", "top1")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    found = [(run, reviewed(run)) for run in parser.parse_args(arguments).runs]
    found.sort(key=lambda item: rank(item[1]))
    names = [name for name in FIGURES if any(name in figures for _, figures in found)]
    wide = max(len(printable(run)) for run, _ in found)
    log("".join(["run".ljust(wide), *(name.rjust(len(name) + 2) for name in ("step", *names))]))
    for run, figures in found:
        cells = [written(figures.get(name)).rjust(len(name) + 2) for name in ("step", *names)]
        log("".join([printable(run).ljust(wide), *cells]))


def reviewed(run: Path) -> dict[str, Any]:
    """The figures of a run's last review; raises InputError if it has none."""
    reviews = [line for line in lines_of(run / "metrics.jsonl") if any(name.startswith("evaluation/") for name in line)]
    if not reviews:
        raise InputError(f"{run} has no review: train it with evaluation.shards=SHARDS")
    return {name.removeprefix("evaluation/"): value for name, value in reviews[-1].items()}


def rank(figures: dict[str, Any]) -> tuple[float, float]:
    """By k-NN accuracy where there are labels; else by loss."""
    return -figures.get("knn_top1", -1.0), figures.get("reconstruction_loss", float("inf"))


def written(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
