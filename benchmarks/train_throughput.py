"""Compare the speed of our training step with the published AdaMAE's and Hugging Face's VideoMAE's.

    python benchmarks/train_throughput.py [--batch-size N ...] [--size base] [--compile] [--output FOLDER]

Same machine, size, mask ratio and AdamW, bf16 autocast (fp32 on a CPU without native bf16). First, the losses for the
same weights, clips and masks must be equal. Every implementation has a process of its own in every round, rounds
alternate between them, and the quartiles are over all rounds. On a GPU each is timed at every batch size that fits.
"""

import argparse
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import common.openmp  # noqa: F401

import torch

from benchmarks.accounting import Account, predict
from benchmarks.harness import (
    Row,
    Timing,
    call_times,
    describe_machine,
    in_fresh_process,
    matmul_tflops,
    print_table,
    require,
    results_folder,
    write_results,
)
from benchmarks.peers import steps
from benchmarks.step import PretrainingStep, noise_clip
from common.devices import choose_device, choose_precision
from common.errors import InputError, run_command
from common.progress import progress_bar
from model.adamae import AdaMAE
from model.config import SIZES, ModelConfig
from training.config import Compile

GPU_BATCHES = (16, 32, 64, 128, 256)
CPU_BATCHES = (2,)
OURS: dict[str, Compile] = {"ours": False, "ours, compiled": True, "ours, graphs": "reduce-overhead"}
LARGEST_BATCH_OF_GRAPHS = 32  # larger ones keep a GPU busy without
GPU_WARM_UP, GPU_REPETITIONS, CPU_REPETITIONS = 10, 30, 4
LOSS_TOLERANCE = 1e-4  # relative, in fp32


@dataclass(frozen=True)
class Measurement:
    milliseconds: list[float]
    cpu_ms: float  # of one step, over all threads: what other programs on the machine disturb least
    peak_memory_gib: float  # GPU: most allocated; CPU: most resident of the whole process, Python included
    driver_used_gib: float | None = None


def check_losses(size: str, device: torch.device) -> None:
    """Require the same loss for the same weights, clip and mask, in fp32 without dropout."""
    base = ModelConfig(size=size)  # type: ignore[arg-type]
    for config, name in ((base, "naive"), (replace(base, masking="random", mask_ratio=0.9), "hugging_face")):
        with device:
            model = AdaMAE(config).eval()
        clip = noise_clip(config, 1, device)
        with torch.no_grad():
            ours = model(clip, 0, 0)
            mask = torch.zeros(1, config.num_tokens, dtype=torch.bool, device=device)
            theirs = getattr(steps, name)(model)(clip, mask.scatter_(1, ours.masked_ids, True)).item()
        off = abs(theirs / ours.loss.item() - 1)
        require(f"{name} has our loss", off < LOSS_TOLERANCE, f"{theirs:.6f} against our {ours.loss.item():.6f}")


def measure(implementation: str, config: ModelConfig, batch_size: int, repetitions: int) -> Measurement | None:
    """Measure in a process of its own; None if the batch does not fit into the GPU's memory."""
    device = choose_device()
    clip = noise_clip(config, batch_size, device)
    try:
        step = _step(implementation, config, clip)
        # On a GPU the first ones compile and tune, the next ones bring it to its usual clock.
        call_times(step, device, warmup=GPU_WARM_UP if device.type == "cuda" else 0, repetitions=1)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # compiling and tuning take memory too, once
        start = time.process_time()
        milliseconds = call_times(step, device, warmup=0, repetitions=repetitions)
        cpu_ms = (time.process_time() - start) * 1e3 / repetitions
    except torch.OutOfMemoryError:
        return None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        return Measurement(milliseconds, cpu_ms, peak, (total - free) / 2**30)
    return Measurement(milliseconds, cpu_ms, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30)


def _step(implementation: str, config: ModelConfig, clip: torch.Tensor) -> steps.Step:
    if implementation == "naive AdaMAE":
        return steps.naive_step(config, clip)
    if implementation == "Hugging Face VideoMAE":
        return steps.hugging_face_step(config, clip)
    return partial(PretrainingStep.of(config, clip.device, OURS[implementation]), clip)


