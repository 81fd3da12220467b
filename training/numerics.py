"""Make a run's arithmetic deterministic, if that is asked for.

With deterministic=true, a run that was stopped and resumed ends with the bits of one that was not,
on a GPU too. It resumes only as it began: on the same kind of device, and with the same values of
all settings that decide about the last bits.
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

# The fastest first; the others compute what the first does not support. cuDNN's attention is left
# out because its backward pass accumulates in any order.
DETERMINISTIC_ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# cuBLAS is deterministic only with workspaces of fixed size; PyTorch asks for this value
# (https://docs.nvidia.com/cuda/cublas/#results-reproducibility).
CUBLAS_WORKSPACES = ":4096:8"


@contextmanager
def numerics(config: TrainConfig) -> Iterator[None]:
    """Use deterministic algorithms in the block, if that is configured.

    It must be entered before CUDA's libraries start, as cuBLAS reads the environment once.
    """
    if not config.deterministic:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES)
    # For mypy: the attribute below is a property of the module's class.
    filling: Any = torch.utils.deterministic
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_filling = filling.fill_uninitialized_memory
    # With it, torch.compile chooses no kernel by measuring it either.
    torch.use_deterministic_algorithms(True)
    # Filling new tensors costs a launch each, and every kernel here writes all of its output.
    filling.fill_uninitialized_memory = False
    try:
        with sdpa_kernel(DETERMINISTIC_ATTENTION, set_priority=True):
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        filling.fill_uninitialized_memory = was_filling


def determinism_fingerprint(config: TrainConfig, dist: Distributed) -> str:
    """Describe the device and the settings on which the last bits of a deterministic run depend.

    Keys that may not change on resume are left out. Return "" for a run that is not deterministic.
    """
    if not config.deterministic:
        return ""
    device = f"{dist.world_size} × {get_device_name(dist.device)}"
    # On a CPU, the number of threads decides how sums are split.
    if dist.device.type != "cuda":
        device += f" with {torch.get_num_threads()} threads"
    settings = {
        "torch": torch.__version__.partition("+")[0],
        "compile": config.compile,
        "batch_size": config.batch_size,
        "activation_checkpointing": config.model.activation_checkpointing,
        "decoder": config.data.decoder,
    }
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"{device}, {listed}"
