"""The ranks of a run: which one this process is, on which device, and the few values that they exchange besides DDP."""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from adamae.common.devices import choose_device
from adamae.common.errors import PeerLostError
from adamae.common.processes import end_with_parent
from adamae.pipeline.reading.storage import call_with_timeout

PEER_TIMEOUT_S = 5.0  # ranks that wait for the same one notice within moments of each other that it does not answer
NCCL_LATER_S = 60.0  # NCCL aborts the process without a sentence: gloo, which can name a rank, must time out before

T = TypeVar("T")


class Distributed:
    """Rank, world size and device of this process; a context manager that joins and leaves the process group.

    torchrun describes the group in the environment; without it a run has one rank. Where the block fails because
    another rank does not answer, PeerLostError names that rank.
    """

    def __init__(self, device: str = "auto", timeout_s: float = 1800.0) -> None:
        """device: auto, cpu or cuda. Raise InputError if there is no such device for this rank."""
        self.device = choose_device(device, index=int(os.environ.get("LOCAL_RANK", "0")))
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._timeout_s = timeout_s
        self._host_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_node_main(self) -> bool:
        """Whether this rank does what is needed once per node."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def __enter__(self) -> "Distributed":
        # Ranks survive a torchrun that is killed.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent(signal.SIGTERM)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            backend, later = ("nccl", NCCL_LATER_S) if self.device.type == "cuda" else ("gloo", 0.0)
            dist.init_process_group(backend, timeout=timedelta(seconds=self._timeout_s + later))
            _store().set(f"host of {self.rank}", socket.gethostname())
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
            assert isinstance(
                group, dist.ProcessGroup
            )  # for ranks outside of the group, it is a number
            self._host_group = group
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._host_group is None:
            return
        try:
            if error is None:
                self.barrier()  # torchrun ends all ranks as soon as one has gone
                dist.destroy_process_group()
        except RuntimeError as lost:
            error = lost
        if isinstance(error, RuntimeError) and (
            isinstance(error, dist.DistError) or "gloo" in str(error)
        ):
            raise PeerLostError(_ask_store(_find_missing_ranks) or NETWORK_FAILED) from error

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Return the small picklable values of all ranks, by rank."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def begin_max(self, choose_number: Callable[[], int]) -> Callable[[], int]:
        """Start to find the largest number, 0 to 255, that ranks choose now; return a function that waits for it.

        It is reduced beside other work. A single rank waits for nobody, and chooses when the function is called.
        """
        if self._host_group is None:
            return choose_number
        value = torch.tensor([choose_number()], dtype=torch.uint8)
        work = dist.all_reduce(value, dist.ReduceOp.MAX, group=self._host_group, async_op=True)

        def wait() -> int:
            work.wait()
            return int(value)

        return wait


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def mean_over_ranks(values: Tensor) -> Tensor:
    """Average a tensor over all ranks, in place."""
    return sum_over_ranks(values).div_(count_ranks())


def count_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


NETWORK_FAILED = "the network between the nodes of this run, or the first of them, has failed"


def _find_missing_ranks() -> str | None:
    """Say which ranks do not answer within PEER_TIMEOUT_S.

    All that are alive and waiting for the missing one meet the same error, and call themselves here.
    """
    store, ranks = _store(), range(dist.get_world_size())
    store.set(f"{dist.get_rank()} waits", "")
    deadline = time.monotonic() + PEER_TIMEOUT_S
    while missing := [rank for rank in ranks if not store.check([f"{rank} waits"])]:
        if time.monotonic() > deadline:
            names = [f"rank {rank} on {store.get(f'host of {rank}').decode()}" for rank in missing]
            return f"{' and '.join(names)} does not answer: it has ended, is frozen, or cannot be reached"
        time.sleep(0.1)
    return None


def _ask_store(question: Callable[[], T]) -> T | None:
    """Return the store's answer if it comes in time: c10d's TCPStore waits without limit behind a cut network."""
    with suppress(RuntimeError, TimeoutError):
        return call_with_timeout(question, 2 * PEER_TIMEOUT_S)
    return None


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