def race(
    config: ModelConfig, implementations: list[str], batches: list[int], rounds: int, repetitions: int
) -> Iterator[list[Row]]:
    """Yield the rows so far after every batch size."""
    found: dict[tuple[str, int], list[Measurement]] = {}
    too_large: set[str] = set()
    for batch_size in batches:
        for _ in range(rounds):
            for implementation in implementations:
                if implementation in too_large or (
                    implementation == "ours, graphs" and batch_size > LARGEST_BATCH_OF_GRAPHS
                ):
                    continue
                measured = in_fresh_process(measure, implementation, config, batch_size, repetitions)
                if measured is None:
                    too_large.add(implementation)
                else:
                    found.setdefault((implementation, batch_size), []).append(measured)
        yield make_rows(config, found)


def make_rows(config: ModelConfig, found: dict[tuple[str, int], list[Measurement]]) -> list[Row]:
    rows = []
    for (implementation, batch_size), measurements in found.items():
        timing = Timing.of([ms for measured in measurements for ms in measured.milliseconds])
        row: Row = {"masking": config.masking, "mask_ratio": config.mask_ratio, "implementation": implementation}
        row |= {"batch_size": batch_size, **timing.columns(batch_size)}
        if not torch.cuda.is_available():
            row["cpu_ms_per_clip"] = round(min(measured.cpu_ms for measured in measurements) / batch_size, 1)
        row["peak_memory_gib"] = round(max(measured.peak_memory_gib for measured in measurements), 3)
        if measurements[0].driver_used_gib is not None:
            row["driver_used_gib"] = round(max(measured.driver_used_gib or 0 for measured in measurements), 3)
        rows.append(row)
    return rows


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
    options = _parser().parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    batches = options.batch_size or list(GPU_BATCHES if on_gpu else CPU_BATCHES)
    repetitions = GPU_REPETITIONS if on_gpu else CPU_REPETITIONS
    if options.repetitions is not None:
        repetitions = options.repetitions
    if min([*batches, options.rounds, repetitions]) < 1:
        raise InputError("--batch-size, --rounds and --repetitions must be whole numbers of at least 1")
    about = describe_machine(device)
    check_losses(options.size, device)
    about["checked"] = f"losses of all implementations equal within {LOSS_TOLERANCE}, fp32, same weights, clip and mask"
    about["precision"] = choose_precision(device, "bf16")
    about["matmul_tflops"] = matmul = round(matmul_tflops(device, about["precision"]), 2)

    base = ModelConfig(size=options.size)
    ours = list(OURS) if on_gpu else list(OURS)[: 2 if options.compile else 1]
    races = [(base, "naive AdaMAE"), (replace(base, masking="random", mask_ratio=0.9), "Hugging Face VideoMAE")]
    folder = options.output or results_folder(device)
    rows: list[Row] = []
    for config, baseline in progress_bar(races, unit="race"):
        account, before = predict(config, 1), rows
        for found in race(config, [baseline, *ours], batches, options.rounds, repetitions):
            compare(found, baseline)
            add_utilisation([row for row in found if row["implementation"] != baseline], account, matmul)
            rows = before + found
            write_results(folder, "train_throughput", rows, about, NOTES)
    print_table(rows)


def add_utilisation(rows: list[Row], account: Account, matmul: float) -> None:
    """Add TFLOP/s and MFU of ours: what only the others compute, such as the last block's unread tokens, is no work."""
    for row in rows:
        row["tflops"] = round(account.flops * row["clips_per_second"] / 1e12, 3)
        row["mfu"] = round(row["tflops"] / matmul, 3)
        row["mfu_once"] = round(row["mfu"] * (1 - account.repeated_flops / account.flops), 3)


NOTES = [
    "`speed_up`: clips/s relative to the baseline at its best batch size (naive AdaMAE under adaptive masking,"
    " Hugging Face's VideoMAE under random); on a CPU, clips per second of CPU time, by `cpu_ms_per_clip`, the least of"
    " all rounds over all threads: what other programs take disturbs the other columns of time. `memory_ratio`: peak"
    " memory against the baseline's at the same batch size; on a CPU that of the whole process, Python included.",
    "`mfu`: of the rate that one large matrix product sustained in the same run; `mfu_once`: without the scores that"
    " attention makes once more in its backward pass. `driver_used_gib`: what the driver says is used of the GPU.",
]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--batch-size", type=int, nargs="+", help="default: 16 to 256 on a GPU, 2 on a CPU")
    parser.add_argument("--compile", action="store_true", help="also ours compiled, on a CPU (on a GPU it always is)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--repetitions", type=int, help="timed steps of a implementation in a round; default: 30 on a GPU, 4 on a CPU"
    )
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu> or .../cpu")
    return parser


if __name__ == "__main__":
    run_command(main)
