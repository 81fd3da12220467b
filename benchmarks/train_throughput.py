"""Compare the speed of a training step with the published AdaMAE's and Hugging Face's VideoMAE's.

    python benchmarks/train_throughput.py [--batch-size N [N ...]] [--size base] [--output FOLDER]

Machine, size, mask ratio and AdamW are the same, and bf16 autocast is (fp32 on a CPU without native
bf16). First, the losses for the same weights, clips and masks must be equal. Every implementation
has a process of its own in every round, rounds alternate between them, and the quartiles are over
all rounds. On a GPU the step is also measured compiled. Larger batches and CUDA graphs are measured
with adaptive masking's compiled step alone, which is the fastest.
"""

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from adamae.benchmarks import harness
from adamae.benchmarks.arguments import ArgumentParser
from adamae.benchmarks.harness import (
    Report,
    Row,
    in_fresh_process,
    matmul_tflops,
    measure_cases,
    print_table,
)
from adamae.benchmarks.peers.steps import HUGGING_FACE, PEERS, PUBLISHED, make_step
from adamae.benchmarks.step import measure_config, measure_step
from adamae.common.arguments import between
from adamae.common.devices import choose_device, choose_precision, explain_out_of_memory
from adamae.common.errors import run_command
from adamae.model.adamae import AdaMAE
from adamae.model.config import SIZES, ModelConfig
from adamae.training.accounting import count_flops
from adamae.training.config import Compile
from adamae.training.timing import noise_clip

EAGER = "this repository"
COMPILED = "this repository, compiled"
GRAPHS = "this repository, CUDA graphs"
COMPILE: dict[str, Compile] = {EAGER: False, COMPILED: True, GRAPHS: "reduce-overhead"}
# The mask ratio and the baseline of each masking: AdaMAE's paper has 0.95, VideoMAE's 0.9.
RACES = {
    "adaptive": (0.95, PUBLISHED),
    "random": (0.9, HUGGING_FACE),
}
# Relative, in fp32, whose sums differ by their order alone. On a tiny model, tests demand 1e-5 to
# 2e-5.
LOSS_TOLERANCE = 1e-4
NOTES = [
    f"`speed_up`: clips/s relative to the baseline ({PUBLISHED}, under adaptive masking,"
    f" {HUGGING_FACE} under random); on a CPU, clips per second of CPU time, by `cpu_ms_per_clip`,"
    " the least of all rounds over all threads: other programs disturb the other columns of time."
    " `memory_ratio`: peak memory against the baseline's, at the same batch size; on a CPU that of"
    " the whole process, Python included, with CUDA graphs what PyTorch reserves.",
    "`mfu`: of the rate that one large matrix product sustained in the same run.",
]


class Case(NamedTuple):
    """One row of the table."""

    masking: str
    implementation: str
    batch_size: int


def make_model_config(size: str, masking: str) -> ModelConfig:
    """Return the model of a race."""
    mask_ratio, _ = RACES[masking]
    choices: Any = {"size": size, "masking": masking}
    return ModelConfig(mask_ratio=mask_ratio, **choices)


def list_cases(batch_sizes: list[int], on_gpu: bool) -> list[Case]:
    """List the races, the baseline first, and what is measured of adaptive masking alone."""
    implementations = [EAGER, COMPILED] if on_gpu else [EAGER]
    cases = []
    for masking, (_, peer) in RACES.items():
        cases += [Case(masking, name, batch_sizes[0]) for name in (peer, *implementations)]
    if on_gpu:
        for batch_size, name in product(batch_sizes, (COMPILED, GRAPHS)):
            cases.append(Case("adaptive", name, batch_size))
    # One of these is in its race already.
    return list(dict.fromkeys(cases))


def check_losses(size: str, device: torch.device) -> None:
    """Require the same loss for the same weights, clip and mask, in fp32 without dropout."""
    # A baseline that computes something else is no baseline. Without dropout, since each code draws
    # other random numbers for it.
    for masking, (_, name) in RACES.items():
        config = make_model_config(size, masking)
        with device:
            model = AdaMAE(config).eval()
        peer = PEERS[name](model).eval()
        clip = noise_clip(config, 1, device)
        with torch.no_grad():
            output = model(clip, 0, 0)
            mask = torch.zeros(1, config.num_tokens, dtype=torch.bool, device=device)
            mask.scatter_(1, output.masked_ids, True)
            loss = peer(peer.prepare(clip), mask).item()
        expected = output.loss.item()
        agrees = abs(loss / expected - 1) < LOSS_TOLERANCE
        harness.require(f"{name} has AdaMAE's loss", agrees, f"{loss:.6f} against {expected:.6f}")


