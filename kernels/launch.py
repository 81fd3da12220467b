"""Which path an op takes, how its kernels are launched, and what is checked before."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from adamae.common.errors import InputError

# Set here because Triton 3.10 turns it off by default. No kernel here needs it on or off to be right.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# Tests set this to run the kernels in Triton's interpreter (TRITON_INTERPRET=1), where tensors live on the CPU.
triton_on_cpu = False


def runs_triton(tensor: Tensor) -> bool:
    """Triton on CUDA, the reference in plain PyTorch elsewhere."""
    return tensor.is_cuda or triton_on_cpu


def wrap_triton(kernel: Any) -> Any:
    """torch.library.wrap_triton, which torch.compile sees through, but which refuses interpreted kernels."""
    return kernel if triton_on_cpu else torch.library.wrap_triton(kernel)


def triton_op(name: str) -> Callable[[Callable], Any]:
    return torch.library.triton_op(f"adamae::{name}", mutates_args=())


def tiles(batch: int, count: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Tile `count` rows of `width` values a clip: the grid, and the tile's sides, which a kernel is compiled for.

    BLOCK is a power of two: one that divides the width, where that leaves wide enough accesses. With 4 warps, 16 rows
    of 256 values are four 16-byte loads in flight a thread at 2 bytes.
    """
    divisor = width & -width
    block = min(256, divisor if divisor >= 128 else next_power_of_2(width))
    return (batch * cdiv(count, 16), cdiv(width, block)), {"ROWS": 16, "BLOCK": block}


def rows_contiguous(x: Tensor) -> Tensor:
    """x itself where neighbors in its last dimension are neighbors in memory, otherwise a copy that is so."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def check_shape(name: str, tensor: Tensor, *sizes: int | str) -> None:
    """Letters stand for any size."""
    fits = tensor.ndim == len(sizes) and all(isinstance(size, str) for size in sizes)
    fits = fits or tuple(tensor.shape) == sizes
    check(fits, f"{name} has shape {tuple(tensor.shape)}: give [{', '.join(map(str, sizes))}]")


def check_ids(name: str, ids: Tensor, like: Tensor) -> None:
    """ids must be int64 [B, K] on `like`'s device."""
    check(ids.dtype == torch.int64, f"{name} are {ids.dtype}: give int64")
    is_row_each = ids.ndim == 2 and ids.shape[0] == like.shape[0]
    check(
        is_row_each,
        f"{name} have shape {tuple(ids.shape)}: give one row of ids for each of the {len(like)} clips",
    )
    check(
        ids.device == like.device,
        f"{name} are on {ids.device}, the rest of the input is on {like.device}",
    )
