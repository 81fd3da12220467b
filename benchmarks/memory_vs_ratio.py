"""Predict GPU memory by mask ratio beside the paper's, and measure it where there is a GPU.

    python benchmarks/memory_vs_ratio.py [--batch-size 16] [--size base] [--output FOLDER]
    python benchmarks/memory_vs_ratio.py --config configs/x.yaml [--batch-size 16] [section.key=value ...]

With --config: predict a pre-training step of that run, on a GPU or, with device=cpu, on this CPU. Otherwise the memory
of every point is predicted for a GPU at --batch-size, byte by byte and by part of the model. On a GPU every point is
then measured: the paper's setting first and, at the end, compiled. FOLDER gets memory_vs_ratio.json after every point,
and memory_vs_ratio.png, a plot of it; each measured point has a process of its own.
"""

import argparse
from pathlib import Path

from benchmarks.arguments import ArgumentParser, at_least
from common.errors import InputError, parse_early, run_command
from model.config import SIZES, ModelConfig


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument(
        "--batch-size", type=at_least(1), help="clips to predict memory for (default: the run's, or 16)"
    )
    parser.add_argument("--config", type=Path, help="predict one step of this run instead")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="with --config, as for train.py")
    options = parser.parse_args(arguments)
    options.batch_size = options.batch_size or (16 if options.config is None else None)
    if options.overrides and options.config is None:
        raise InputError(f"{options.overrides[0]} changes a run: name it with --config")
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from benchmarks.accounting import RESERVE_GPU, Account, predict
from benchmarks.harness import ROOT, Report, Row, in_fresh_process, print_table
from benchmarks.step import measure_config
from common.atomic_io import atomic_write
from common.devices import choose_device
from common.logging import format_bytes, log
from common.progress import progress_bar
from common.yaml_io import read_yaml
from pipeline.config import DataConfig
from training.config import TrainConfig, parse

RATIOS = (0.75, 0.8, 0.85, 0.9, 0.95, 0.98)
CAPACITIES_GB = (16, 24, 40, 80, 141)
AMPLE_BATCH = 64  # large enough for activations to dominate the peak, which is proportional to clips from there on
STORED_PIXELS = 352 * 256  # of a frame that DALI decodes, for shards of 342×256
NVDEC_BYTES = 100 * 8 * STORED_PIXELS * 3 // 2  # at most: DALI keeps 100 decoders, each of which has 8 surfaces in NV12
SHOWN = (
    "mask_ratio", "activation_checkpointing", "paper_gb", "predicted_peak_gib", "measured_peak_gib",
    "compiled_measured_peak_gib",
)  # fmt: skip
SERIES = (  # of the plot: column, whether with activation checkpointing, label, Matplotlib's marker, line and color
    ("paper_gb", False, "the paper's code on its GPUs (converted from GB)", "s--C7"),
    ("predicted_peak_gib", False, "predicted", "-C0"),
    ("measured_peak_gib", False, "measured", "oC0"),
    ("compiled_measured_peak_gib", False, "measured, compiled", "DC3"),
    ("predicted_peak_gib", True, "predicted, with activation checkpointing", ":C0"),
    ("measured_peak_gib", True, "measured, with activation checkpointing", "^C0"),
)
NOTES = [
    "`at_peak_*`: what is alive at the peak of the step, by part; the sum is `predicted_peak_gib`, what PyTorch"
    " allocates.",
    "`ddp_predicted_peak_gib`: with gradients in DistributedDataParallel's buckets, in each process.",
    "Predicted with flash attention. With cuDNN's, which PyTorch prefers on an H200, ViT-Base's peak at batch 16 was 1"
    " or 2 MiB higher.",
    "`paper_gb`: the paper's tables, ViT-Base at batch 16, SSv2: other code on other GPUs.",
    "`gflop_per_clip` is without what checkpointing recomputes.",
    "On a CPU, GPU memory is predicted for bf16.",
]


def main(options: argparse.Namespace) -> None:
    if options.config is not None:
        run = parse(["--config", str(options.config), "data.shards=none", *options.overrides])
        for label, size in describe_memory(run, options.batch_size):
            log(f"{label:<16}{size}")
        return
    device = choose_device()
    on_gpu = device.type == "cuda"
    report = Report("memory_vs_ratio", options.output, device, NOTES)
    points = list_points(options.size)
    rows: list[Row] = []
    for config in progress_bar(points, unit="point", desc="predict"):
        rows.append(predict_row(config, options.batch_size))
        report.write(rows)
    if on_gpu:
        paper_first = sorted(zip(points, rows, strict=True), key=lambda point: not is_default(point[0]))
        # Compiling takes as long as ten other points.
        cases = [(*point, False) for point in paper_first] + [(*paper_first[0], True)]
        for config, row, compiled in progress_bar(cases, unit="point", desc="measure"):
            row.update(measure_on_gpu(config, row, compiled))
            report.write(rows)
    with atomic_write(report.folder / "memory_vs_ratio.png") as partial:
        plot_memory(rows).savefig(partial, format="png", dpi=110)
    print(
        f"GPU memory of a pre-training step of {options.batch_size} clips, ViT-{options.size.title()}, in GiB"
        f" (`paper_gb`: GB): predicted for a GPU{', and measured on this one' if on_gpu else '; there is none here'}"
    )
    print_table([{name: row[name] for name in SHOWN if row.get(name) is not None} for row in rows])
    print(f"wrote memory_vs_ratio.json and memory_vs_ratio.png into {report.folder}")


