"""Checkpoints are written beside training: the state is copied to host memory at once, and hashed, written and
uploaded by a thread.

torch.distributed.checkpoint's asynchronous save was the alternative. It writes a folder of shards and a pickled index
in place, without hashes: a kill leaves half a checkpoint, nothing else could read the weights, and as every rank holds
all of them (DDP), there is nothing to shard.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from training.checkpoint import Snapshot


class BackgroundWriter:
    """Does one job after another in a thread; `wait` raises what went wrong."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_abandoned = False

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def start(self, job: Callable[[], None]) -> None:
        """Do a job after those that were started before, unless one of them fails."""
        before = self._thread

        def work() -> None:
            if before is not None:
                before.join()
            try:
                if self._failure is None:
                    job()
            except BaseException as error:  # raised by `wait`
                self._failure = error

        # A daemon: a second Ctrl-C does not wait for an upload.
        self._thread = threading.Thread(target=work, name="writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all is done, and raise what went wrong; after an interrupt, later calls do not wait again."""
        if self._thread is not None and not self._is_abandoned:
            self._is_abandoned = True
            self._thread.join()
            self._is_abandoned = False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def take_snapshot(
    modules: dict[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    metadata: dict[str, str],
    buffers: Snapshot | None,
) -> Snapshot:
    """Copy modules and optimizer to host memory, into `buffers` where they fit: new pages cost eight times as much as
    the copy. From a GPU, the copies are queued before the next update, and have arrived when an event recorded now
    has."""
    states = {name: module.state_dict() for name, module in modules.items()}
    return Snapshot(
        _copy(states, buffers and buffers.modules),
        _copy(optimizer.state_dict(), buffers and buffers.optimizer),
        metadata,
    )


def _copy(value: Any, buffer: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(inner, (buffer or {}).get(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_copy(inner, None) for inner in value]  # of parameter groups, which are numbers
    if not isinstance(value, Tensor):
        return value
    if hasattr(value, "__tensor_flatten__"):  # torchao's moments are made of other tensors
        names, context = value.__tensor_flatten__()
        parts = {name: _copy(getattr(value, name), getattr(buffer, name, None)) for name in names}
        kind: Any = type(value)
        return kind.__tensor_unflatten__(parts, context, value.shape, value.stride())
    if not isinstance(buffer, Tensor) or buffer.shape != value.shape or buffer.dtype != value.dtype:
        buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)
    return buffer.copy_(value.detach(), non_blocking=True)
