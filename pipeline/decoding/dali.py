"""DALI's part of the batches: its graphs, one for each way to decode, and what is under way in them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from pipeline.decoding.clip_decoder import DecodeJob
from pipeline.decoding.graph import Graph, VideoGraph
from pipeline.decoding.images import ImageGraph
from pipeline.decoding.policy import Way
from pipeline.decoding.workers import Task, Workers
from pipeline.planning.plan import ClipPlan, PlanRow

GRAPHS: dict[Way, type[VideoGraph] | type[ImageGraph]] = {"videos": VideoGraph, "images": ImageGraph}
# After so many, DALI is hardly the one to go on with.
MAX_HUNG = 3  # each keeps its memory, and the run has waited for it
MAX_FAILED = 3  # in a row, over videos that PyAV decodes; to build another graph takes long


@dataclass(frozen=True)
class Part:
    """What of a batch one graph is working on."""

    graph: Graph
    groups: list[DecodeJob]

    @property
    def rows(self) -> list[PlanRow]:
        return [row for group in self.groups for row in group.rows]


class Dali:
    """Fed and read by one thread, in the order of the batches."""

    def __init__(self, device: torch.device, plan: ClipPlan, num_threads: int, timeout: float) -> None:
        """`timeout`: seconds after which a batch counts as hung."""
        self._device, self._plan, self._num_threads, self._timeout = device, plan, num_threads, timeout
        self._graphs: dict[Way, Graph] = {}
        self._waiter = Workers(1, "dali")
        self._hung = 0
        self._failed = 0  # since DALI made a batch, or a bad video was the reason why not
        self._lent: list[Tensor] = []  # DALI's memory that this batch is in, or is copied or changed from
        self._in_use: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()  # lent for earlier ones, until an event

    def feed(self, groups: Sequence[DecodeJob]) -> list[Part]:
        """Start on what of a batch is for DALI. Raises RuntimeError if it does not take that."""
        parts = []
        for way, kind in GRAPHS.items():
            chosen = [group for group in groups if group.way == way]
            if not chosen:
                continue
            if way not in self._graphs:
                most_videos = self._plan.batch_size // self._plan.views
                self._graphs[way] = kind(self._device, self._plan, most_videos, self._num_threads)
            self._graphs[way].feed([(group.for_dali, group.rows) for group in chosen if group.for_dali])
            parts.append(Part(self._graphs[way], chosen))
        return parts

    def take(self, part: Part) -> UInt8[Tensor, "B T H W C"]:
        """The clips of a part; raises RuntimeError if one does not decode, TimeoutError if DALI hangs.

        DALI cannot be interrupted: a graph that hangs is left behind.
        """

        def take(_: Task) -> Tensor:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first GPU
            return part.graph.take()

        try:
            taken = self._waiter.result(self._waiter.submit(take), self._timeout)
        except TimeoutError:
            self._hung += 1
            raise
        self._lent.append(taken)
        return part.graph.arranged(taken, part.rows)

    def worked(self) -> None:
        """Tell that a batch is out."""
        self._failed = 0

    def failed(self, at_a_bad_video: bool) -> bool:
        """Tell that a batch is not, and ask whether DALI is to be left."""
        self._failed = 0 if at_a_bad_video else self._failed + 1
        return self._failed >= MAX_FAILED or self._hung >= MAX_HUNG

    def drop(self) -> None:
        """Leave the graphs, and what is under way in them: after an error they are not valid any more."""
        self._graphs = {}

    def give_back(self) -> None:
        """Keep the memory of the last batch until the device has done what is queued on it by now, then let DALI have
        it back."""
        if self._lent and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._in_use.append((event, self._lent))
        self._lent = []
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()

    def close(self) -> None:
        self._waiter.close()
        self.drop()
        self.give_back()
        for event, _ in self._in_use:  # another loader's graphs take their memory from the same pool
            event.synchronize()
        self._in_use.clear()
