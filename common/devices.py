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

MIN_CAPABILITY = (8, 0)  # for bf16
DRIVERS = "PyTorch for CUDA 13 needs driver 580 or newer, PyTorch for CUDA 12 driver 525 or newer (docs/clusters.md)"
# PyTorch's reasons for which there is no GPU to be used, rather than one that is out of order.
HAS_NO_GPU = ("no NVIDIA driver", "No CUDA GPUs are available", "not compiled with CUDA")


def nvml_answers() -> bool:
    """Find out whether NVIDIA's management library works; in some virtual machines and containers it does not."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2() == 0
    except (OSError, AttributeError):
        return False


# Expandable segments avoid fragmentation. PyTorch reads this at its first CUDA allocation; torch 2.13 to 2.15 then ask
# NVML about the GPU, and end with an internal assertion or a segmentation fault where it does not answer.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys() and nvml_answers():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def choose_device(kind: str = "auto", index: int = 0) -> torch.device:
    """Return the CPU or the GPU number `index`; `kind` is auto (a GPU if there is one), cpu or cuda.

    Raise InputError where there is no such GPU, or PyTorch or the kernels here cannot use it.
    """
    if kind == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(action="ignore"):  # of what is said here in one sentence
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        reason = "" if count else explain_missing_gpu()
        if index < count:
            check_capability(index)
    if not count:
        if kind == "auto" and any(words in reason for words in HAS_NO_GPU):
            return torch.device("cpu")
        advice = DRIVERS if "too old" in reason else "see what nvidia-smi says"
        raise InputError(
            f"device is {kind}, but PyTorch {torch.__version__} can use no GPU here ({reason}): {advice}, or set device"
            " to cpu"
        )
    if index >= count:
        raise InputError(
            f"PyTorch finds {count} GPUs on this node, none for local rank {index}: start fewer processes"
        )
    return torch.device("cuda", index)


def explain_missing_gpu() -> str:
    """Return PyTorch's reason for not using a GPU, without its advice."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition(". ")[0].partition("\n")[0]
        return reason if visible is None else f"{reason}; CUDA_VISIBLE_DEVICES is {visible!r}"
    return "No CUDA GPUs are available"


def check_capability(index: int) -> None:
    """Raise InputError where a GPU is older than the kernels here need, or newer than what PyTorch was built for."""
    major, minor = torch.cuda.get_device_capability(index)
    # A program (sm_…) runs on its own and later GPUs of its generation, portable code (compute_…) on all later ones.
    built_for = (arch.rstrip("af").split("_") for arch in torch.cuda.get_arch_list())
    is_known = any(
        int(number) <= 10 * major + minor and (kind == "compute" or int(number) // 10 == major)
        for kind, number in built_for
    )
    if (major, minor) < MIN_CAPABILITY or not is_known:
        raise InputError(
            f"GPU {index}, {torch.cuda.get_device_name(index)}, has compute capability {major}.{minor}: the kernels"
            f" here need {'.'.join(map(str, MIN_CAPABILITY))} or more, and PyTorch {torch.__version__} is built for"
            f" {', '.join(torch.cuda.get_arch_list())}; use another GPU or PyTorch, or set device to cpu"
        )


def to_device(
    numbers: Sequence[float] | Sequence[Sequence[int]] | np.ndarray, device: torch.device
) -> Tensor:
    """Copy numbers to the device as int64 or fp32, or in an array's type.

    From pinned memory: other copies wait for all queued GPU work.
    """
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def choose_precision(device: torch.device, wanted: Precision) -> Precision:
    """Return fp32 on CPUs without native bf16 (AVX-512 BF16 or AMX on x86), else the wanted precision.

    Without native support bf16 matmuls take 5 to 90 times as long as fp32 (ViT-Base's decoder, 2 Zen 3 cores).
    """
    if wanted == "fp32" or device.type != "cpu":
        return wanted
    supported = (
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if platform.machine() in ("x86_64", "AMD64"):
        # oneDNN claims support on any AVX-512 CPU; without these instructions it runs at a fifth of fp32's speed.
        supported = supported and (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        )
    return "bf16" if supported else "fp32"


def autocast_to(device: torch.device, wanted: Precision) -> torch.autocast:
    """Return an autocast context: bf16 if wanted and supported; weights stay in fp32."""
    return torch.autocast(
        device.type, torch.bfloat16, enabled=choose_precision(device, wanted) == "bf16"
    )


def get_device_name(device: torch.device) -> str:
    """Return the model name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = re.findall(
        r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    return models[0] if models else platform.machine()


@contextmanager
def explain_out_of_memory(advice: str) -> Iterator[None]:
    """Turn PyTorch's out-of-memory error into an InputError that ends with `advice`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        facts = str(error).split(
            ". "
        )  # "CUDA out of memory. Tried to allocate … . GPU 0 has a total capacity of … ."
        raise InputError(f"{'; '.join(facts[:3])}: {advice}") from error
