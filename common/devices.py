"""The device of a command, its precision, and what to do when its memory runs out."""

import ctypes
import os
import platform
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from adamae.common.errors import InputError

Precision = Literal["bf16", "fp32"]

# The first GPUs with bf16 (Ampere).
MIN_CAPABILITY = (8, 0)
DRIVERS = (
    "PyTorch for CUDA 13 needs driver 580 or newer, PyTorch for CUDA 12 driver 525 or newer"
    " (docs/clusters.md)"
)
# What PyTorch says where there is no GPU, rather than one that is out of order.
HAS_NO_GPU = ("no NVIDIA driver", "No CUDA GPUs are available", "not compiled with CUDA")


def nvml_answers() -> bool:
    """Return whether NVIDIA's management library works; in some containers and VMs it does not."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2() == 0
    except (OSError, AttributeError):
        return False


# Expandable segments avoid fragmentation. PyTorch reads this at its first CUDA allocation; torch
# 2.13 to 2.15 then ask NVML about the GPU, and end with an internal assertion or a segmentation
# fault where it does not answer.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys() and nvml_answers():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def is_structure_only() -> bool:
    """Return whether modules are made without memory, so that weights need not be read.

    That is under `torch.device("meta")`, where the memory of a step is predicted.
    """
    return torch.get_default_device().type == "meta"


def choose_device(kind: str = "auto", index: int = 0) -> torch.device:
    """Return the CPU or a GPU; `kind` is auto (a GPU if there is one), cpu or cuda.

    Raise InputError where there is no such GPU, or PyTorch or the kernels here cannot use it.
    """
    if kind == "cpu":
        return torch.device("cpu")
    # PyTorch also warns of what the errors here are about.
    with warnings.catch_warnings(action="ignore"):
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        reason = "" if num_gpus > 0 else explain_missing_gpu()
        if index < num_gpus:
            check_capability(index)
    if num_gpus == 0:
        if kind == "auto" and any(words in reason for words in HAS_NO_GPU):
            return torch.device("cpu")
        advice = DRIVERS if "too old" in reason else "see what nvidia-smi says"
        raise InputError(
            f"device is {kind}, but PyTorch {torch.__version__} can use no GPU here ({reason}):"
            f" {advice}, or set device to cpu"
        )
    if index >= num_gpus:
        problem = f"PyTorch finds {num_gpus} GPUs on this node, none for local rank {index}"
        raise InputError(f"{problem}: start fewer processes")
    return torch.device("cuda", index)


def explain_missing_gpu() -> str:
    """Return PyTorch's reason for not using a GPU, without its advice."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        # The first sentence of the first line.
        reason = str(error).partition(". ")[0].partition("\n")[0]
        if visible is not None:
            reason += f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        return reason
    return "No CUDA GPUs are available"


def check_capability(index: int) -> None:
    """Raise InputError for a GPU too old for the kernels here, or too new for this PyTorch."""
    major, minor = torch.cuda.get_device_capability(index)
    architectures = torch.cuda.get_arch_list()
    is_supported = any(runs_on(architecture, major, minor) for architecture in architectures)
    if (major, minor) < MIN_CAPABILITY or not is_supported:
        min_capability = ".".join(map(str, MIN_CAPABILITY))
        raise InputError(
            f"GPU {index}, {torch.cuda.get_device_name(index)}, has compute capability"
            f" {major}.{minor}: the kernels here need {min_capability} or more, and PyTorch"
            f" {torch.__version__} is built for {', '.join(architectures)}; use another GPU or"
            " PyTorch, or set device to cpu"
        )


def runs_on(architecture: str, major: int, minor: int) -> bool:
    """Return whether code for an architecture of torch.cuda.get_arch_list runs on a GPU.

    A program runs on its own and later GPUs of its generation: sm_80 on 8.0 and 8.9. Portable code
    runs on all later ones: compute_80 also on 9.0 (CUDA C++ Programming Guide, 3.1).
    """
    # sm_90a has features of 9.0 alone; PyTorch's own kernels do without them.
    kind, number = architecture.rstrip("af").split("_")
    is_earlier = int(number) <= 10 * major + minor
    is_same_generation = int(number) // 10 == major
    return is_earlier and (kind == "compute" or is_same_generation)


def load_cuda_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that PyTorch uses, for functions that PyTorch does not offer."""
    version = torch.version.cuda or ""
    major = version.split(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")


def to_device(
    numbers: Sequence[float] | Sequence[Sequence[int]] | np.ndarray, device: torch.device
) -> Tensor:
    """Copy numbers to the device as int64 or fp32, or in an array's type."""
    # Without pinned memory, a copy waits for all queued GPU work.
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def choose_precision(device: torch.device, configured: Precision) -> Precision:
    """Return the configured precision, but fp32 on CPUs without native bf16.

    Native are AVX-512 BF16 and AMX on x86. Without them bf16 matmuls take 5 to 90 times as long as
    fp32 (ViT-Base's decoder, 2 Zen 3 cores).
    """
    if configured == "fp32" or device.type != "cpu":
        return configured
    if not torch.backends.mkldnn.is_available():
        return "fp32"
    is_native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if platform.machine() in ("x86_64", "AMD64"):
        # oneDNN claims support on any AVX-512 CPU; without these instructions it runs at a fifth of
        # fp32's speed.
        has_avx512 = torch.cpu._is_avx512_bf16_supported()
        is_native = is_native and (has_avx512 or torch.cpu._is_amx_tile_supported())
    return "bf16" if is_native else "fp32"


def autocast_to(device: torch.device, configured: Precision) -> torch.autocast:
    """Return a context in which products are made in the precision of choose_precision.

    Weights stay in fp32.
    """
    is_bf16 = choose_precision(device, configured) == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=is_bf16)


def get_device_name(device: torch.device) -> str:
    """Return the model name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    # ARM's kernels do not tell the name.
    if model is None:
        return platform.machine()
    return model[1]


@contextmanager
def explain_out_of_memory(advice: str) -> Iterator[None]:
    """Turn PyTorch's out-of-memory error into an InputError that ends with `advice`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # "CUDA out of memory. Tried to allocate …. GPU 0 has a total capacity of …", then advice.
        facts = str(error).split(". ")
        raise InputError(f"{'; '.join(facts[:3])}: {advice}") from error
