"""Which path an op takes, how its kernels are launched, and what is checked before."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from adamae.common.errors import InputError

# Triton 3.10 turns it off by default. No kernel here needs it on or off to be right.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# Tests set this to run the kernels in Triton's interpreter (TRITON_INTERPRET=1), where tensors live
# on the CPU.
triton_on_cpu = False

# Tiles of gather and scatter: with 4 warps, 16 rows of 256 values of 2 bytes are four 16-byte loads
# in flight a thread.
TILE_ROWS = 16
MAX_TILE_WIDTH = 256
# The narrowest tile that still gives wide enough accesses.
MIN_TILE_WIDTH = 128


def runs_triton(tensor: Tensor) -> bool:
    """Return whether an op runs its kernel on `tensor`, on CUDA, or its reference in PyTorch."""
    return tensor.is_cuda or triton_on_cpu


def wrap_triton(kernel: Any) -> Any:
    """Wrap a kernel for torch.compile to see through its launch: `wrap_triton(kernel)[grid](…)`."""
    # torch's own refuses kernels that are interpreted.
    if triton_on_cpu:
        return kernel
    return torch.library.wrap_triton(kernel)


def triton_op(name: str) -> Callable[[Callable], Any]:
    """Register the decorated function as torch.ops.adamae.`name`; it changes no argument."""
    return torch.library.triton_op(f"adamae::{name}", mutates_args=())


def tiles(batch: int, count: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Tile `count` rows of `width` values a clip.

    Returns the grid, and the tile's sides ROWS and BLOCK, which a kernel is compiled for. BLOCK is
    a power of two: the largest that divides the width, if that is wide enough, so that no lane is
    idle. A width of 768 has 3 tiles of 256, one of 384 has 3 of 128, and one of 96, which only 32
    divides, has a single one of 128.
    """
    block = width & -width
    if block < MIN_TILE_WIDTH:
        block = next_power_of_2(width)
    block = min(block, MAX_TILE_WIDTH)
    grid = batch * cdiv(count, TILE_ROWS), cdiv(width, block)
    return grid, {"ROWS": TILE_ROWS, "BLOCK": block}


def rows_contiguous(x: Tensor) -> Tensor:
    """Return x, or a copy in which neighbors in the last dimension are neighbors in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check(condition: bool, message: str) -> None:
    """Raise InputError with `message` unless the condition holds."""
    if not condition:
        raise InputError(message)


def check_shape(name: str, tensor: Tensor, *sizes: int | str) -> None:
    """Raise InputError unless a tensor has these sizes, or as many dimensions as there are letters.

    `check_shape("x", x, "B", "N", "D")` asks for three dimensions, `check_shape("x", x, 2, 12)` for
    two of these sizes. The message calls the tensor `name`.
    """
    shape = tuple(tensor.shape)
    if all(isinstance(size, str) for size in sizes):
        fits = len(shape) == len(sizes)
    else:
        fits = shape == sizes
    check(fits, f"{name} has shape {shape}: give [{', '.join(map(str, sizes))}]")


def check_ids(name: str, ids: Tensor, batch: Tensor) -> None:
    """Raise InputError unless ids are int64 [B, K], where `batch` is [B, …] on the same device.

    Whether the ids are those of tokens is not checked: on a GPU, that would wait for it.
    """
    check(ids.dtype == torch.int64, f"{name} are {ids.dtype}: give int64")
    num_clips = len(batch)
    shape = tuple(ids.shape)
    has_row_each = len(shape) == 2 and shape[0] == num_clips
    advice = f"give one row of ids for each of the {num_clips} clips"
    check(has_row_each, f"{name} have shape {shape}: {advice}")
    is_beside = ids.device == batch.device
    check(is_beside, f"{name} are on {ids.device}, the rest of the input is on {batch.device}")
