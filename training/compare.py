"""Compare pre-training runs without fine-tuning: `python -m training.compare RUN...`.

One row per run, the best first: held-out loss, k-NN accuracy and RankMe of its last evaluation (`evaluation.shards`).
Runs without one come last. Losses of different targets cannot be compared.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from common.errors import InputError, run_command
from common.logging import log, log_note, printable
from model.weights.pretrained import run_config
from training.logger import read_rows

LOSS = ("target", "loss", "normalize_target")  # of the model: what its loss is of
METRICS = ("knn_top1", "majority_top1", "rankme", "reconstruction_loss", "top1", "mAP")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    runs = parser.parse_args(arguments).runs
    found = [(printable(run), read_last_evaluation(run)) for run in runs]
    if not any(metrics for _, metrics in found):
        raise InputError(f"no evaluation results in {', '.join(map(str, runs))}: train with evaluation.shards=SHARDS")
    if len({tuple(run_config(run)["model"].get(name) for name in LOSS) for run in runs}) > 1:
        log_note(f"these runs differ in {', '.join(LOSS)}: their losses cannot be compared")
    # By k-NN accuracy where there are labels, else by loss.
    found.sort(key=lambda item: (-item[1].get("knn_top1", -1.0), item[1].get("reconstruction_loss", float("inf"))))
    names = ["step", *(name for name in METRICS if any(name in metrics for _, metrics in found))]
    width = max(len(run) for run, _ in found)
    log("".join(["run".ljust(width), *(name.rjust(len(name) + 2) for name in names)]))
    for run, metrics in found:
        values = [metrics.get(name, "") for name in names]
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        cells = [text.rjust(len(name) + 2) for name, text in zip(names, texts, strict=True)]
        log("".join([run.ljust(width), *cells]))


def read_last_evaluation(run: Path) -> dict[str, Any]:
    """Return the metrics of a run's last evaluation, {} if it has none."""
    last: dict[str, Any] = {}
    for row in read_rows(run / "metrics.jsonl"):
        if any(name.startswith("evaluation/") for name in row):
            last = row
    return {name.removeprefix("evaluation/"): value for name, value in last.items()}


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
