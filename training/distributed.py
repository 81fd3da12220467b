"""Which process this is, on which device, and the few things processes say to each other."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from devices import choose_device
from errors import LeftAloneError

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """One process of a run: alone, or one of those that torchrun started."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join(device: str) -> Process:
    """Join the process group that torchrun describes in the environment, if any. `device` is auto, cpu or cuda.

    Raises InputError if there is no such device for this process.
    """
    target = choose_device(device, index=int(os.environ.get("LOCAL_RANK", "0")))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if world_size > 1:
        dist.init_process_group("nccl" if target.type == "cuda" else "gloo")
    return Process(int(os.environ.get("RANK", "0")), world_size, target)


def leave() -> None:
    """Part from the other processes, when all of them are here."""
    wait_for_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Raises LeftAloneError if one of them has ended."""
    if dist.is_initialized():
        with _left_alone_explained():
            dist.barrier()


def gradients_averaged(model: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Around forward and backward: average the gradients over processes in this backward, or in a later one."""
    if isinstance(model, DistributedDataParallel) and not now:
        return model.no_sync()
    return nullcontext()


def mean_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Mean of a tensor over all processes, in place."""
    return sum_over_processes(values).div_(dist.get_world_size() if dist.is_initialized() else 1)


def sum_over_processes(values: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor over all processes, in place."""
    return _reduced(values, dist.ReduceOp.SUM)


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process."""
    if not dist.is_initialized():
        return flag
    return bool(_reduced(torch.tensor(float(flag), device=device), dist.ReduceOp.MAX).item())


def is_first_of_machine() -> bool:
    """Whether this process is the one that does what is needed once a machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def gathered(value: T) -> list[T]:
    """The small picklable values of all processes, by rank; raises LeftAloneError if one of them has ended."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with _left_alone_explained():
        dist.all_gather_object(values, value)
    return values


@contextmanager
def _left_alone_explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LeftAloneError("another process of this run has ended, and has said why") from error


def _reduced(values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(values, operation)
    return values
