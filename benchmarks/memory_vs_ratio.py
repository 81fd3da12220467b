"""Masking ratio against GPU memory and speed, with the paper's figures beside ours.

    python benchmarks/memory_vs_ratio.py [--batch-size 16] [--size base] [--all] [--output FOLDER]
    python benchmarks/memory_vs_ratio.py --config configs/x.yaml [--batch-size 16] [section.key=value ...]

With --config: what a pre-training step of that run takes, on a GPU, or here with device=cpu; nothing else is done.
Every point's memory is predicted for a GPU at --batch-size, byte by byte and by part of the model. With a GPU every
point is then measured there, and the paper's also compiled; without one, the paper's is measured at batch 2, and the
predicted bytes saved for backward must equal the counted ones. Table and plot are there as soon as the paper's ratios
are predicted, and are written anew with every point. --all: also every ratio of random and tube masking, every ratio
and decoder depth with activation checkpointing, and on a CPU the points that `measured_on_cpu` names. Each measured
point has a process of its own.
"""

import argparse
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import common.openmp  # noqa: F401

import torch
import triton

from benchmarks.accounting import Account, predict, saved_bytes
from benchmarks.harness import (
    Row,
    Timing,
    describe_machine,
    in_fresh_process,
    matmul_tflops,
    require,
    results_folder,
    side_by_side,
    time_calls,
    write_results,
)
from benchmarks.reports.memory_plot import draw
from benchmarks.step import PretrainingStep, noise_clip
from common.devices import choose_device, choose_precision
from common.errors import InputError, run_command
from common.logging import log
from common.progress import progress_bar
from model.adamae import AdaMAE
from model.config import SIZES, ModelConfig
from pipeline.config import DataConfig
from training.config import parse
from training.memory import RESERVE_GPU, gib, loaded_bytes

RATIOS = (0.75, 0.8, 0.85, 0.9, 0.95, 0.98)
FRAME_RATIOS = (0.75, 0.875)  # whole token frames: 2 and 1 of 8
CAPACITIES_GB = (16, 24, 40, 80, 141)
CPU_BATCH = 2
AMPLE_BATCH = 64  # large enough for activations to rule the peak, so that memory is proportional to clips from there on
STORED_PIXELS = 352 * 256  # of a frame that DALI decodes, where videos of 342×256 were made into shards

# SPEC §8: GB at batch 16, of ViT-Base on SSv2 (the paper does not say how it was read off).
PAPER_GB = {
    ("adaptive", 0.98): 14.1, ("adaptive", 0.95): 14.4, ("adaptive", 0.9): 15.1, ("adaptive", 0.85): 15.9,
    ("adaptive", 0.8): 16.9, ("random", 0.75): 16.2, ("random", 0.9): 14.7, ("tube", 0.75): 16.2, ("tube", 0.9): 14.7,
    ("frame", 0.875): 12.8,
}  # fmt: skip
PAPER_GB_BY_DEPTH = {1: 9.2, 2: 11.0, 4: 14.4, 8: 21.3}  # adaptive, 0.95
PAPER_GB_BY_SAMPLER = {("mlp", 1, None): 11.8, ("mha", 1, 384): 14.0, ("mha", 2, 384): 17.1}  # adaptive, 0.95


@dataclass(frozen=True)
class Point:
    """One line of the table."""

    axis: str  # what varies: ratio, decoder depth, sampler
    config: ModelConfig
    paper_gb: float | None
    measured_on_cpu: bool = False


