"""Measure what pre-trained models know of motion: `python benchmarks/motion_report.py RUN [RUN ...] VIDEOS`.

A row per run or checkpoint; training/motion.py says what its columns mean.
"""

from pathlib import Path

from benchmarks.arguments import ArgumentParser
from benchmarks.harness import Report, Row, print_table
from common.devices import choose_device
from common.errors import run_command
from model.weights.models import load_adamae
from model.weights.pretrained import trained_rate
from pipeline.config import DataConfig
from training.motion import measure


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories or checkpoints")
    parser.add_argument("videos", type=Path, metavar="VIDEOS", help="videos that the models were not trained on")
    options = parser.parse_args()
    device = choose_device()
    rows: list[Row] = []
    for run in options.runs:
        model = load_adamae(run).to(device)
        masks = {"masking": model.config.masking, "mask_ratio": model.config.mask_ratio}
        rows.append({"run": run.name, **masks, **measure(model, options.videos, DataConfig(**trained_rate(run)))})
    Report("motion_report", options.output, device).write(rows)
    print_table(rows)


if __name__ == "__main__":
    run_command(main)
