"""Compare the speed of a training step with the published AdaMAE's and Hugging Face's VideoMAE's.

    python benchmarks/train_throughput.py [--batch-size N [N ...]] [--size base] [--compile] [--output FOLDER]

Same machine, size, mask ratio and AdamW, bf16 autocast (fp32 on a CPU without native bf16). First, the losses for the
same weights, clips and masks must be equal. Every implementation has a process of its own in every round, rounds
alternate between them, and the quartiles are over all rounds. At a second batch size, and with CUDA graphs, only
adaptive masking's compiled step is measured, which is what is fastest.
"""

import resource
from dataclasses import replace
from functools import partial

import torch

from benchmarks.accounting import predict
from benchmarks.arguments import ArgumentParser, at_least
from benchmarks.harness import Report, Row, Timing, in_fresh_process, matmul_tflops, noise_clip, print_table, require
from benchmarks.peers import steps
from benchmarks.step import PretrainingStep, measure_step
from common.devices import choose_device, choose_precision, explain_out_of_memory
from common.errors import run_command
from common.progress import progress_bar
from model.adamae import AdaMAE
from model.config import SIZES, ModelConfig
from training.config import Compile

EAGER, COMPILED, GRAPHS = "this repository", "this repository, compiled", "this repository, CUDA graphs"
COMPILE: dict[str, Compile] = {EAGER: False, COMPILED: True, GRAPHS: "reduce-overhead"}
PUBLISHED, HUGGING_FACE = "published step, re-implemented", "Hugging Face VideoMAE"
PEERS = {PUBLISHED: steps.naive_step, HUGGING_FACE: steps.hugging_face_step}
LOSS_TOLERANCE = 1e-4  # relative, in fp32
NOTES = [
    f"`speed_up`: clips/s relative to the baseline ({PUBLISHED}, under adaptive masking, {HUGGING_FACE} under random);"
    " on a CPU, clips per second of CPU time, by `cpu_ms_per_clip`, the least of all rounds over all threads: other"
    " programs disturb the other columns of time. `memory_ratio`: peak memory against the baseline's, at the same batch"
    " size; on a CPU that of the whole process, Python included, with CUDA graphs what PyTorch reserves.",
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


@explain_out_of_memory("lower --batch-size")
def measure(implementation: str, config: ModelConfig, batch_size: int, repetitions: int) -> tuple[Timing, Row]:
    """Measure in a process of its own.

    Memory is on a GPU what is allocated, on a CPU what is resident of the whole process, Python included.
    """
    device = choose_device()
    clip = noise_clip(config, batch_size, device)
    if implementation in PEERS:
        step = PEERS[implementation](config, clip)
    else:
        step = partial(PretrainingStep.of(config, device, COMPILE[implementation]), clip)
    timing, columns = measure_step(step, batch_size, repetitions, device, warmup=11)
    if implementation == GRAPHS:  # what replayed kernels write does not count as allocated
        columns["measured_peak_gib"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 3)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return timing, {"measured_peak_gib": round(resident, 3), **columns}


def make_row(config: ModelConfig, implementation: str, batch_size: int, rounds: list[tuple[Timing, Row]]) -> Row:
    timing = Timing([ms for timing, _ in rounds for ms in timing.milliseconds])
    row: Row = {"masking": config.masking, "mask_ratio": config.mask_ratio, "implementation": implementation}
    row |= {"batch_size": batch_size, **timing.columns(batch_size)}
    found = [columns for _, columns in rounds]
    if "cpu_ms_per_clip" in found[0]:
        row["cpu_ms_per_clip"] = min(columns["cpu_ms_per_clip"] for columns in found)
    return {**row, "peak_memory_gib": max(columns["measured_peak_gib"] for columns in found)}


def compare(rows: list[Row]) -> None:
    """Add the speed-up over the first row, the baseline, and the memory relative to it."""
    for row in rows:
        row["speed_up"] = round(_speed(row) / _speed(rows[0]), 2)
        if row["batch_size"] == rows[0]["batch_size"]:
            row["memory_ratio"] = round(row["peak_memory_gib"] / rows[0]["peak_memory_gib"], 2)


def _speed(row: Row) -> float:
    """Return clips per second; on a CPU, per second of CPU time, which other programs do not disturb."""
    return 1e3 / row["cpu_ms_per_clip"] if "cpu_ms_per_clip" in row else row["clips_per_second"]


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument(
        "--batch-size", type=at_least(1), nargs="+", help="default: 64 and 128 clips on a GPU, 2 on a CPU"
    )
    parser.add_argument("--compile", action="store_true", help="also a compiled step on a CPU, as always on a GPU")
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument(
        "--repetitions", type=at_least(1), help="timed steps in a round; default: 30 on a GPU, 4 on a CPU"
    )
    options = parser.parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    sizes = options.batch_size or ([64, 128] if on_gpu else [2])
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
    done: list[Row] = []
    for config, baseline in progress_bar(races, unit="race"):
        tflop_per_clip = predict(config, 1).flops / 1e12
        found: dict[tuple[str, int], list[tuple[Timing, Row]]] = {(name, sizes[0]): [] for name in (baseline, *own)}
        if config is base:
            found |= {(name, size): [] for size in sizes for name in (*own[1:], *[GRAPHS] * on_gpu)}
        for _ in range(options.rounds):
            for (implementation, size), rounds in found.items():
                rounds.append(in_fresh_process(measure, implementation, config, size, repetitions))
        rows = [make_row(config, implementation, size, rounds) for (implementation, size), rounds in found.items()]
        compare(rows)
        for row in rows[1:]:  # the baseline's unread tokens of the last block, for one, are no work
            row["mfu"] = round(tflop_per_clip * row["clips_per_second"] / matmul, 3)
        done += rows
        report.write(done)
    print_table(done)


if __name__ == "__main__":
    run_command(main)