def points(size: str, every: bool) -> list[Point]:
    """The table's, those of the paper's main one first; `every`: what takes long, too."""
    base = ModelConfig(size=size)  # type: ignore[arg-type]
    of_paper = size == "base"
    found = []
    for masking in ("adaptive", "random", "tube", "frame"):
        for ratio in FRAME_RATIOS if masking == "frame" else RATIOS:
            config = replace(base, masking=masking, mask_ratio=ratio)
            if masking != "adaptive" and not every and (masking, ratio) not in PAPER_GB:
                continue  # random and tube masking take the same memory, which adaptive's shows at every ratio
            on_cpu = (masking, ratio) == ("adaptive", 0.95)
            if every:
                on_cpu = masking == "adaptive" or (masking, ratio) == ("random", 0.9)
            found.append(Point("ratio", config, PAPER_GB.get((masking, ratio)) if of_paper else None, on_cpu))
    for depth in (1, 2, 8):
        paper_gb = PAPER_GB_BY_DEPTH[depth] if of_paper else None
        found.append(Point("decoder depth", replace(base, decoder_depth=depth), paper_gb))
    width = base.dimensions.encoder_width
    for config in (
        replace(base, sampler="mlp"),
        replace(base, sampler_width=width // 2),
        replace(base, sampler_width=width // 2, sampler_depth=2),
        *([replace(base, sampler_autocast=not base.sampler_autocast)] if every else []),
    ):
        paper_gb = PAPER_GB_BY_SAMPLER.get((config.sampler, config.sampler_depth, config.sampler_width))
        found.append(Point("sampler", config, paper_gb if of_paper else None))
    return [*found, *checkpointed([point for point in found if every or is_default(point)], measured_on_cpu=every)]


def checkpointed(found: list[Point], measured_on_cpu: bool) -> list[Point]:
    """Adaptive masking at every ratio and decoder depth once more, with activation checkpointing."""
    return [
        replace(
            point,
            config=replace(point.config, activation_checkpointing=True),
            paper_gb=None,
            measured_on_cpu=measured_on_cpu and is_default(point),
        )
        for point in found
        if point.axis in ("ratio", "decoder depth") and point.config.masking == "adaptive"
    ]


def is_default(point: Point) -> bool:
    return point.axis == "ratio" and (point.config.masking, point.config.mask_ratio) == ("adaptive", 0.95)


def predicted_row(point: Point, batch_size: int) -> Row:
    config = point.config
    own = account = predict(config, batch_size)
    if config.activation_checkpointing:
        own = predict(replace(config, activation_checkpointing=False), batch_size)
    row: Row = {
        "axis": point.axis,
        "masking": config.masking,
        "mask_ratio": config.mask_ratio,
        "num_visible": config.num_visible,
        "decoder_depth": config.dimensions.decoder_depth,
        "sampler": _sampler(config) if config.masking == "adaptive" else "",
        "activation_checkpointing": config.activation_checkpointing,
        "batch_size": batch_size,
        "paper_gb": point.paper_gb,
        "predicted_peak_gib": round(account.peak_bytes / 2**30, 3),
        "compiled_predicted_peak_gib": None,  # it takes a minute: later
        "ddp_predicted_peak_gib": None,
    }
    if is_default(point):
        in_buckets = predict(config, batch_size, in_buckets=True, with_flops=False)
        row["ddp_predicted_peak_gib"] = round(in_buckets.peak_bytes / 2**30, 3)
    row |= {f"saved_{part}_mib": round(size / 2**20, 1) for part, size in account.saved.items()}
    row["saved_mib"] = round(sum(account.saved.values()) / 2**20, 1)
    row |= {f"at_peak_{label}_mib": round(size / 2**20, 1) for label, size in account.at_peak.items()}
    ample = predict(config, AMPLE_BATCH, with_flops=False)
    row["loaded_mib"] = round(batch_size * loaded_per_clip(config) / 2**20, 1)
    row |= {f"largest_batch_{size}gb": largest_batch(config, ample, size * 1e9) for size in CAPACITIES_GB}
    row["gflop_per_clip"] = round(own.flops / batch_size / 1e9, 1)
    row["repeated_gflop_per_clip"] = round(own.repeated_flops / batch_size / 1e9, 1)
    row["recomputed_gflop_per_clip"] = round((account.flops - own.flops) / batch_size / 1e9, 1)
    row["launches"] = account.launches
    return row


def compiled_places(table: list[Point], every: bool) -> list[int]:
    """Of the points whose compiled step is predicted too, which takes a minute each; an interpreter has no program."""
    if triton.knobs.runtime.interpret:
        return []
    return [
        place
        for place, point in enumerate(table)
        if is_default(point) and (every or not point.config.activation_checkpointing)
    ]


def compiled_gib(config: ModelConfig, batch_size: int) -> float:
    return round(in_fresh_process(compiled_bytes, config, batch_size) / 2**30, 3)


def compiled_bytes(config: ModelConfig, batch_size: int) -> int:
    """For a process of its own, in which there is then no GPU. Imported earlier, torch 2.11's Inductor would ask for
    one, and a process that is forked after that may not use it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from benchmarks.gpu.program import compiled_peak

    return compiled_peak(config, batch_size)


def _sampler(config: ModelConfig) -> str:
    dtype = "bf16" if config.sampler_autocast else "fp32"
    return f"{config.sampler} {config.sampler_depth}×{config.sampler_dimension} {dtype}"


def loaded_per_clip(config: ModelConfig) -> int:
    return loaded_bytes(config, DataConfig.prefetch, STORED_PIXELS)


def largest_batch(config: ModelConfig, ample: Account, capacity: float) -> int:
    """Clips that fit into `capacity` bytes with what DALI holds of them, from the account of AMPLE_BATCH."""
    per_clip = (ample.peak_bytes - ample.fixed_bytes) / AMPLE_BATCH + loaded_per_clip(config)
    return max(0, int((capacity - RESERVE_GPU - ample.fixed_bytes) / per_clip))


def measure_on_cpu(config: ModelConfig, repetitions: int) -> tuple[dict[str, int], Timing, float]:
    """Bytes saved for backward by part, the time of a step and the CPU time of a clip in ms, at CPU_BATCH."""
    device = torch.device("cpu")
    step, clip = PretrainingStep(AdaMAE(config)), noise_clip(config, CPU_BATCH, device)
    with saved_bytes(step.model, (clip,)) as saved:
        loss = step.loss(clip)
    loss.backward()
    step.update()
    start = time.process_time()
    timing = time_calls(partial(step, clip), device, warmup=0, repetitions=repetitions)
    return saved, timing, (time.process_time() - start) * 1e3 / repetitions / CPU_BATCH


def measure_on_gpu(config: ModelConfig, batch_size: int, repetitions: int, compiled: bool) -> tuple[Row, Timing]:
    device = torch.device("cuda")
    with device:
        step = PretrainingStep(AdaMAE(config), compiled)
    take = partial(step, noise_clip(config, batch_size, device))
    time_calls(take, device, warmup=3, repetitions=1)
    torch.cuda.reset_peak_memory_stats(device)
    timing = time_calls(take, device, warmup=0, repetitions=repetitions)
    free, total = torch.cuda.mem_get_info(device)
    found = {
        "measured_peak_gib": torch.cuda.max_memory_allocated(device),
        "reserved_peak_gib": torch.cuda.max_memory_reserved(device),
        "driver_used_gib": total - free,
    }
    return {name: round(size / 2**30, 3) for name, size in found.items()}, timing


def fits(config: ModelConfig, batch_size: int, capacity_gb: float) -> bool:
    """Whether two steps run where PyTorch may allocate `capacity_gb` less what a GPU and DALI hold besides."""
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    room = capacity_gb * 1e9 - RESERVE_GPU - batch_size * loaded_per_clip(config)
    torch.cuda.set_per_process_memory_fraction(room / total, device)
    try:
        with device:
            step = PretrainingStep(AdaMAE(config))
        clip = noise_clip(config, batch_size, device)
        for _ in range(2):
            step(clip)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return False
    return True


def speed_columns(timing: Timing, batch_size: int, row: Row, matmul: float) -> Row:
    """What checkpointing computes once more counts as time, not as work; what attention repeats, in one of two MFUs."""
    tflops = row["gflop_per_clip"] * batch_size / timing.median_ms
    once = tflops - row["repeated_gflop_per_clip"] * batch_size / timing.median_ms
    found = {"tflops": round(tflops, 3), "mfu": round(tflops / matmul, 3), "mfu_once": round(once / matmul, 3)}
    return {**timing.columns(batch_size), **found}


def cpu_columns(point: Point, row: Row, repetitions: int, matmul: float) -> Row:
    saved, timing, cpu_ms = in_fresh_process(measure_on_cpu, point.config, repetitions)
    predicted = predict(point.config, CPU_BATCH, on_gpu=False, with_flops=False).saved
    off = max(abs(saved[part] - predicted[part]) for part in saved)
    require(
        "the bytes that an actual step saves for its backward are those predicted without one",
        off <= 0.01 * sum(predicted.values()),
        f"{point.config.masking} {point.config.mask_ratio}: counted {saved}, predicted {predicted}",
    )
    speed = speed_columns(timing, CPU_BATCH, row, matmul)
    return {"timed_batch_size": CPU_BATCH, **speed, "cpu_ms_per_clip": round(cpu_ms, 1)}


def gpu_columns(point: Point, row: Row, repetitions: int, matmul: float) -> Row:
    found: Row = {}
    batch_size = row["batch_size"]
    for compiled in (False, True) if is_default(point) else (False,):
        columns, timing = in_fresh_process(measure_on_gpu, point.config, batch_size, repetitions, compiled)
        columns |= speed_columns(timing, batch_size, row, matmul)
        predicted = row["compiled_predicted_peak_gib" if compiled else "predicted_peak_gib"]
        columns["prediction_error"] = round(predicted / columns["measured_peak_gib"] - 1, 3)
        found |= {f"compiled_{name}": value for name, value in columns.items()} if compiled else columns
    if is_default(point):
        total = torch.cuda.get_device_properties(0).total_memory
        for capacity in (capacity for capacity in CAPACITIES_GB if capacity * 1e9 <= total):
            tried = in_fresh_process(fits, point.config, row[f"largest_batch_{capacity}gb"], capacity)
            found[f"largest_batch_{capacity}gb_tried"] = "fits" if tried else "does not fit"
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--batch-size", type=int, default=16, help="clips that memory is predicted for")
    parser.add_argument("--config", type=Path, help="of a run, whose one step is predicted instead of the table")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="with --config, as of train.py")
    parser.add_argument("--repetitions", type=int, help="timed steps of a point; default 20 on a GPU, 2 on a CPU")
    parser.add_argument("--all", action="store_true", help="also what takes long: on 2 CPU cores some minutes more")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu> or .../cpu")
    options = parser.parse_args(arguments)
    if options.batch_size < 1:
        raise InputError(f"--batch-size is {options.batch_size}: give a whole number of at least 1")
    if options.overrides and options.config is None:
        raise InputError(f"{options.overrides[0]} changes a run: say which one, --config configs/x.yaml")
    if options.config is not None:
        log(of_run(options.config, options.overrides, options.batch_size))
        return

    device = choose_device()
    on_gpu = device.type == "cuda"
    about = describe_machine(device)
    about["precision"] = choose_precision(device, "bf16")
    about["matmul_tflops"] = matmul = round(matmul_tflops(device, about["precision"]), 2)
    table = points(options.size, options.all)
    folder = options.output or results_folder(device)
    rows: list[Row] = []

    def report() -> None:
        write_results(folder, "memory_vs_ratio", rows, about, notes(on_gpu))
        draw(rows, folder / "memory_vs_ratio.png", options.batch_size)

    compiled: dict[int, Future] = {}
    with ThreadPoolExecutor(2) as beside:
        predicted = side_by_side(partial(predicted_row, batch_size=options.batch_size), table)
        for row in progress_bar(predicted, unit="point", desc="predicted", total=len(table)):
            rows.append(row)
            if len(rows) in (len(RATIOS), len(table)):
                report()
            if len(rows) == len(RATIOS):  # the first ones are not to wait for it
                for place in compiled_places(table, options.all or on_gpu):
                    compiled[place] = beside.submit(compiled_gib, table[place].config, options.batch_size)
    for place, found in compiled.items():
        rows[place]["compiled_predicted_peak_gib"] = found.result()
    for point, row in progress_bar(list(zip(table, rows, strict=True)), unit="point", desc="measured"):
        if on_gpu:
            row.update(gpu_columns(point, row, options.repetitions or 20, matmul))
        elif point.measured_on_cpu:
            row.update(cpu_columns(point, row, options.repetitions or 2, matmul))
        if on_gpu or point.measured_on_cpu:
            report()
    print(f"wrote {folder}/memory_vs_ratio.json and .png")


def of_run(config: Path, overrides: list[str], batch_size: int) -> str:
    """What a step takes, by part and as train.py says it before its first one; and the largest batch that fits."""
    run = parse(["--config", str(config), "data.shards=none", *overrides])
    if run.task != "pretrain":
        raise InputError(f"{config} is of task={run.task}, and what is predicted here is pre-training")
    on_gpu = run.device != "cpu"
    account = predict(run.model, batch_size, on_gpu)
    parts = ", ".join(f"{label} {size / 2**30:.2f}" for label, size in account.at_peak.items() if size)
    ample = predict(run.model, AMPLE_BATCH, on_gpu, with_flops=False)
    largest = {size: largest_batch(run.model, ample, size * 1e9) for size in CAPACITIES_GB}
    fit = ", ".join(f"{clips} in {size} GB" for size, clips in largest.items())
    where = "on a GPU" if on_gpu else "on this CPU"
    return f"a step of {batch_size} clips takes {gib(account.peak_bytes)} {where} ({parts}); the most that fit: {fit}"


def notes(on_gpu: bool) -> list[str]:
    said = [
        "`saved_*`: bytes kept for the backward pass, by the part that keeps them. `at_peak_*`: what is alive at the"
        " moment of the step when most is; they add up to `predicted_peak_gib`, what PyTorch allocates. `launches`:"
        " operators of its forward and backward passes.",
        "`compiled_predicted_peak_gib`: likewise, of the program that torch.compile makes for a GPU;"
        " `ddp_predicted_peak_gib`: with gradients in DistributedDataParallel's buckets, in each of several processes.",
        "`loaded_mib`: what DALI holds besides, of clips that are on their way, from shards of 342×256."
        f" `largest_batch_*`: predicted, with that, and with {RESERVE_GPU / 1e9} GB held back for the CUDA context,"
        " NCCL and the allocator's fragmentation.",
        "`paper_gb`: the paper's tables, ViT-Base at batch 16, SSv2.",
        "`mfu`: the step's own arithmetic, without what checkpointing computes once more (`recomputed_gflop_per_clip`),"
        " against the rate that one large matrix product sustained in the same run; `mfu_once`: also without the scores"
        " that attention makes once more in its backward pass (`repeated_gflop_per_clip`).",
    ]
    if on_gpu:
        return [*said, "`driver_used_gib`: what the driver says is used of the GPU's memory, after the last step."]
    return [
        *said,
        "No GPU was at hand: GPU memory is predicted, and how far such a prediction errs on a GPU was not measured"
        " here; it is of a step in bf16. Times are of this CPU, in `precision`,"
        f" at batch {CPU_BATCH}, where the saved bytes were counted and agree with those predicted for it."
        " `cpu_ms_per_clip` is over all threads, and what other programs disturb least.",
    ]


if __name__ == "__main__":
    run_command(main)
