"""Predict GPU memory by mask ratio beside the paper's, and measure it where there is a GPU.

    python benchmarks/memory_vs_ratio.py [--batch-size 16] [--size base] [--output FOLDER]
    python benchmarks/memory_vs_ratio.py --config configs/x.yaml [--batch-size 16] \
        [section.key=value ...]

With --config: predict a pre-training step of that run, on a GPU or, with device=cpu, on this CPU.

Otherwise the memory of every point is predicted for a GPU at --batch-size, byte by byte and by part
of the model. On a GPU every point is then measured, in a process of its own: the paper's setting
first and, at the end, compiled. FOLDER gets memory_vs_ratio.json after every point, of which
results_page.py makes a plot.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import (
    ROOT,
    Report,
    Row,
    in_fresh_process,
    measure_cases,
    print_table,
)
from adamae.benchmarks.step import measure_config
from adamae.common.arguments import between
from adamae.common.devices import choose_device
from adamae.common.errors import InputError, run_command
from adamae.common.locations import local_path
from adamae.common.logging import log
from adamae.common.progress import progress_bar
from adamae.common.yaml_io import read_yaml
from adamae.model.config import SIZES, ModelConfig
from adamae.training.accounting import count_flops, describe_memory, predict
from adamae.training.config import parse

# The paper's Table 1b has all but the first.
RATIOS = (0.75, 0.8, 0.85, 0.9, 0.95, 0.98)
NOTES = [
    "`at_peak_*`: what is alive at the peak of the step, by part; the sum is `predicted_peak_gib`,"
    " what PyTorch allocates.",
    "`ddp_predicted_peak_gib`: with gradients in DistributedDataParallel's buckets, per process.",
    "Predicted with flash attention. With cuDNN's, which PyTorch prefers on an H200, ViT-Base's"
    " peak at batch 16 was 1 or 2 MiB higher.",
    "`paper_gb`: the paper's tables, ViT-Base at batch 16, SSv2: other code on other GPUs.",
    "`gflop_per_clip` is without what checkpointing recomputes.",
    "On a CPU, GPU memory is predicted for bf16.",
]


class Point(NamedTuple):
    """What varies between the rows."""

    mask_ratio: float
    activation_checkpointing: bool = False


PAPER_POINT = Point(0.95)


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument(
        "--batch-size", type=between(1), help="clips to predict for (default: the run's, or 16)"
    )
    parser.add_argument("--config", type=local_path, help="predict one step of this run instead")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="with --config, as for train.py"
    )
    options = parser.parse_args(arguments)
    if options.config is not None:
        run = parse(["--config", str(options.config), "data.shards=none", *options.overrides])
        for label, size in describe_memory(run, options.batch_size):
            log(f"{label:<16}{size}")
        return
    if options.overrides:
        raise InputError(f"{options.overrides[0]} changes a run: name it with --config")
    report = Report("memory_vs_ratio", options.output, choose_device(), NOTES)
    rows = compare_points(report, ModelConfig(size=options.size), options.batch_size or 16)
    print_table([drop_parts(row) for row in rows])


def drop_parts(row: Row) -> Row:
    """Leave out the memory by part, which makes a table too wide for a terminal."""
    return {name: value for name, value in row.items() if not name.startswith("at_peak")}


def compare_points(report: Report, base: ModelConfig, batch_size: int) -> list[Row]:
    """Predict the memory of each point, and measure it where there is a GPU."""
    predicted = predict_points(report, base, batch_size)
    device = choose_device()
    if device.type != "cuda":
        return list(predicted.values())

    def measure(case: tuple[Point, bool]) -> Row:
        """Measure a point, eager or compiled, by three steps: all allocate the same memory."""
        point, compiled = case
        config = replace(base, **point._asdict())
        return in_fresh_process(measure_config, config, batch_size, 3, device, compiled)

    def make_rows(results: dict[tuple[Point, bool], list[Row]]) -> list[Row]:
        for (point, compiled), (measured,) in results.items():
            column = "compiled_measured_peak_gib" if compiled else "measured_peak_gib"
            predicted[point][column] = round(measured["peak_memory_gib"], 3)
        return list(predicted.values())

    cases = [(PAPER_POINT, False)]
    cases += [(point, False) for point in predicted if point != PAPER_POINT]
    # Last, since compiling takes as long as ten other points, and a run may be cut off.
    cases.append((PAPER_POINT, True))
    return measure_cases(report, cases, measure, make_rows)


def predict_points(report: Report, base: ModelConfig, batch_size: int) -> dict[Point, Row]:
    """Predict the memory of each point; write the report after each."""
    points = [
        Point(ratio, checkpointing) for checkpointing, ratio in product((False, True), RATIOS)
    ]
    rows: dict[Point, Row] = {}
    for point in progress_bar(points, unit="point"):
        row = predict_row(replace(base, **point._asdict()), batch_size)
        # One point shows what the buckets add: they are as large as the gradients at every ratio.
        if point == PAPER_POINT:
            in_buckets = predict(base, batch_size, in_buckets=True)
            row["ddp_predicted_peak_gib"] = round(sum(in_buckets.values()) / 2**30, 3)
        if point.activation_checkpointing:
            # The model's work is what it is without checkpointing. What is computed twice costs
            # time and counts for no MFU, so it has a column of its own.
            without = rows[Point(point.mask_ratio)]["gflop_per_clip"]
            row["recomputed_gflop_per_clip"] = round(row["gflop_per_clip"] - without, 1)
            row["gflop_per_clip"] = without
        rows[point] = row
        report.write(list(rows.values()))
    return rows


def read_paper_memory() -> dict[float, float]:
    """Return the GB of the paper's Table 1b by mask ratio, of ViT-Base at batch 16."""
    memory = {}
    for row in read_yaml(ROOT / "benchmarks/ablations.yaml")["b"]["rows"]:
        _, _, mask_ratio = row["overrides"][0].partition("=")
        memory[float(mask_ratio)] = row["memory_gb"]
    return memory


def predict_row(config: ModelConfig, batch_size: int) -> Row:
    """Predict the memory and the arithmetic of a pre-training step on a GPU."""
    at_peak = predict(config, batch_size)
    # The paper has numbers of ViT-Base only, and of no activation checkpointing.
    is_paper = config.size == "base" and not config.activation_checkpointing
    parts = {f"at_peak_{label}_mib": round(size / 2**20, 1) for label, size in at_peak.items()}
    flops = count_flops(config, batch_size)
    return {
        "masking": config.masking,
        "target": config.target,
        "mask_ratio": config.mask_ratio,
        "num_visible": config.num_visible,
        "activation_checkpointing": config.activation_checkpointing,
        "batch_size": batch_size,
        "paper_gb": read_paper_memory().get(config.mask_ratio) if is_paper else None,
        "predicted_peak_gib": round(sum(at_peak.values()) / 2**30, 3),
        **parts,
        "gflop_per_clip": round(flops / batch_size / 1e9, 1),
    }


if __name__ == "__main__":
    run_command(main)
