"""The ranks of a run: which of them this process is, and what they exchange besides gradients."""

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
from adamae.common.errors import InputError, PeerLostError
from adamae.common.processes import end_with_parent
from adamae.pipeline.reading.storage import call_with_timeout

# Ranks that wait for the same one notice within moments of each other that it does not answer; so
# long they look for each other to find out which ranks are missing.
PEER_TIMEOUT_S = 10.0
# NCCL aborts the process without a sentence. Its timeout is longer by this, so that gloo, after
# whose timeout a missing rank can be named, comes first.
NCCL_LATER_S = 60.0
# Where one rank reads or writes the files of a run, perhaps in slow storage, the others wait this
# many times longer than for a step. One that has ended is noticed at once all the same.
PATIENCE = 10
NETWORK_FAILED = "the network between the nodes of this run, or the first of them, has failed"

T = TypeVar("T")


class Distributed:
    """Rank, world size and device of this process; a context manager that joins the process group.

    torchrun describes the group in the environment; without it a run has one rank. Where the block
    fails because another rank does not answer, PeerLostError names that rank.
    """

    def __init__(self, device: str = "auto", timeout_s: float = 1800.0) -> None:
        """Raise InputError if there is no such device (auto, cpu or cuda) for this rank.

        Raise it also if srun has started ranks without numbers.
        """
        _require_one_launcher()
        self.device = choose_device(device, index=int(os.environ.get("LOCAL_RANK", "0")))
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._timeout_s = timeout_s
        self._host_group: dist.ProcessGroup | None = None
        # For barriers.
        self._patient_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes what the run leaves behind."""
        return self.rank == 0

    @property
    def is_node_main(self) -> bool:
        """Return whether this rank does what is needed once per node."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def __enter__(self) -> "Distributed":
        # A torchrun that is killed cannot stop its ranks, which would keep their GPUs.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent(signal.SIGTERM)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            timeout = timedelta(seconds=self._timeout_s)
            try:
                if self.device.type == "cuda":
                    nccl_timeout = timeout + timedelta(seconds=NCCL_LATER_S)
                    dist.init_process_group("nccl", timeout=nccl_timeout)
                else:
                    dist.init_process_group("gloo", timeout=timeout)
            except dist.DistError as error:
                # Its other lines are a stack of C++.
                reason = str(error).partition("\n")[0]
                place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                raise PeerLostError(
                    f"the ranks of this run do not meet at {place} ({reason}): start it again"
                ) from error
            _store().set(f"host of {self.rank}", socket.gethostname())
            # Values of the host are exchanged without the GPU, whose queue they would wait for.
            self._host_group = _make_host_group(timeout)
            self._patient_group = _make_host_group(PATIENCE * timeout)
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
                # torchrun ends all ranks as soon as one has failed, so they leave together.
                self.barrier()
                dist.destroy_process_group()
        except RuntimeError as lost:
            error = lost
        # gloo raises a plain RuntimeError that names its source file.
        is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
        if is_gloo or isinstance(error, dist.DistError):
            raise PeerLostError(_ask_store(_find_missing_ranks) or NETWORK_FAILED) from error

    def barrier(self) -> None:
        """Wait until all ranks have called this, up to PATIENCE times timeout_s."""
        if dist.is_initialized():
            dist.barrier(self._patient_group)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank; they must be small and picklable."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def begin_max(self, choose_number: Callable[[], int]) -> Callable[[], int]:
        """Start to find the largest number, 0 to 255, that any rank chooses now.

        Return a function that waits for it; until then, gloo's threads reduce the number beside
        other work. A single rank waits for nobody, and chooses when that function is called.
        """
        if self._host_group is None:
            return choose_number
        value = torch.tensor([choose_number()], dtype=torch.uint8)
        work = dist.all_reduce(value, dist.ReduceOp.MAX, group=self._host_group, async_op=True)

        def wait() -> int:
            work.wait()
            return int(value)

        return wait


def _make_host_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make a group of all ranks that exchange values on the CPU."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    # For mypy: a rank outside of the group would get a number.
    assert isinstance(group, dist.ProcessGroup)
    return group


def _require_one_launcher() -> None:
    """Raise InputError if srun has started several processes that do not know of each other."""
    num_tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in os.environ and num_tasks != "1":
        raise InputError(
            f"srun has started {num_tasks} processes, and each would train alone: use"
            " launch/slurm.sbatch, or start one torchrun per node"
        )


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def mean_over_ranks(values: Tensor) -> Tensor:
    """Average a tensor over all ranks, in place."""
    return sum_over_ranks(values).div_(count_ranks())


def count_ranks() -> int:
    """Return the number of ranks, 1 where no process group has been joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _find_missing_ranks() -> str | None:
    """Return a sentence on the ranks that do not report here within PEER_TIMEOUT_S; None if all do.

    Ranks that are alive have waited for the missing one, so all of them meet the same error and
    report at about the same time.
    """
    store = _store()
    store.set(f"{dist.get_rank()} waits", "")
    deadline = time.monotonic() + PEER_TIMEOUT_S
    missing = list(range(dist.get_world_size()))
    while time.monotonic() <= deadline:
        missing = [rank for rank in missing if not store.check([f"{rank} waits"])]
        if not missing:
            return None
        time.sleep(0.1)
    names = [f"rank {rank} on {store.get(f'host of {rank}').decode()}" for rank in missing]
    return f"{' and '.join(names)} does not answer: it has ended, is frozen, or cannot be reached"


def _ask_store(question: Callable[[], T]) -> T | None:
    """Return the store's answer, or None if it does not come within 20 s.

    c10d's TCPStore has no timeout of its own behind a cut network.
    """
    with suppress(RuntimeError, TimeoutError):
        return call_with_timeout(question, 2 * PEER_TIMEOUT_S)
    return None


def _store() -> dist.Store:
    """Return the key-value store by which torchrun's ranks have found each other."""
    return dist.distributed_c10d._get_default_store()
