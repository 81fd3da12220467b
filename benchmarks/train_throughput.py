"""Compare the speed of a training step with the published AdaMAE's and Hugging Face's VideoMAE's.

    python benchmarks/train_throughput.py [--batch-size N ...] [--size base] [--compile] [--output FOLDER]

Same machine, size, mask ratio and AdamW, bf16 autocast (fp32 on a CPU without native bf16). First, the losses for the
same weights, clips and masks must be equal. Every implementation has a process of its own in every round, rounds
alternate between them, and the quartiles are over all rounds. On a GPU each is timed at every batch size that fits.
"""

import math
import resource
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.accounting import predict
from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import Report, Row, Timing, in_fresh_process, matmul_tflops, noise_clip, print_table, require
from benchmarks.peers import steps
from benchmarks.step import PretrainingStep, measure_step
from common.devices import choose_device, choose_precision
from common.errors import run_command
from common.progress import progress_bar
from model.adamae import AdaMAE
from model.config import SIZES, ModelConfig

GPU_BATCHES = (128, 64, 256, 32, 16)  # the most telling first
CPU_BATCHES = (2,)
EAGER, COMPILED = "this repository", "this repository, compiled"
PUBLISHED, HUGGING_FACE = "published step, re-implemented", "Hugging Face VideoMAE"
PEERS = {PUBLISHED: steps.naive_step, HUGGING_FACE: steps.hugging_face_step}
LOSS_TOLERANCE = 1e-4  # relative, in fp32
NOTES = [
    f"`speed_up`: clips/s relative to the baseline at its best batch size ({PUBLISHED}, under adaptive masking,"
    f" {HUGGING_FACE} under random); on a CPU, clips per second of CPU time, by `cpu_ms_per_clip`, the least of"
    " all rounds over all threads: what other programs take disturbs the other columns of time. `memory_ratio`: peak"
    " memory against the baseline's at the same batch size; on a CPU that of the whole process, Python included.",
    "`mfu`: of the rate that one large matrix product sustained in the same run.",
]


def check_losses(size: str, device: torch.device) -> None:
    """Require the same loss for the same weights, clip and mask, in fp32 without dropout."""
    base = ModelConfig(size=size)  # type: ignore[arg-type]
    for config, name in ((base, "naive"), (replace(base, masking="random", mask_ratio=0.9), "hugging_face")):
        with device:
            model = AdaMAE(config).eval()
        clip = noise_clip(config, 1, device)
        with torch.no_grad():
            output = model(clip, 0, 0)
            mask = torch.zeros(1, config.num_tokens, dtype=torch.bool, device=device)
            loss = getattr(steps, name)(model)(clip, mask.scatter_(1, output.masked_ids, True)).item()
        expected = output.loss.item()
        agrees = abs(loss / expected - 1) < LOSS_TOLERANCE
        require(f"{name} has AdaMAE's loss", agrees, f"{loss:.6f} against {expected:.6f}")


def measure(implementation: str, config: ModelConfig, batch_size: int, repetitions: int) -> tuple[Timing, Row] | None:
    """Measure in a process of its own; None if the batch does not fit into the GPU's memory.

    Memory is on a GPU what is allocated, on a CPU what is resident of the whole process, Python included.
    """
    device = choose_device()
    clip = noise_clip(config, batch_size, device)
    try:
        if implementation in PEERS:
            step = PEERS[implementation](config, clip)
        else:
            step = partial(PretrainingStep.of(config, device, implementation == COMPILED), clip)
        timing, columns = measure_step(step, batch_size, repetitions, device, warmup=11)
    except torch.OutOfMemoryError:
        return None
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return timing, {"measured_peak_gib": round(resident, 3), **columns}


