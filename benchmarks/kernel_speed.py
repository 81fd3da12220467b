"""How fast the token path's ops are, forward, backward and both, against the published way and the compiled reference.

`python benchmarks/kernel_speed.py`, on a GPU or a CPU. The values of every op, and its gradients, are first compared
with the published way's; where they differ, nothing is reported. GB/s counts what an op has to move, once; the share
is of the bandwidth that a large copy reaches on the same machine, counted the same way.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Row, describe_machine, require, results_folder, time_calls, write_results
from benchmarks.token_path_cases import CASES, Case, Contender, Sizes
from common.devices import choose_device
from common.errors import InputError, run_command
from model.config import ModelConfig

NOTES = [
    "`published`: eager PyTorch with boolean masks (benchmarks/peers/token_path.py). Its sampler is timed up to the"
    " mask, its sampling loss with one Categorical a clip; its patch loss starts from a float clip that is there.",
    "`compiled`: torch.compile of the op's reference, on GPUs at the largest batch and ratio .95. `ours` on a CPU is"
    " the reference.",
    "`backward` runs on a kept graph. patchify has none. `extra_mib`: memory that forward and backward allocate.",
]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, nargs="+", help="default: 32 to 256 on a GPU, 2 and 8 on a CPU")
    parser.add_argument("--mask-ratio", type=float, nargs="+", help="default: .80 to .98 on a GPU, .95 on a CPU")
    parser.add_argument("--op", choices=list(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu> or .../cpu")
    options = parser.parse_args(arguments)
    device = choose_device()
    on_gpu = device.type == "cuda"
    batches = options.batch_size or ([32, 64, 128, 256] if on_gpu else [2, 8])
    ratios = options.mask_ratio or ([0.8, 0.9, 0.95, 0.98] if on_gpu else [0.95])
    if min(batches) < 1 or options.repetitions < 1:
        raise InputError("--batch-size and --repetitions: give whole numbers of at least 1")
    copy = copy_gb_per_second(device)
    print(f"a large copy moves {copy:.0f} GB/s")
    rows: list[Row] = []
    for batch in batches:
        for ratio in ratios:
            sizes = Sizes(ModelConfig(mask_ratio=ratio), batch, device, torch.bfloat16 if on_gpu else torch.float32)
            compiled = on_gpu and batch == max(batches) and ratio == 0.95
            for name in options.op:
                rows += measure(CASES[name](sizes), name, sizes, compiled, options.repetitions, copy)
    about = {**describe_machine(device), "copy_gb_per_second": copy, "model": "base, N = 1568"}
    write_results(options.output or results_folder(device), "kernel_speed", rows, about, NOTES)


def measure(case: Case, name: str, sizes: Sizes, compiled: bool, repetitions: int, copy: float) -> list[Row]:
    check(case, name)
    contenders = {"ours": case.ours, "published": case.published}
    if compiled:
        contenders["compiled"] = Contender(compiled_reference(case), case.ours.learnt)
    rows: list[Row] = []
    for who, contender in contenders.items():
        moved = dict(zip(("forward", "backward", "both"), (*case.num_bytes, sum(case.num_bytes)), strict=True))
        for phase, call in phases(contender).items():
            timing = time_calls(call, sizes.device, warmup=3, repetitions=repetitions)
            rate = moved[phase] / timing.median_ms / 1e6
            row = {"op": name, "batch": sizes.batch, "mask_ratio": sizes.config.mask_ratio, "phase": phase, "who": who}
            row |= {"ms": timing.median_ms, "ms_lower": timing.lower_ms, "ms_upper": timing.upper_ms}
            row |= {"gb_per_second": rate, "share_of_copy": rate / copy, "extra_mib": extra_mib(call, sizes.device)}
            rows.append(row)
    for row in rows:
        first = next(r for r in rows if r["who"] == "ours" and r["phase"] == row["phase"])
        row["ours_is_faster_by"] = row["ms"] / first["ms"]
        print("  ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    return rows


def compiled_reference(case: Case) -> Callable[[], Tensor]:
    reference = torch.compile(case.reference, fullgraph=True, dynamic=False)

    def call() -> Tensor:
        result = reference()
        return result if isinstance(result, Tensor) else result[-1]

    return call


def check(case: Case, name: str) -> None:
    """The published way's values, and its gradients where both have the same ones."""
    got, expected = case.ours.call(), case.published.call()
    require(f"{name} gives what the published way gives", case.agrees(got, expected), describe(got, expected))
    if case.same_gradients:
        gradient = torch.randn_like(expected)
        pairs = zip(
            torch.autograd.grad(got, case.ours.learnt, gradient.to(got.dtype)),
            torch.autograd.grad(expected, case.published.learnt, gradient),
            strict=True,
        )
        for ours, theirs in pairs:
            scale = theirs.float().abs().max().item()
            worst = (ours.float() - theirs.float()).abs().max().item()
            require(f"{name} has the published way's gradients", worst <= 2e-2 * scale, f"off by {worst} of {scale}")


def describe(got: Tensor, expected: Tensor) -> str:
    if got.shape != expected.shape:
        return f"{tuple(got.shape)} against {tuple(expected.shape)}"
    return f"differs by up to {(got.float() - expected.float()).abs().max().item():.3g}"


def phases(contender: Contender) -> dict[str, Callable[[], object]]:
    if not contender.learnt:
        return {"forward": contender.call}
    out = contender.call()
    gradient = torch.ones_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, contender.learnt, gradient, retain_graph=True)

    def both() -> object:
        return torch.autograd.grad(contender.call(), contender.learnt, gradient)

    return {"forward": contender.call, "backward": backward, "both": both}


def extra_mib(call: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def copy_gb_per_second(device: torch.device) -> float:
    source = torch.zeros(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_calls(lambda: target.copy_(source), device, warmup=3, repetitions=20)
    return 2 * source.nbytes / timing.median_ms / 1e6


if __name__ == "__main__":
    run_command(main)
