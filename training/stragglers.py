"""Name a rank that slows down the others: all wait for it in the backward pass, where nobody sees for whom."""

import socket
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from training.distributed import Distributed, sum_over_ranks

SLOW = 1.3  # times the median
MATTERS = 0.05  # fraction of a step
FIRST_STEPS = 10  # load, compile and fill caches
CAUSES = {
    "forward_ms": "its forward pass takes {0:.3g} ms per step: is its device shared, hot, or another one?",
    "wait_ms": "it waits {0:.3g} ms per step for data: are its disk, network or CPU slower, or shared?",
}


class StragglerDetector:
    """Compares what a step takes in each rank but for waiting for others; does nothing if there is one rank."""

    def __init__(self, dist: Distributed) -> None:
        self._dist, self._steps = dist, 0
        self._passes: list[tuple[Any, Any]] = []  # start and end of each forward pass; no end where it failed
        self._named: set[tuple[str, int]] = set()  # cause and rank
        self._hosts = dist.gather(socket.gethostname())

    def watch(self, model: nn.Module) -> None:
        """Time the forward passes of a model, by the device's clock."""
        if self._dist.world_size > 1:
            model.register_forward_pre_hook(lambda *_: self._passes.append((self._now(), None)))
            model.register_forward_hook(lambda *_: self._passes.append((self._passes.pop()[0], self._now())))

    def gather(
        self, means: Mapping[str, float], steps: int, seconds: float, wait_seconds: float
    ) -> tuple[dict[str, float], list[str]]:
        """Average `means` over all ranks; return a sentence on each rank that is found to be slow, once.

        steps: since the last call, in `seconds`, of which this rank has waited `wait_seconds` for data.
        """
        if self._dist.world_size == 1:
            return dict(means), []
        own = self.measure(steps, wait_seconds)
        table = torch.zeros(self._dist.world_size, len(means) + len(own))
        table[self._dist.rank] = torch.tensor([*means.values(), *own.values()])
        columns = sum_over_ranks(table.to(self._dist.device)).T.tolist()
        averaged = {name: statistics.fmean(column) for name, column in zip(means, columns, strict=False)}
        self._steps, notes = self._steps + steps, []
        for name, values in zip(own, columns[len(means) :], strict=True):
            median, worst = statistics.median_low(values), max(values)  # of two ranks, the median is the better one
            rank = values.index(worst)
            is_slow = worst - median > max((SLOW - 1) * median, MATTERS * 1000 * seconds / steps)
            if is_slow and self._steps - steps >= FIRST_STEPS and (name, rank) not in self._named:
                self._named.add((name, rank))
                notes.append(
                    f"note: rank {rank} on {self._hosts[rank]} slows down the others:"
                    f" {CAUSES[name].format(worst)} (median of {len(values)} ranks: {median:.3g} ms)"
                )
        return averaged, notes

    def measure(self, steps: int, wait_seconds: float) -> dict[str, float]:
        """Return what a step has taken in this rank, by the names of CAUSES."""
        finished, self._passes = [(start, end) for start, end in self._passes if end is not None], []
        on_cuda = self._dist.device.type == "cuda"
        forward = sum(start.elapsed_time(end) if on_cuda else 1000 * (end - start) for start, end in finished)
        return {"forward_ms": forward / steps, "wait_ms": 1000 * wait_seconds / steps}

    def _now(self) -> Any:
        if self._dist.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