def list_points(size: str) -> list[ModelConfig]:
    """List adaptive masking at the paper's ratios, without and with activation checkpointing."""
    base = ModelConfig(size=size)  # type: ignore[arg-type]
    return [
        replace(base, mask_ratio=ratio, activation_checkpointing=checkpointing)
        for checkpointing in (False, True)
        for ratio in RATIOS
    ]


def read_paper_memory() -> dict[float, float]:
    """Return the GB of the paper's Table 1b by mask ratio, of ViT-Base at batch 16."""
    rows = read_yaml(ROOT / "benchmarks/ablations.yaml")["b"]["rows"]
    return {float(row["overrides"][0].partition("=")[2]): row["memory_gb"] for row in rows}


def is_default(config: ModelConfig) -> bool:
    return config == ModelConfig(size=config.size)


def predict_row(config: ModelConfig, batch_size: int) -> Row:
    own = account = predict(config, batch_size)
    if config.activation_checkpointing:
        own = predict(replace(config, activation_checkpointing=False), batch_size)
    is_paper = config.size == "base" and not config.activation_checkpointing
    row: Row = {
        "masking": config.masking,
        "target": config.target,
        "mask_ratio": config.mask_ratio,
        "num_visible": config.num_visible,
        "activation_checkpointing": config.activation_checkpointing,
        "batch_size": batch_size,
        "paper_gb": read_paper_memory().get(config.mask_ratio) if is_paper else None,
        "predicted_peak_gib": round(account.peak_bytes / 2**30, 3),
    }
    if is_default(config):
        in_buckets = predict(config, batch_size, in_buckets=True, with_flops=False)
        row["ddp_predicted_peak_gib"] = round(in_buckets.peak_bytes / 2**30, 3)
    row |= {f"at_peak_{label}_mib": round(size / 2**20, 1) for label, size in account.at_peak.items()}
    row["gflop_per_clip"] = round(own.flops / batch_size / 1e9, 1)
    row["recomputed_gflop_per_clip"] = round((account.flops - own.flops) / batch_size / 1e9, 1)
    return row


def describe_memory(run: TrainConfig, batch_size: int | None = None) -> list[tuple[str, str]]:
    """Predict a pre-training step of a run; return a line for each part of it, and the largest batch of common GPUs."""
    if run.task != "pretrain":
        raise InputError(f"task is {run.task}; only the memory of pre-training is predicted")
    batch_size = batch_size or min(run.batch_size, run.clips_per_step(world_size=1))
    on_gpu = run.device != "cpu"
    account = predict(run.model, batch_size, on_gpu, with_flops=False)
    ample = predict(run.model, AMPLE_BATCH, on_gpu, with_flops=False)
    where = "predicted for a GPU" if on_gpu else "predicted for this CPU"
    return [
        (f"{batch_size} clips", f"{format_bytes(account.peak_bytes)}, {where}: at the peak of a step"),
        *((label.replace("_", " "), format_bytes(size)) for label, size in account.at_peak.items() if size),
        *((f"{size} GB", f"at most {largest_batch(run.model, ample, size * 1e9)} clips") for size in CAPACITIES_GB),
    ]


def loaded_per_clip(config: ModelConfig) -> int:
    """Return the bytes that DALI holds for a clip of a step: the stored frames of the batch that it decodes, and the
    clips of those that are prefetched (pipeline/loader.py)."""
    height, width = config.frame_size
    return config.num_frames * 3 * (STORED_PIXELS + DataConfig.prefetch * height * width)


def largest_batch(config: ModelConfig, ample: Account, capacity: float) -> int:
    """Return the clips that fit into `capacity` bytes with what DALI holds of them, from the account of AMPLE_BATCH."""
    per_clip = (ample.peak_bytes - ample.fixed_bytes) / AMPLE_BATCH + loaded_per_clip(config)
    return max(0, int((capacity - RESERVE_GPU - NVDEC_BYTES - ample.fixed_bytes) / per_clip))


def measure_on_gpu(config: ModelConfig, row: Row, compiled: bool) -> Row:
    device, batch_size = choose_device(), row["batch_size"]
    timing, columns = in_fresh_process(measure_config, config, batch_size, 20, device, compiled)
    columns |= timing.columns(batch_size)
    if compiled:
        return {f"compiled_{name}": value for name, value in columns.items()}
    return columns | {"prediction_error": round(row["predicted_peak_gib"] / columns["measured_peak_gib"] - 1, 3)}


def plot_memory(rows: Sequence[Row]) -> Figure:
    """Plot the memory of a step over the mask ratio: predicted, measured, compiled, and the paper's."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for column, checkpointing, label, style in SERIES:
        gib = 1e9 / 2**30 if column == "paper_gb" else 1
        points = sorted(
            (row["mask_ratio"], row[column] * gib)
            for row in rows
            if row["activation_checkpointing"] == checkpointing and row.get(column) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="mask ratio", ylabel="peak GPU memory of a step (GiB)", xticks=RATIOS)
    axes.set_title(f"pre-training, {rows[0]['batch_size']} clips per step", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS))
