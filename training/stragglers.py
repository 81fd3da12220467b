"""What each rank spends its steps on. All wait for the slowest, in the backward pass, where nobody sees for whom."""

import socket
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from training.distributed import Distributed, sum_over_ranks

SLOW = 1.3  # times the median
MATTERS = 0.05  # fraction of a step
MIN_STEPS = 10  # in a row: the first ones load, compile and fill caches
COUNTED = ("batches_ready", "cache_hits", "bad_clips", "timeouts")  # of the loader's counters, besides its seconds
LOW_IS_BAD = ("batches_ready", "cache_hits")
CAUSES = {
    "forward_ms": "its forward pass takes {0:.3g} ms per step: is its device shared, hot, or another one?",
    "wait_ms": "it waits {0:.3g} ms per step for data: compare reading and decoding times under `ranks`",
}


class Spread(NamedTuple):
    """One metric over all ranks."""

    min: float
    median: float  # the lower one of an even number: of two, the better
    max: float
    worst_rank: int
    worst_host: str


class StragglerDetector:
    """Compares some ten metrics of all ranks, in one sum with the losses; does nothing if there is one rank.

    Of a step, only the forward pass waits for no other rank; it is timed by the device's clock.
    """

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._on_cuda = dist.device.type == "cuda"
        self._passes: list[tuple[Any, Any]] = []  # start and end of each forward pass; no end where it failed
        self._slow: dict[tuple[str, int], int] = {}  # for how many steps in a row: by metric and rank
        self._hosts = dist.gather(socket.gethostname())

    def watch(self, model: nn.Module) -> None:
        """Time the forward passes of a model."""
        if self._dist.world_size > 1:
            model.register_forward_pre_hook(lambda *_: self._passes.append((self._now(), None)))
            model.register_forward_hook(lambda *_: self._passes.append((self._passes.pop()[0], self._now())))

    def gather(
        self, means: Mapping[str, float], steps: int, seconds: float, counters: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, Spread]]:
        """Average `means` over all ranks, and compare what `steps` steps took in each: `seconds`, and what the loader
        has counted meanwhile."""
        if self._dist.world_size == 1:
            return dict(means), {}
        own = self.measure(steps, seconds, counters)
        row = torch.tensor([*means.values(), *own.values()])
        table = torch.zeros(self._dist.world_size, len(row))
        table[self._dist.rank] = row
        columns = sum_over_ranks(table.to(self._dist.device)).T.tolist()
        averaged = {name: statistics.fmean(column) for name, column in zip(means, columns, strict=False)}
        spreads = {}
        for name, column in zip(own, columns[len(means) :], strict=True):
            low, high = min(column), max(column)
            worst = column.index(low if name in LOW_IS_BAD else high)
            spreads[name] = Spread(low, statistics.median_low(column), high, worst, self._hosts[worst])
        return averaged, spreads

    def measure(self, steps: int, seconds: float, counters: Mapping[str, float]) -> dict[str, float]:
        """Return what each of `steps` steps in `seconds` has taken in this rank."""
        finished, self._passes = [(start, end) for start, end in self._passes if end is not None], []
        forward = sum(start.elapsed_time(end) if self._on_cuda else 1000 * (end - start) for start, end in finished)
        own = {"step_ms": 1000 * seconds / steps, "forward_ms": forward / steps}
        for name, amount in counters.items():
            if name.endswith("_seconds"):
                own[name.removesuffix("_seconds") + "_ms"] = 1000 * amount / steps
        own |= {name: counters[name] / steps for name in COUNTED if name in counters}
        if self._on_cuda:
            own["device_memory_gib"] = torch.cuda.max_memory_allocated(self._dist.device) / 2**30
        return own | {"host_memory_gib": host_memory_gib()}

    def find_stragglers(self, spreads: Mapping[str, Spread], steps: int) -> list[str]:
        """Return a sentence on each rank that has now slowed down the others for MIN_STEPS; `steps`: since the call
        before."""
        before, self._slow, sentences = self._slow, {}, []
        for name, cause in CAUSES.items() if spreads else ():
            spread = spreads[name]
            excess, rank = spread.max - spread.median, spread.worst_rank
            if excess > (SLOW - 1) * spread.median and excess > MATTERS * spreads["step_ms"].median:
                earlier = before.get((name, rank), 0)
                self._slow[name, rank] = earlier + steps
                if earlier < MIN_STEPS <= earlier + steps:
                    sentences.append(
                        f"note: rank {rank} on {spread.worst_host} slows down the others: {cause.format(spread.max)}"
                        f" (median of {self._dist.world_size} ranks: {spread.median:.3g} ms)"
                    )
        return sentences

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def host_memory_gib() -> float:
    """Return what this process holds now, without files that it has mapped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * 4096 / 2**30
