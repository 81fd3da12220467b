"""The paper's Table 1, one table at a time: `python benchmarks/ablations.py --table a [--train STEPS --shards FOLDER]`.

Memory (predicted for a GPU at --batch-size, and measured where there is one) and cost of every row stand beside the
paper's; with --measure, the time of a step on a CPU too. With --train, every row is also pre-trained for STEPS
optimizer steps, and the columns `learnt_*` are of the trained model on --videos it has not seen; further
`section.key=value` are given to every run:

    python benchmarks/ablations.py --table f --config configs/demo.yaml --train 1750 \\
        --shards demo/synthetic/shards --videos demo/synthetic/unseen

The rows are in benchmarks/ablations.yaml. Started again, the command goes on with the runs it has begun.
"""

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import common.openmp  # noqa: F401

import torch

from benchmarks import motion_report
from benchmarks.accounting import predict
from benchmarks.harness import ROOT, Row, describe_machine, results_folder, write_results
from benchmarks.memory_vs_ratio import CPU_BATCH, in_fresh_process, measure_on_cpu, measure_on_gpu
from common.devices import choose_device
from common.errors import InputError, run_command
from common.progress import progress_bar
from common.yaml_io import read_yaml
from figures.clips import Clip, read_clips
from model.adamae import AdaMAE
from model.config import ModelConfig
from training.config import TrainConfig, parse, to_yaml

PAPER_WIDTH = 768  # the encoder's, to which sampler widths in benchmarks/ablations.yaml refer
PAPER_EPOCHS = 800


def main(arguments: list[str] | None = None) -> None:
    options, extra = parse_arguments(arguments)
    table = read_yaml(ROOT / "benchmarks/ablations.yaml")[options.table]
    device = choose_device()
    folder = options.output or results_folder(device)
    rows = []
    for entry in progress_bar(table["rows"], unit="row", desc=table["title"]):
        config = configured(entry["overrides"], options, extra)
        row: Row = {"row": " ".join(text.removeprefix("model.") for text in entry["overrides"])}
        row |= {f"paper_{name}": entry.get(name) for name in ("top1", "top5", "memory_gb")}
        row |= cost(config.model, options.batch_size)
        if device.type == "cuda" or options.measure:
            row |= measured(config.model, options.batch_size, on_gpu=device.type == "cuda")
        if options.train:
            row |= learnt(config, folder / "runs" / name_of(options.table, entry["overrides"]), options)
        rows.append(row)
    write_results(folder, f"table_1{options.table}", rows, describe_machine(device), notes(table["title"], options))
    print(f"wrote {folder}/table_1{options.table}.json")


def parse_arguments(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=list("abcdefg"), required=True, help="g: options beyond the paper")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/ssv2_pretrain.yaml", help="recipe of every run")
    parser.add_argument("--batch-size", type=int, default=16, help="clips that memory is told for (default 16)")
    parser.add_argument("--measure", action="store_true", help="time steps on a CPU too; a GPU is always measured")
    parser.add_argument("--train", type=int, metavar="STEPS", help="also pre-train every row")
    parser.add_argument("--shards", help="shards to train on")
    parser.add_argument("--videos", type=Path, help="videos to look at the trained models with")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu> or .../cpu")
    options, extra = parser.parse_known_args(arguments)
    if options.train and not (options.shards and options.videos):
        raise InputError("--train needs --shards to train on and --videos to look at the trained models with")
    return options, extra


