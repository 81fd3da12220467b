"""Which path an op takes, how its kernels are launched, and what is checked before."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from common.errors import InputError

# Set here because Triton 3.10 turns it off by default. No kernel here needs it on or off to be right.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# ADAMAE_DEBUG_KERNELS=1: also check what id lists contain, which waits for the device at every op.
DEBUG = os.environ.get("ADAMAE_DEBUG_KERNELS") == "1"

# Tests set this to run the kernels in Triton's interpreter (TRITON_INTERPRET=1), where tensors live on the CPU.
triton_on_cpu = False


def runs_triton(tensor: Tensor) -> bool:
    """Triton on CUDA, the reference in plain PyTorch elsewhere."""
    return tensor.is_cuda or triton_on_cpu


def is_plain() -> bool:
    """Nothing looks on: neither torch.compile nor a mode that counts, traces or pretends."""
    return not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def wrap_triton(kernel: Any) -> Any:
    """torch.library.wrap_triton, which torch.compile sees through; torch 2.11 refuses interpreted kernels there."""
    return kernel if triton_on_cpu or is_plain() else torch.library.wrap_triton(kernel)


class Op:
    """An op of torch.library's. Where nothing looks on, a call goes past its dispatcher, which takes 20 µs of it."""

    def __init__(self, name: str, function: Callable) -> None:
        self.function = self.eager = function
        self.registered: Any = torch.library.triton_op(f"adamae::{name}", function, mutates_args=())

    def __call__(self, *inputs: Any) -> Any:
        return (self.eager if is_plain() else self.registered)(*inputs)

    def register_autograd(self, backward: Callable, setup_context: Callable) -> None:
        self.registered.register_autograd(backward, setup_context=setup_context)
        methods = {"forward": self.function, "setup_context": setup_context, "backward": backward}
        methods = {name: staticmethod(method) for name, method in methods.items()}
        function: Any = type(self.function.__name__, (torch.autograd.Function,), methods)
        self.eager = function.apply


def triton_op(name: str) -> Callable[[Callable], Op]:
    return lambda function: Op(name, function)


def block_width(width: int) -> int:
    """A power of two for tiling rows of `width` values: one that divides it, where that leaves wide enough accesses."""
    divisor = width & -width
    return min(256, divisor if divisor >= 128 else next_power_of_2(width))


def rows_contiguous(x: Tensor) -> Tensor:
    """x itself where neighbors in its last dimension are neighbors in memory, otherwise a copy that is so."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


def check_ids(name: str, ids: Tensor, like: Tensor, tokens: int) -> None:
    """ids must be int64 [B, K] on `like`'s device; the debug switch adds: in [0, tokens) and ascending."""
    check(ids.dtype == torch.int64, f"{name} are {ids.dtype}: give int64")
    check(
        ids.ndim == 2 and ids.shape[0] == like.shape[0],
        f"{name} have shape {tuple(ids.shape)}: give one row of ids for each of the {like.shape[0]} clips",
    )
    check(ids.device == like.device, f"{name} are on {ids.device}, the rest of the input is on {like.device}")
    if DEBUG and ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        check(low >= 0 and high < tokens, f"{name} go from {low} to {high}: they must lie in 0…{tokens - 1}")
        check(bool((ids.diff(dim=1) > 0).all()), f"{name} must ascend without repetition in every row")
