"""The device of a command, its precision, and what to do when its memory runs out."""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from common.errors import InputError

Precision = Literal["bf16", "fp32"]

# Expandable segments avoid fragmentation. PyTorch reads this at its first CUDA allocation.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def choose_device(kind: str = "auto", index: int = 0) -> torch.device:
    """Return the CPU or the GPU number `index`; `kind` is auto (a GPU if there is one), cpu or cuda."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return torch.device("cpu")
    if not count:
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
        raise InputError(
            f"device is {kind}, but PyTorch finds no GPU: it {build}; check the driver with nvidia-smi, or set device"
            " to cpu or auto"
        )
    if index >= count:
        raise InputError(f"PyTorch finds {count} GPUs on this node, none for local rank {index}: start fewer processes")
    return torch.device("cuda", index)


def add_device_index(device: torch.device) -> torch.device:
    """Replace `cuda` by this thread's current GPU: in other threads, the current GPU is the first one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def to_device(numbers: Sequence[float] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy numbers to the device as int64 or fp32. From pinned memory: other copies wait for all queued GPU work."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def choose_precision(device: torch.device, wanted: Precision) -> Precision:
    """Return fp32 on CPUs without native bf16 (AVX-512 BF16 or AMX on x86), else the wanted precision.

    Without native support bf16 matmuls take 5 to 90 times as long as fp32 (ViT-Base's decoder, 2 Zen 3 cores).
    """
    if wanted == "fp32" or device.type != "cpu":
        return wanted
    supported = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if platform.machine() in ("x86_64", "AMD64"):
        # oneDNN claims support on any AVX-512 CPU; without these instructions it runs at a fifth of fp32's speed.
        supported = supported and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return "bf16" if supported else "fp32"


def autocast_to(device: torch.device, wanted: Precision) -> torch.autocast:
    """Return an autocast context: bf16 if wanted and supported; weights stay in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=choose_precision(device, wanted) == "bf16")


def get_device_name(device: torch.device) -> str:
    """Return the model name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if platform.system() == "Linux" else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


@contextmanager
def explain_out_of_memory(advice: str) -> Iterator[None]:
    """Turn PyTorch's out-of-memory error into an InputError that ends with `advice`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        facts = str(error).split(". ")  # "CUDA out of memory. Tried to allocate … . GPU 0 has a total capacity of … ."
        raise InputError(f"{'; '.join(facts[:3])}: {advice}") from error
