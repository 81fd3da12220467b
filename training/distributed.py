"""Which process this is, on which device, and the few things processes say to each other."""

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.devices import choose_device
from common.errors import InputError, PeerLostError, describe_error

PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent dies
ROLL_CALL_S = 5.0  # those that wait for the same process notice within moments of each other that it does not answer
ENDED = "ended"  # the key in the processes' store under which one says why it ends
NCCL_LATER_S = 60.0  # NCCL ends the process without a word: what can say who is missing must notice before


T = TypeVar("T")


@dataclass(frozen=True)
class Distributed:
    """One process of a run: alone, or one of those that torchrun started."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def join(device: str, timeout_s: float = 1800.0) -> Distributed:
    """Join the process group that torchrun describes in the environment, if any. `device` is auto, cpu or cuda.

    Raises InputError if there is no such device for this process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # without torchrun, nobody but SIGKILL ends what it has started
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    target = choose_device(device, index=int(os.environ.get("LOCAL_RANK", "0")))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if target.type == "cuda":
        torch.cuda.set_device(target)
    rank = int(os.environ.get("RANK", "0"))
    if world_size > 1:
        backend, later = ("nccl", NCCL_LATER_S) if target.type == "cuda" else ("gloo", 0.0)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s + later))
        _store().set(f"host of {rank}", socket.gethostname())
    return Distributed(rank, world_size, target)


def leave() -> None:
    """Part from the other processes, when all of them are here."""
    wait_for_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Raises PeerLostError if one of them has ended."""
    if dist.is_initialized():
        with others_awaited():
            dist.barrier()


@contextmanager
def others_awaited() -> Iterator[None]:
    """Raises PeerLostError, which names who is missing, where a process does not answer the others in the block."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_the_network(error):
            raise
        raise PeerLostError(_who_is_missing()) from error


def _is_of_the_network(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)  # gloo's have no class of their own


@contextmanager
def end_told() -> Iterator[None]:
    """Tell the other processes why this one ends in the block: they only see it go."""
    try:
        yield
    except (InputError, OSError) as error:
        if dist.is_initialized() and not isinstance(error, PeerLostError):
            where = f"process {dist.get_rank()} on {socket.gethostname()}"
            _in_time(lambda: _store().set(ENDED, f"{where} has ended: {describe_error(error)}"))
        raise


def _who_is_missing() -> str:
    """Those whom this error does not meet, as it does all that are alive and waiting, did not answer."""
    return _in_time(_roll_call) or (
        "the network between the processes of this run, or the first of their machines, has failed"
    )


def _roll_call() -> str | None:
    """What the process said that was the first to end, or else who does not answer within ROLL_CALL_S."""
    store, ranks = _store(), range(dist.get_world_size())
    store.set(f"{dist.get_rank()} waits", "")
    deadline = time.monotonic() + ROLL_CALL_S
    while missing := [rank for rank in ranks if not store.check([f"{rank} waits"])]:
        if store.check([ENDED]):
            return store.get(ENDED).decode()
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    names = [f"process {rank} on {store.get(f'host of {rank}').decode()}" for rank in missing]
    return f"{' and '.join(names)} does not answer: it has ended, is frozen, or cannot be reached" if names else None


def _in_time(ask: Callable[[], T]) -> T | None:
    """The store's answer, if it comes: it ends with torchrun or with the first process, and a store behind a cut
    network is waited for without an end (c10d's TCPStore has no limit for `check`)."""
    answers: list[T] = []

    def asked() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=asked, name="roll call", daemon=True)
    thread.start()
    thread.join(2 * ROLL_CALL_S)
    return answers[0] if answers else None


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


class Agreement:
    """A question to all processes, answered while other work goes on: the device is never waited for."""

    def __init__(self, timeout_s: float) -> None:
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)  # for those outside of it, it is a number
            self._group = group
        self._yes = torch.zeros(1, dtype=torch.uint8)
        self._work: dist.Work | None = None

    def ask(self, yes: bool) -> None:
        """Give this process's answer; to be called by all."""
        self._yes.fill_(yes)
        if self._group is not None:
            self._work = dist.all_reduce(self._yes, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def any_yes(self) -> bool:
        """Whether a process has answered yes to what was asked last."""
        if self._work is not None:
            self._work.wait()
        return bool(self._yes)


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


def is_node_main() -> bool:
    """Whether this process is the one that does what is needed once a machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def gathered(value: T) -> list[T]:
    """The small picklable values of all processes, by rank; raises PeerLostError if one of them has ended."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with others_awaited():
        dist.all_gather_object(values, value)
    return values


def _reduced(values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if dist.is_initialized():
        with others_awaited():
            dist.all_reduce(values, operation)
    return values
