"""Missing and unsuitable devices, and those whose memory is full, are named."""

import ctypes
import os
import platform
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adamae.common.devices import (
    autocast_to,
    choose_device,
    choose_precision,
    explain_out_of_memory,
    get_device_name,
)
from adamae.common.errors import InputError
from adamae.training.config import parse
from adamae.training.failures import explain_failures

ROOT = Path(__file__).parents[2]

# In the words of PyTorch's allocator for CUDA.
FULL = (
    "CUDA out of memory. Tried to allocate 4.60 GiB. GPU 0 has a total capacity of 139.81 GiB of"
    " which 2.11 GiB is free. Including non-PyTorch memory, this process has 137.69 GiB memory in"
    " use. If reserved …"
)


@pytest.fixture
def pretend_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets PyTorch find GPUs, and be built for some."""

    def pretend(
        count: int, capability: tuple[int, int] = (9, 0), built_for: Sequence[str] = ("sm_90",)
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [*built_for])

    return pretend


def test_auto_is_a_gpu_where_there_is_one(pretend_gpus: Callable[..., None]) -> None:
    pretend_gpus(0)
    assert choose_device() == torch.device("cpu")
    assert get_device_name(choose_device()) in Path("/proc/cpuinfo").read_text()
    pretend_gpus(4)
    assert choose_device(index=3) == torch.device("cuda", 3)
    assert choose_device("cpu", index=3) == torch.device("cpu")
    with pytest.raises(InputError, match="finds 4 GPUs on this node, none for local rank 4"):
        choose_device("auto", index=4)


def test_a_gpu_of_another_architecture_is_refused(pretend_gpus: Callable[..., None]) -> None:
    for capability, built_for in (
        ((8, 9), ["sm_80", "sm_90"]),
        ((9, 0), ["sm_90a"]),
        ((12, 1), ["compute_120"]),
    ):
        pretend_gpus(4, capability, built_for)
        assert choose_device(index=3) == torch.device("cuda", 3)
    for capability, built_for in (((7, 5), ["sm_75", "sm_80"]), ((12, 0), ["sm_90", "sm_100"])):
        pretend_gpus(4, capability, built_for)
        version = ".".join(map(str, capability))
        architectures = ", ".join(built_for)
        message = f"GPU 3, Tesla T4, has compute capability {version}: .* {architectures};"
        with pytest.raises(InputError, match=message):
            choose_device(index=3)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError(FULL),
            "^CUDA out of memory; Tried to allocate 4.60 GiB; GPU 0 has a total capacity of"
            ".* 2.11 GiB is free: set global_batch to the clips of a step, and lower batch_size",
        ),
        (
            RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_…"),
            "the lines above",
        ),
        (
            RuntimeError("gumbel_topk: logits hold NaN or +inf, or a row of nothing but -inf"),
            "the run has diverged",
        ),
    ],
)
def test_what_stops_a_step_is_explained(error: Exception, message: str) -> None:
    with pytest.raises(InputError, match=message), explain_failures(parse(["data.shards=s"])):
        raise error
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2"),
        explain_failures(parse(["data.shards=s"])),
    ):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize(
    ("settings", "answers", "expected"),
    [
        ({}, True, "expandable_segments:True"),
        ({}, False, None),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, True, "backend:cudaMallocAsync"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, True, None),
    ],
)
def test_expandable_segments_are_the_default_where_nvml_answers(
    settings: dict[str, str], answers: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not, PyTorch would end with a segmentation fault."""
    status = 0 if answers else 9
    library = SimpleNamespace(nvmlInit_v2=lambda: status)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        # Set first, so that monkeypatch also removes what the module sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(ROOT / "common/devices.py"))
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


@pytest.mark.gpu
def test_pytorch_uses_expandable_segments() -> None:
    program = """
import adamae.common.devices, torch
torch.zeros(1, device="cuda")
print(torch.cuda.memory._snapshot())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "'expandable_segments': True" in done.stdout


@pytest.mark.gpu
def test_a_gpu_that_is_full_is_explained() -> None:
    full = pytest.raises(InputError, match=r"Tried to allocate .* of which .* is free: take less")
    with full, explain_out_of_memory("take less"):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("is_native", [True, False])
def test_bf16_is_fp32_on_a_cpu_without_native_bf16(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: is_native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    cpu = torch.device("cpu")
    assert choose_precision(cpu, "bf16") == ("bf16" if is_native else "fp32")
    assert choose_precision(torch.device("cuda"), "bf16") == "bf16"
    x = torch.randn(3, 8)
    with autocast_to(cpu, "bf16"):
        assert (x @ x.T).dtype == (torch.bfloat16 if is_native else torch.float32)
    with autocast_to(cpu, "fp32"):
        assert (x @ x.T).dtype == torch.float32


# Slow: it imports torch in a fresh process.
@pytest.mark.slow
def test_idle_openmp_threads_sleep() -> None:
    """The variable is set when OpenMP is loaded."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "TRUE", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "import adamae.common, torch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
