"""The device a command works on, and what it says when that one cannot do what is asked of it."""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from common.errors import InputError

# Segments of GPU memory that can grow leave no holes behind them. PyTorch reads this when it first asks for memory.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def choose_device(kind: str = "auto", index: int = 0) -> torch.device:
    """`kind`: auto (a GPU where there is one), cpu or cuda; `index`: which GPU. Raises InputError if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return torch.device("cpu")
    if not count:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
        raise InputError(
            f"device is {kind}, but PyTorch finds no GPU here: it {built}, and nvidia-smi shows whether there is a"
            " driver for that; set device to cpu or auto to go without"
        )
    if index >= count:
        raise InputError(f"this node has {count} GPUs for PyTorch, and process {index + 1} has none: start fewer on it")
    return torch.device("cuda", index)


def numbered(device: torch.device) -> torch.device:
    """`cuda` with the number of the GPU that is current here: another thread's is the first one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def to_device(numbers: Sequence[float] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """In int64, or fp32 for floats. From pinned memory: a copy from any other would wait until the GPU has done all
    that is queued."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


Precision = Literal["bf16", "fp32"]


def usable_precision(device: torch.device, wanted: Precision) -> Precision:
    """fp32 on a CPU that has no units for bf16 (on x86, AVX-512's or AMX's), otherwise the one that is wanted.

    There PyTorch makes products in bf16 number by number: those of ViT-Base's decoder take 5 to 90 times as long as in
    fp32 (2 cores of a Zen 3).
    """
    if wanted == "fp32" or device.type != "cpu":
        return wanted
    return "bf16" if _has_bf16_units() else "fp32"


def _has_bf16_units() -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # oneDNN says yes to any AVX-512, and where that has no such units, makes bf16 at a fifth of fp32's speed (a Xeon).
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return not is_x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def autocast_to(device: torch.device, wanted: Precision) -> torch.autocast:
    """bf16 where it is wanted and usable: matrix products and what reads them; weights stay in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=usable_precision(device, wanted) == "bf16")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if platform.system() == "Linux" else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


@contextmanager
def explain_out_of_memory(advice: str) -> Iterator[None]:
    """Turn what PyTorch raises when the GPU's memory does not suffice into one sentence that ends in `advice`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        found = str(error).split(". ")  # "CUDA out of memory. Tried to allocate … . GPU 0 has a total capacity of … ."
        raise InputError(f"{'; '.join(found[:3])}: {advice}") from error
