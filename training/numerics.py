"""How a run's arithmetic is done where there is a choice: by which attention kernel, and whether deterministically.

deterministic=true: a run that was stopped and resumed ends with the bits of one that was not, on a GPU too. It resumes
only as it began: on the same kind of device, with the same settings of what decides about the last bits.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.deterministic
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.devices import choose_device, choose_precision, get_device_name
from common.errors import InputError
from training.config import DETERMINISTIC_ATTENTION, Attention, TrainConfig
from training.distributed import Distributed

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# cuBLAS is deterministic only if its workspaces are set; this is what PyTorch asks for.
CUBLAS_WORKSPACES = ":4096:8"


@contextmanager
def numerics(config: TrainConfig) -> Iterator[None]:
    """Choose attention kernels and determinism as configured; to be entered before CUDA's libraries start."""
    on_gpu = choose_device(config.device).type == "cuda"
    if config.attention != "auto" and not on_gpu:
        raise InputError(f"attention={config.attention} chooses among a GPU's kernels: remove it on a CPU")
    with ExitStack() as stack:
        if config.deterministic:
            stack.enter_context(deterministic())
        kernels = attention_order(config.attention, config.deterministic)
        if on_gpu and kernels:
            stack.enter_context(sdpa_kernel([KERNELS[name] for name in kernels], set_priority=True))
        yield


def attention_order(attention: Attention, is_deterministic: bool) -> list[str]:
    """List the kernels that may be used, best first; the others take what the first does not. []: PyTorch's choice."""
    if attention == "auto" and not is_deterministic:
        return []
    first = "flash" if attention == "auto" else attention
    return [first, *(name for name in DETERMINISTIC_ATTENTION if name != first)]


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms only."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES)
    filling: Any = torch.utils.deterministic  # whose attribute is a property of the module's class
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # torch.compile then chooses no kernel by measurement either
    filling.fill_uninitialized_memory = False  # a launch per tensor, and every kernel here writes all of its output
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]


def determinism_fingerprint(config: TrainConfig, dist: Distributed) -> str:
    """Describe what decides about the last bits besides keys that may not change on resume; "" if not deterministic."""
    if not config.deterministic:
        return ""
    threads = "" if dist.device.type == "cuda" else f" with {torch.get_num_threads()} threads"
    settings = {
        "torch": torch.__version__.partition("+")[0],
        "compile": config.compile,
        "attention": config.attention,
        "batch_size": config.batch_size,
        "activation_checkpointing": config.model.activation_checkpointing,
        "decoder": config.data.decoder,
    }
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"{dist.world_size} × {get_device_name(dist.device)}{threads}, {listed}"


def describe_numerics(config: TrainConfig, device: torch.device) -> str:
    """Describe the choices in a log line; "" on a CPU with nothing to say."""
    said = ["deterministic"] if config.deterministic else []
    if device.type == "cuda":
        dtype = torch.bfloat16 if choose_precision(device, config.precision) == "bf16" else torch.float32
        size = config.model.dimensions
        width = size.encoder_width // size.encoder_heads
        said.insert(0, f"attention kernel: {attention_kernel(size.encoder_heads, width, dtype, device)}")
    return "; ".join(said)


def attention_kernel(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return the name of the kernel that PyTorch chooses for heads of this width."""
    q = torch.empty(1, heads, 256, width, dtype=dtype, device=device, requires_grad=True)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q))
    return next((name for name, kernel in KERNELS.items() if kernel == chosen), chosen.name.lower())
