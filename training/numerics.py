"""How a run's arithmetic is done where there is a choice.

deterministic=true: a run that was stopped and resumed ends with the bits of one that was not, on a GPU too. It resumes
only as it began: on the same kind of device, with the same settings of what decides about the last bits.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic
from torch.nn.attention import SDPBackend, sdpa_kernel

from adamae.common.devices import get_device_name
from adamae.training.config import TrainConfig
from adamae.training.distributed import Distributed

# Best first; the others take what the first does not. cuDNN's backward pass accumulates in any order.
DETERMINISTIC_ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# cuBLAS is deterministic only if its workspaces are set; this is what PyTorch asks for.
CUBLAS_WORKSPACES = ":4096:8"


@contextmanager
def numerics(config: TrainConfig) -> Iterator[None]:
    """Use deterministic algorithms only, if that is configured; to be entered before CUDA's libraries start."""
    if not config.deterministic:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES)
    filling: Any = torch.utils.deterministic  # whose attribute is a property of the module's class
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(
        True
    )  # torch.compile then chooses no kernel by measurement either
    filling.fill_uninitialized_memory = (
        False  # a launch per tensor, and every kernel here writes all of its output
    )
    try:
        with sdpa_kernel(DETERMINISTIC_ATTENTION, set_priority=True):
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
        "batch_size": config.batch_size,
        "activation_checkpointing": config.model.activation_checkpointing,
        "decoder": config.data.decoder,
    }
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"{dist.world_size} × {get_device_name(dist.device)}{threads}, {listed}"
