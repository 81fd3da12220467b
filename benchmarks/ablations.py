"""Cost of the rows of the paper's Table 1, one table at a time: `python benchmarks/ablations.py --table a`.

The predicted GPU memory (at --batch-size; measured where there is a GPU) and cost of every row stand beside the paper's
memory and accuracy; with --measure, the time of a step on a CPU too. Further `section.key=value` apply to every row.

The rows are in benchmarks/ablations.yaml, which says how to train one; `g` has options beyond the paper.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.accounting import predict
from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import ROOT, Report, Row, in_fresh_process, print_table
from benchmarks.step import measure_config, write_random_teacher
from common.devices import choose_device
from common.errors import run_command
from common.progress import progress_bar
from common.yaml_io import read_yaml
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.targets.target import make_target
from model.weights.teachers import make_teacher
from training.config import parse

CPU_BATCH = 2  # clips
COMMON = ["--config", str(ROOT / "configs/ssv2_pretrain.yaml"), "data.shards=none"]
NOTES = [
    "`paper_*`: SSv2 after fine-tuning, ViT-Base, 800 epochs; memory at batch 16.",
    "`predicted_peak_gib`: counted byte by byte (benchmarks/accounting.py), without the CUDA context and the"
    f" allocator's fragmentation. `cpu_ms_per_clip`: over all threads, {CPU_BATCH} clips per step.",
]


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--table", choices=list("abcdefg"), required=True)
    parser.add_argument("--batch-size", type=at_least(1), default=16, help="clips to predict memory for (default: 16)")
    parser.add_argument("--measure", action="store_true", help="time steps on a CPU too; a GPU is always measured")
    options, extra = parser.parse_known_args(arguments)
    table: dict[str, Any] = read_yaml(ROOT / "benchmarks/ablations.yaml")[options.table]
    device = choose_device()
    title, batch_size = table["title"], options.batch_size
    report = Report(f"table_1{options.table}", options.output, device, NOTES, title=title, batch_size=batch_size)
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        for entry in progress_bar(table["rows"], unit="row", desc=title):
            name = " ".join(text.removeprefix("model.") for text in entry["overrides"])
            model = make_model_config(entry["overrides"], extra, Path(folder))
            row: Row = {"row": name, **{f"paper_{name}": entry.get(name) for name in ("top1", "top5", "memory_gb")}}
            row |= count_cost(model, batch_size)
            if device.type == "cuda" or options.measure:
                size, repetitions = (batch_size, 20) if device.type == "cuda" else (CPU_BATCH, 3)
                timing, columns = in_fresh_process(measure_config, model, size, repetitions, device)
                row |= {"step_ms": round(timing.median_ms), **columns}
            rows.append(row)
            report.write(rows)
    print_table(rows)


def make_model_config(overrides: list[str], extra: list[str], folder: Path) -> ModelConfig:
    """Apply overrides to the recipe; a teacher of the model's shape, with random weights, is written to `folder`."""
    if "model.target=teacher" in overrides:
        shape = parse([*COMMON, *extra]).model
        extra = [*extra, f"model.teacher={write_random_teacher(shape, folder)}"]
    return parse([*COMMON, *extra, *overrides]).model


def count_cost(config: ModelConfig, batch_size: int) -> Row:
    account = predict(config, batch_size)
    with torch.device("meta"):
        model = AdaMAE(config, make_target(config, make_teacher(config)))
    return {
        "parameters_m": round(sum(value.numel() for value in model.parameters()) / 1e6, 2),
        "num_visible": config.num_visible,
        "gflop_per_clip": round(account.flops / batch_size / 1e9, 1),
        "predicted_peak_gib": round(account.peak_bytes / 2**30, 3),
    }


if __name__ == "__main__":
    run_command(main)
