"""What this machine offers a training run: driver, rates of copies, products and attention.

    python benchmarks/gpu/probe.py [--output FOLDER]

Needs nothing but PyTorch and this repository's own plain modules; also runs, and says what is missing, without a GPU.
"""

import os
import shutil
import subprocess

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.arguments import ArgumentParser
from benchmarks.harness import Report, Row, copy_gb_per_second, matmul_tflops, print_table, time_calls
from common.devices import choose_device, choose_precision, find_attention_kernel
from common.errors import run_command

PACKAGES = ("nvidia-dali-cuda130", "av", "webdataset", "jsonargparse", "torchao", "torchcodec", "timm", "transformers")
ATTENTION = (
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    *(SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION),
)
HEADS = {"decoder": (6, 64), "sampler": (8, 96)}  # and their width, of ViT-Base's parts that see all tokens


def main(arguments: list[str] | None = None) -> None:
    options = ArgumentParser(__doc__).parse_args(arguments)
    device = choose_device()
    rows = [*driver(), *rates(device), *attention(device)]
    Report("gpu_probe", options.output, device, (), PACKAGES, cores=len(os.sched_getaffinity(0))).write(rows)
    print_table(rows)


def row(what: str, figure: float | str | None, unit: str = "") -> Row:
    return {"what": what, "figure": figure, "unit": unit}


def driver() -> list[Row]:
    """What the driver says of every GPU that it shows."""
    if shutil.which("nvidia-smi") is None:
        return [row("driver", "nvidia-smi is not here")]
    asked = ("driver_version", "name", "memory.total", "power.limit", "clocks.max.sm", "pcie.link.gen.current")
    told = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"], capture_output=True, text=True
    )
    lines = told.stdout.splitlines() if told.returncode == 0 else [(told.stderr or told.stdout).strip()]
    return [row(f"driver of GPU {number}: {', '.join(asked)}", line) for number, line in enumerate(lines)]


def rates(device: torch.device) -> list[Row]:
    found = [row("copy on the device", round(copy_gb_per_second(device), 1), "GB/s")]
    if device.type == "cuda":
        pinned = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True)
        place = torch.empty_like(pinned, device=device)
        up = time_calls(lambda: place.copy_(pinned, non_blocking=True), device, warmup=3, repetitions=20)
        found.append(row("copy from pinned memory", round(pinned.nbytes / up.median_ms / 1e6, 1), "GB/s"))
    precision = choose_precision(device, "bf16")
    return [*found, row(f"large matrix product, {precision}", round(matmul_tflops(device, precision), 2), "TFLOP/s")]


def attention(device: torch.device) -> list[Row]:
    """Forward and backward by each kernel, 16 clips in bf16."""
    found: list[Row] = []
    for part, (heads, width) in HEADS.items() if device.type == "cuda" else ():
        shape = (16, heads, 1568, width)
        q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        found.append(row(f"attention of the {part}, PyTorch's choice", find_attention_kernel(q)))

        def both_passes(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))

        for kernel in ATTENTION:
            what = f"attention of the {part}, {kernel.name.removesuffix('_ATTENTION').lower()}"
            try:
                with sdpa_kernel(kernel):
                    timing = time_calls(both_passes, device, warmup=3, repetitions=20)
                found.append(row(what, round(timing.median_ms, 3), "ms"))
            except RuntimeError as error:
                found.append(row(what, str(error).splitlines()[0]))
    return found


if __name__ == "__main__":
    run_command(main)
