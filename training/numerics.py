"""How a run's arithmetic is done where there is a choice: by which attention kernel, and whether always alike.

deterministic=true: a run that was stopped and started again ends with the bits of one that was not, on a GPU too. It
goes on only as it began: on the same kind of device, with the same settings of what decides about the last bits.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.deterministic
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.devices import choose_device, choose_precision, get_device_name
from common.errors import InputError
from training.config import DETERMINISTIC_ATTENTION, Attention, TrainConfig

if TYPE_CHECKING:
    from training.distributed import Distributed

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# cuBLAS promises the same bits only if its workspaces are set; this is what PyTorch asks for.
WORKSPACES = ":4096:8"


def as_asked(train: Callable[[TrainConfig], None]) -> Callable[[TrainConfig], None]:
    """Have a run's arithmetic done as its configuration says, and afterwards as before."""

    @wraps(train)
    def asked(config: TrainConfig) -> None:
        on_gpu = choose_device(config.device).type == "cuda"
        if config.attention != "auto" and not on_gpu:
            raise InputError(f"attention={config.attention} chooses among a GPU's kernels: leave it out on a CPU")
        with ExitStack() as stack:
            if config.deterministic:
                stack.enter_context(deterministic())
            if on_gpu and (kernels := attention_order(config.attention, config.deterministic)):
                stack.enter_context(sdpa_kernel([KERNELS[name] for name in kernels], set_priority=True))
            train(config)

    return asked


def attention_order(attention: Attention, always_alike: bool) -> list[str]:
    """The kernels that may be taken, best first; those behind the first take what it does not. []: as PyTorch likes."""
    if attention == "auto" and not always_alike:
        return []
    first = "flash" if attention == "auto" else attention
    return [first, *(name for name in DETERMINISTIC_ATTENTION if name != first)]


_FILLING: Any = torch.utils.deterministic  # whose attribute is a property of the module's class


@contextmanager
def deterministic() -> Iterator[None]:
    """Only algorithms that give the same bits every time; to be entered before CUDA's libraries start."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES)
    before = torch.are_deterministic_algorithms_enabled(), _FILLING.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # torch.compile then chooses no kernel by measurement either
    _FILLING.fill_uninitialized_memory = False  # a launch for each, and every kernel here writes all
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        _FILLING.fill_uninitialized_memory = before[1]


def execution(config: TrainConfig, process: "Distributed") -> str:
    """What decides about the last bits besides what a run's configuration may not change; "" where any may differ."""
    if not config.deterministic:
        return ""
    threads = "" if process.device.type == "cuda" else f" with {torch.get_num_threads()} threads"
    settings = {
        "torch": torch.__version__.partition("+")[0],
        "compile": config.compile,
        "attention": config.attention,
        "batch_size": config.batch_size,
        "accumulate": config.accumulate,
        "activation_checkpointing": config.model.activation_checkpointing,
        "decoder": config.data.decoder,
    }
    described = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"{process.world_size} × {get_device_name(process.device)}{threads}, {described}"


def described(config: TrainConfig, device: torch.device) -> str:
    """A sentence on the choices; "" on a CPU that was asked for nothing."""
    alike = "the same bits every time" if config.deterministic else ""
    if device.type == "cpu":
        return alike
    dtype = torch.bfloat16 if choose_precision(device, config.precision) == "bf16" else torch.float32
    size = config.model.dimensions
    kernel = attention_kernel(size.encoder_heads, size.encoder_width // size.encoder_heads, dtype, device)
    return f"attention by {kernel}" + (f"; {alike}" if alike else "")


def attention_kernel(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> str:
    """The name of the kernel that PyTorch takes for heads of this width."""
    q = torch.empty(1, heads, 256, width, dtype=dtype, device=device, requires_grad=True)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q))
    return next((name for name, kernel in KERNELS.items() if kernel == chosen), chosen.name.lower())