@explain_out_of_memory("lower --batch-size")
def measure(size: str, repetitions: int, case: Case) -> Row:
    """Measure one round of a case; call it in a process of its own.

    Else the peak memory of one implementation would include what another has left behind.
    """
    device = choose_device()
    config = make_model_config(size, case.masking)
    if case.implementation in PEERS:
        clip = noise_clip(config, case.batch_size, device)
        return measure_step(make_step(case.implementation, config, clip), repetitions, device)
    compiled = COMPILE[case.implementation]
    measured = measure_config(config, case.batch_size, repetitions, device, compiled)
    if case.implementation == GRAPHS:
        # What replayed kernels write does not count as allocated.
        measured["peak_memory_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
    return measured


def make_row(case: Case, rounds: list[Row]) -> Row:
    """Summarize the rounds of a case."""
    # Median and quartiles over the steps of all rounds, since the steps that another program delays
    # would pull a mean.
    milliseconds = np.concatenate([measured["milliseconds"] for measured in rounds])
    lower, median, upper = np.quantile(milliseconds, (0.25, 0.5, 0.75)).round(3).tolist()
    mask_ratio, _ = RACES[case.masking]
    row: Row = {
        **case._asdict(),
        "mask_ratio": mask_ratio,
        "step_median_ms": median,
        "step_lower_ms": lower,
        "step_upper_ms": upper,
        "repetitions": len(milliseconds),
        "clips_per_second": case.batch_size / median * 1e3,
        "peak_memory_gib": round(max(measured["peak_memory_gib"] for measured in rounds), 3),
    }
    if not torch.cuda.is_available():
        num_clips = case.batch_size * len(rounds[0]["milliseconds"])
        # The least of all rounds: what disturbs a round can only add CPU time to it.
        seconds = min(measured["cpu_seconds"] for measured in rounds)
        row["cpu_ms_per_clip"] = round(seconds * 1e3 / num_clips, 1)
    return row


def make_rows(bounds: dict[str, float], results: dict[Case, list[Row]]) -> list[Row]:
    """Make a row for each case, with the speed and memory relative to its baseline's.

    bounds: by masking, the clips/s of a step that is nothing but products at the rate of a large
    one.
    """
    rows = [make_row(case, rounds) for case, rounds in results.items()]
    baselines = {row["masking"]: row for row in rows if row["implementation"] in PEERS}
    for row in rows:
        baseline = baselines.get(row["masking"])
        if baseline is not None:
            row["speed_up"] = round(speed(row) / speed(baseline), 2)
            # Speeds per clip may be compared between batch sizes, memory may not.
            if row["batch_size"] == baseline["batch_size"]:
                memory_ratio = row["peak_memory_gib"] / baseline["peak_memory_gib"]
                row["memory_ratio"] = round(memory_ratio, 2)
        # A baseline computes more than the bound counts, such as tokens that nobody reads.
        if row is not baseline:
            row["mfu"] = round(row["clips_per_second"] / bounds[row["masking"]], 3)
    return rows


def speed(row: Row) -> float:
    """Return the clips per second of a row.

    On a CPU it is per second of CPU time, which other programs disturb least.
    """
    if "cpu_ms_per_clip" in row:
        return 1e3 / row["cpu_ms_per_clip"]
    return row["clips_per_second"]


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument(
        "--batch-size", type=between(1), nargs="+", help="default: 64 and 128 on a GPU, 2 on a CPU"
    )
    parser.add_argument("--rounds", type=between(1), default=2)
    parser.add_argument(
        "--repetitions", type=between(1), help="steps per round; default: 30 on a GPU, 4 on a CPU"
    )
    options = parser.parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    report = Report("train_throughput", options.output, device, NOTES)
    check_losses(options.size, device)
    # The product is measured in this very run: a shared or throttled machine is slower at both.
    precision = choose_precision(device, "bf16")
    matmul = round(matmul_tflops(device, precision), 2)
    checked = (
        f"losses of all implementations equal within {LOSS_TOLERANCE}, fp32, same weights, clip and"
        " mask"
    )
    report.about |= {"checked": checked, "precision": precision, "matmul_tflops": matmul}
    bounds = {}
    for masking in RACES:
        flops_per_clip = count_flops(make_model_config(options.size, masking), 1)
        bounds[masking] = matmul * 1e12 / flops_per_clip
    # A step of 128 clips is estimated to take 4 ms less than two of 64 (docs/results.md).
    batch_sizes = options.batch_size or ([64, 128] if on_gpu else [2])
    repetitions = options.repetitions or (30 if on_gpu else 4)
    cases = list_cases(batch_sizes, on_gpu)
    measure_case = partial(in_fresh_process, measure, options.size, repetitions)
    rows = measure_cases(report, cases, measure_case, partial(make_rows, bounds), options.rounds)
    print_table(rows)


if __name__ == "__main__":
    run_command(main)