def configured(overrides: list[str], options: argparse.Namespace, extra: list[str]) -> TrainConfig:
    """The run of a row: the recipe, `extra`, then the row's own overrides, scaled to the recipe's width and length."""
    common = ["--config", str(options.config), f"data.shards={options.shards or 'none'}", *extra]
    width = parse(common).model.dimensions.encoder_width
    scaled = []
    for text in overrides:
        key, value = text.split("=")
        if key == "model.sampler_width":
            value = str(int(value) * width // PAPER_WIDTH)
        if key == "epochs" and options.train:
            key, value = "steps", str(max(1, options.train * int(value) // PAPER_EPOCHS))
        scaled.append(f"{key}={value}")
    steps = [f"steps={options.train}"] if options.train else []
    return parse([*common, *steps, *scaled])


def name_of(table: str, overrides: list[str]) -> str:
    return f"{table}-" + "-".join(text.removeprefix("model.").replace("=", "_") for text in overrides)


def cost(config: ModelConfig, batch_size: int) -> Row:
    account = predict(config, batch_size)
    return {
        "parameters_m": round(sum(value.numel() for value in meta_model(config).parameters()) / 1e6, 2),
        "num_visible": config.num_visible,
        "gflop_per_clip": round(account.flops / batch_size / 1e9, 1),
        "predicted_peak_gib": round(account.peak_bytes / 2**30, 3),
    }


def measured(config: ModelConfig, batch_size: int, on_gpu: bool) -> Row:
    """Of a step where we are; on a CPU, of CPU_BATCH clips."""
    if on_gpu:
        row, timing = in_fresh_process(measure_on_gpu, config, batch_size, 20, False)
        return {**row, "clips_per_second": round(batch_size / timing.median_ms * 1e3, 1)}
    _, timing, cpu_ms = in_fresh_process(measure_on_cpu, config, 3)
    return {"cpu_step_ms": round(timing.median_ms), "cpu_ms_per_clip": round(cpu_ms)}


def meta_model(config: ModelConfig) -> AdaMAE:
    with torch.device("meta"):
        return AdaMAE(config)


def learnt(config: TrainConfig, run: Path, options: argparse.Namespace) -> Row:
    """Pre-train, in a process of its own, and look at the result."""
    recipe = run.with_suffix(".yaml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(to_yaml(replace(config, run=str(run))), encoding="utf-8")
    train(recipe)
    model = AdaMAE.from_pretrained(run)
    shape = config.model.num_frames, config.model.image_size
    return look_at(model, list(read_clips([options.videos], *shape, config.data.frame_stride, limit=10**9)))


def train(recipe: Path) -> None:
    if subprocess.run([sys.executable, str(ROOT / "train.py"), "--config", str(recipe)], check=False).returncode:
        raise InputError(f"the training run of {recipe} failed: see above; the same command goes on from there")


@torch.no_grad()
def look_at(model: AdaMAE, clips: list[Clip]) -> Row:
    if model.config.masking == "adaptive":
        report: dict[str, Any] = motion_report.measure(model, clips)
        names = ("reconstruction_loss", "correlation", "moving_fraction_visible", "moving_fraction_all")
        return {f"learnt_{name}": round(report[name], 3) for name in names}
    losses = [model(clip.frames[None], seed=0, offset=i).reconstruction_loss for i, clip in enumerate(clips)]
    return {"learnt_reconstruction_loss": round(torch.stack(losses).mean().item(), 3)}


def notes(title: str, options: argparse.Namespace) -> list[str]:
    said = [
        f"Table 1 ({options.table}), {title}; recipe {options.config.name}, batch {options.batch_size}. `paper_*`: SSv2"
        " after fine-tuning, ViT-Base, 800 epochs; memory at batch 16.",
        "`predicted_peak_gib`: counted byte by byte (benchmarks/accounting.py), without the CUDA context and the"
        " allocator's fragmentation; `measured_peak_gib` where a GPU was at hand.",
    ]
    if options.measure:
        said.append(f"`cpu_*`: of a step of {CPU_BATCH} clips, over all threads where it is a clip's.")
    if options.train:
        said.append(
            f"`learnt_*`: after {options.train} steps, on {options.videos.name}. A reconstruction loss can only be"
            " compared between rows that hide the same tokens and measure the same error; correlation is of P with"
            " motion, as benchmarks/motion_report.py defines it."
        )
    return said


if __name__ == "__main__":
    run_command(main)
