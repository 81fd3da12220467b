"""Reproduce the paper's Table 1, one table at a time: `python benchmarks/ablations.py --table a`.

The predicted GPU memory (at --batch-size; measured where there is a GPU) and cost of every row stand beside the paper's
memory and accuracy; with --measure, the time of a step on a CPU too. With --train, every row is also pre-trained for
STEPS optimizer steps, and the columns `trained_*` are of the trained model on --videos, which it was not trained on.
Further `section.key=value` apply to every run:

    python benchmarks/ablations.py --table f --config configs/demo.yaml --train 1750 \\
        --shards demo/synthetic/shards --videos demo/synthetic/unseen

The rows are in benchmarks/ablations.yaml; `g` has options beyond the paper. Re-running the command resumes.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common.openmp  # noqa: F401

import torch

from benchmarks import motion_report
from benchmarks.accounting import predict
from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import ROOT, Report, Row, in_fresh_process, print_table
from benchmarks.step import measure_config, write_random_teacher
from common.devices import choose_device
from common.errors import InputError, run_command
from common.progress import progress_bar
from common.yaml_io import read_yaml
from model.adamae import AdaMAE
from model.config import ModelConfig
from train import train
from training.config import TrainConfig, parse

CPU_BATCH = 2  # clips
PAPER_WIDTH = 768  # of the encoder; sampler widths in ablations.yaml refer to it
PAPER_EPOCHS = 800
NOTES = [
    "`paper_*`: SSv2 after fine-tuning, ViT-Base, 800 epochs; memory at batch 16.",
    "`predicted_peak_gib`: counted byte by byte (benchmarks/accounting.py), without the CUDA context and the"
    f" allocator's fragmentation. `cpu_ms_per_clip`: over all threads, {CPU_BATCH} clips per step.",
    "`trained_*`: see benchmarks/motion_report.py; reconstruction losses compare only between rows that mask the same"
    " tokens and measure the same error.",
]


def main(arguments: list[str] | None = None) -> None:
    options, extra = parse_arguments(arguments)
    table: dict[str, Any] = read_yaml(ROOT / "benchmarks/ablations.yaml")[options.table]
    device = choose_device()
    title, batch_size = table["title"], options.batch_size
    report = Report(f"table_1{options.table}", options.output, device, NOTES, title=title, batch_size=batch_size)
    rows: list[Row] = []
    temporary = TemporaryDirectory()
    for entry in progress_bar(table["rows"], unit="row", desc=title):
        name = " ".join(text.removeprefix("model.") for text in entry["overrides"])
        config = make_config(entry["overrides"], options, extra, Path(temporary.name))
        row: Row = {"row": name, **{f"paper_{name}": entry.get(name) for name in ("top1", "top5", "memory_gb")}}
        row |= count_cost(config.model, batch_size)
        if device.type == "cuda" or options.measure:
            size, repetitions = (batch_size, 20) if device.type == "cuda" else (CPU_BATCH, 3)
            timing, columns = in_fresh_process(measure_config, config.model, size, repetitions, device)
            row |= {"step_ms": round(timing.median_ms), **columns}
        if options.train:
            run = report.folder / "runs" / f"{options.table}-{name.replace('=', '_').replace(' ', '-')}"
            row |= train_and_evaluate(replace(config, run=str(run)), options.videos)
        rows.append(row)
        report.write(rows)
    print_table(rows)


def parse_arguments(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--table", choices=list("abcdefg"), required=True)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/ssv2_pretrain.yaml", help="recipe of every run")
    parser.add_argument("--batch-size", type=at_least(1), default=16, help="clips to predict memory for (default: 16)")
    parser.add_argument("--measure", action="store_true", help="time steps on a CPU too; a GPU is always measured")
    parser.add_argument("--train", type=at_least(1), metavar="STEPS", help="also pre-train every row")
    parser.add_argument("--teacher", help="model.teacher of rows that have one (default: random weights)")
    parser.add_argument("--shards", help="shards to train on")
    parser.add_argument("--videos", type=Path, help="videos to evaluate the trained models on")
    options, extra = parser.parse_known_args(arguments)
    if options.train and not (options.shards and options.videos):
        raise InputError("--train needs --shards to train on and --videos to evaluate the trained models on")
    return options, extra


def make_config(overrides: list[str], options: argparse.Namespace, extra: list[str], folder: Path) -> TrainConfig:
    """Combine the recipe, `extra` and a row's own overrides, scaled to the recipe's width and length.

    A teacher with random weights is written to `folder`.
    """
    common = ["--config", str(options.config), f"data.shards={options.shards or 'none'}", *extra]
    model = parse(common).model
    width = model.dimensions.encoder_width
    scaled = [f"steps={options.train}"] if options.train else []
    for text in overrides:
        key, value = text.split("=")
        if key == "model.sampler_width":
            value = str(int(value) * width // PAPER_WIDTH)
        if key == "epochs" and options.train:
            key, value = "steps", str(max(1, options.train * int(value) // PAPER_EPOCHS))
        scaled.append(f"{key}={value}")
    if "model.target=teacher" in scaled:
        scaled.append(f"model.teacher={options.teacher or write_random_teacher(model, folder)}")
    return parse([*common, *scaled])


def count_cost(config: ModelConfig, batch_size: int) -> Row:
    account = predict(config, batch_size)
    with torch.device("meta"):
        model = AdaMAE(config)
    return {
        "parameters_m": round(sum(value.numel() for value in model.parameters()) / 1e6, 2),
        "num_visible": config.num_visible,
        "gflop_per_clip": round(account.flops / batch_size / 1e9, 1),
        "predicted_peak_gib": round(account.peak_bytes / 2**30, 3),
    }


def train_and_evaluate(config: TrainConfig, videos: Path) -> Row:
    """Pre-train, and evaluate the result on unseen videos."""
    if not train(config):
        raise KeyboardInterrupt  # a signal has stopped it, after a checkpoint
    report = motion_report.measure(AdaMAE.from_pretrained(config.run), videos, config.data)
    return {f"trained_{name}": round(value, 3) for name, value in report.items() if isinstance(value, float)}


if __name__ == "__main__":
    run_command(main, resumable=True)
