"""What each process spends its steps on. All wait for the slowest, in the backward pass, where nobody sees whom for."""

import socket
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from training.distributed import Distributed, sum_over_processes

SLOW = 1.3  # times the median
MATTERS = 0.05  # share of a step
HOST_LETTERS = 64
COUNTED = ("batches_ready", "cache_hits", "bad_clips", "hung")  # of the loader's counters, besides its seconds
LOW_IS_BAD = ("batches_ready", "cache_hits")
CAUSES = {
    "forward_ms": "its forward pass takes {0:.3g} ms a step: is its device shared, hot, or another one?",
    "wait_ms": "it waits {0:.3g} ms a step for its clips: compare the times of reading and decoding under `ranks`",
}


class Spread(NamedTuple):
    """One figure over all processes."""

    min: float
    median: float  # the lower one of an even number: of two, the better
    max: float
    worst_rank: int
    worst_host: str


class ForwardClock:
    """Times the forward pass, by the device's clock: the part of a step in which a process waits for no other."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._passes: list[tuple[Any, Any]] = []

    def watch(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(lambda *_: self._passes.append((self._now(), None)))
        model.register_forward_hook(lambda *_: self._passes.append((self._passes.pop()[0], self._now())))

    def take_ms(self) -> float:
        """Milliseconds since the last call; the device has to have done them."""
        whole = [(start, end) for start, end in self._passes if end is not None]  # not those that were interrupted
        self._passes = []
        return sum(start.elapsed_time(end) if self._on_cuda else 1000 * (end - start) for start, end in whole)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Ranks:
    """Gathers some ten figures of every process at each report, in one sum with its losses; of one process, nothing."""

    def __init__(self, process: Distributed) -> None:
        self._process = process
        self._forward = ForwardClock(process.device)
        self._before: Mapping[str, float] = {}
        self._said: set[tuple[str, int]] = set()
        self._hosts = self._names_of_hosts() if process.world_size > 1 else []

    def watch(self, model: nn.Module) -> None:
        if self._hosts:
            self._forward.watch(model)

    def gather(
        self, means: Mapping[str, float], steps: int, seconds: float, counters: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, Spread]]:
        """Of `steps` steps that took `seconds`: `means` over all processes, and what these differ in; `counters`: of
        this process's loader, since its start."""
        if not self._hosts:
            return dict(means), {}
        own = self._own(steps, seconds, counters)
        columns = list(zip(*self._table([*means.values(), *own.values()]), strict=True))
        over_all = {name: statistics.fmean(column) for name, column in zip(means, columns, strict=False)}
        of_own = zip(own, columns[len(means) :], strict=True)
        return over_all, {name: self._spread(name, column) for name, column in of_own}

    def slow_ones(self, spreads: Mapping[str, Spread]) -> list[str]:
        """A sentence on each process that holds up the others, once."""
        sentences = []
        for name, cause in CAUSES.items():
            if (spread := spreads.get(name)) is None:
                continue
            excess = spread.max - spread.median
            if excess <= (SLOW - 1) * spread.median or excess <= MATTERS * spreads["step_ms"].median:
                continue
            if (name, spread.worst_rank) not in self._said:
                self._said.add((name, spread.worst_rank))
                sentences.append(
                    f"note: process {spread.worst_rank} on {spread.worst_host} holds up the others:"
                    f" {cause.format(spread.max)}; the median of all {len(self._hosts)} is {spread.median:.3g} ms"
                )
        return sentences

    def _own(self, steps: int, seconds: float, counters: Mapping[str, float]) -> dict[str, float]:
        since = {name: count - self._before.get(name, 0) for name, count in counters.items()}
        self._before = dict(counters)
        own = {"step_ms": 1000 * seconds / steps, "forward_ms": self._forward.take_ms() / steps}
        for name, amount in since.items():
            if name.endswith("_seconds"):
                own[name.removesuffix("_seconds") + "_ms"] = 1000 * amount / steps
        own |= {name: since[name] / steps for name in COUNTED if name in since}
        if self._process.device.type == "cuda":
            own["device_memory_gib"] = torch.cuda.max_memory_allocated(self._process.device) / 2**30
        return own | {"host_memory_gib": host_memory_gib()}

    def _spread(self, name: str, column: tuple[float, ...]) -> Spread:
        worst = min(column) if name in LOW_IS_BAD else max(column)
        rank = column.index(worst)
        return Spread(min(column), statistics.median_low(column), max(column), rank, self._hosts[rank])

    def _table(self, row: list[float]) -> list[list[float]]:
        """The rows of all processes, of which each gives its own."""
        table = torch.zeros(self._process.world_size, len(row))
        table[self._process.rank] = torch.tensor(row)
        found: list[list[float]] = sum_over_processes(table.to(self._process.device)).tolist()
        return found

    def _names_of_hosts(self) -> list[str]:
        own = socket.gethostname().encode()[:HOST_LETTERS].ljust(HOST_LETTERS, b"\0")
        rows = self._table([float(letter) for letter in own])
        return [bytes(map(int, row)).rstrip(b"\0").decode(errors="replace") for row in rows]


def host_memory_gib() -> float:
    """What this process holds now, without files that it has mapped."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * 4096 / 2**30