def race(
    config: ModelConfig, implementations: list[str], batches: list[int], rounds: int, repetitions: int
) -> Iterator[list[Row]]:
    """Yield the rows so far after every batch size."""
    found: dict[tuple[str, int], list[tuple[Timing, Row]]] = {}
    too_large: dict[str, int] = {}  # the smallest batch that does not fit
    for batch_size in batches:
        for _ in range(rounds):
            for implementation in implementations:
                if batch_size >= too_large.get(implementation, math.inf):
                    continue
                measured = in_fresh_process(measure, implementation, config, batch_size, repetitions)
                if measured is None:
                    too_large[implementation] = batch_size
                else:
                    found.setdefault((implementation, batch_size), []).append(measured)
        yield [make_row(config, *key, measurements) for key, measurements in found.items()]


def make_row(config: ModelConfig, implementation: str, batch_size: int, measurements: list[tuple[Timing, Row]]) -> Row:
    timing = Timing([ms for timing, _ in measurements for ms in timing.milliseconds])
    row: Row = {"masking": config.masking, "mask_ratio": config.mask_ratio, "implementation": implementation}
    row |= {"batch_size": batch_size, **timing.columns(batch_size)}
    found = [columns for _, columns in measurements]
    if "cpu_ms_per_clip" in found[0]:
        row["cpu_ms_per_clip"] = min(columns["cpu_ms_per_clip"] for columns in found)
    return {**row, "peak_memory_gib": max(columns["measured_peak_gib"] for columns in found)}


def compare(rows: list[Row], baseline: str) -> None:
    """Add the speed-up over the baseline at its best batch size, and the memory relative to it at the same one."""
    best = max(_speed(row) for row in rows if row["implementation"] == baseline)
    memory = {row["batch_size"]: row["peak_memory_gib"] for row in rows if row["implementation"] == baseline}
    for row in rows:
        row["speed_up"] = round(_speed(row) / best, 2)
        if row["batch_size"] in memory:
            row["memory_ratio"] = round(row["peak_memory_gib"] / memory[row["batch_size"]], 2)


def _speed(row: Row) -> float:
    """Return clips per second; on a CPU, per second of CPU time, which other programs do not disturb."""
    return 1e3 / row["cpu_ms_per_clip"] if "cpu_ms_per_clip" in row else row["clips_per_second"]


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--batch-size", type=at_least(1), nargs="+", help="default: 16 to 256 on a GPU, 2 on a CPU")
    parser.add_argument("--compile", action="store_true", help="also a compiled step on a CPU, as always on a GPU")
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument(
        "--repetitions", type=at_least(1), help="timed steps in a round; default: 30 on a GPU, 4 on a CPU"
    )
    options = parser.parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    batches = options.batch_size or list(GPU_BATCHES if on_gpu else CPU_BATCHES)
    repetitions = options.repetitions or (30 if on_gpu else 4)
    report = Report("train_throughput", options.output, device, NOTES)
    check_losses(options.size, device)
    precision = choose_precision(device, "bf16")
    matmul = round(matmul_tflops(device, precision), 2)
    checked = f"losses of all implementations equal within {LOSS_TOLERANCE}, fp32, same weights, clip and mask"
    report.about |= {"checked": checked, "precision": precision, "matmul_tflops": matmul}

    base = ModelConfig(size=options.size)
    own = [EAGER, COMPILED] if on_gpu or options.compile else [EAGER]
    races = [(base, PUBLISHED), (replace(base, masking="random", mask_ratio=0.9), HUGGING_FACE)]
    rows: list[Row] = []
    for config, baseline in progress_bar(races, unit="race"):
        tflop_per_clip, before = predict(config, 1).flops / 1e12, rows
        for found in race(config, [baseline, *own], batches, options.rounds, repetitions):
            compare(found, baseline)
            for row in found:
                if row["implementation"] != baseline:  # whose unread tokens of the last block, for one, are no work
                    row["mfu"] = round(tflop_per_clip * row["clips_per_second"] / matmul, 3)
            rows = before + found
            report.write(rows)
    print_table(rows)


if __name__ == "__main__":
    run_command(main)
