"""The shards of batches to come, downloaded while there is room for them, and let go when they are behind."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pipeline.dataset import ShardDataset
from pipeline.ledger import NoRoomError
from pipeline.plan import ClipPlan
from pipeline.store import is_remote
from pipeline.workers import Task, Workers

FURTHEST = 512  # batches that are looked through beyond the one in use; each costs its share of the plan, once
THREADS = 2  # that download

Fetch = Callable[[int], Path]  # a shard, by its number; raises NoRoomError


class LookAhead:
    """Of one plan and process. Together, the processes of a node look ahead over half of their cache at most."""

    def __init__(self, dataset: ShardDataset, plan: ClipPlan, fetch: Fetch, let_go: Callable[[], None]) -> None:
        """`let_go` is called when there may be shards that are behind."""
        self._dataset, self._plan, self._fetch, self._let_go = dataset, plan, fetch, let_go
        walkers = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), plan.lanes)  # others read the same shards
        self._most_bytes = dataset.cache.max_bytes // 2 // walkers
        self._lock = threading.Lock()
        self._workers: Workers | None = None
        self._working = 0
        self._at = 0  # the first batch that is not out yet
        self._seen = 0  # batches before this one have been looked through
        self._last: dict[int, int] = {}  # of the shards that are expected, the last batch seen that reads them
        self._coming: deque[tuple[int, int]] = deque()  # (batch that reads it first, shard) of those to be fetched
        self._ahead: dict[int, int] = {}  # of those that were, and are not read yet, the first batch
        self._started = (0.0, 0)  # when, and with which batch

    def reach(self, batch: int) -> None:
        """From `batch` on nothing is out yet; returns at once."""
        with self._lock:
            if self._workers is None:
                self._workers, self._started = Workers(THREADS, "shards"), (time.monotonic(), batch)
            if batch < self._at:  # from the beginning
                self._seen, self._started = batch, (time.monotonic(), batch)
                self._last, self._ahead = {}, {}
                self._coming.clear()
            self._at, self._seen = batch, max(batch, self._seen)
            self._last = {shard: last for shard, last in self._last.items() if last >= batch}
            self._ahead = {shard: first for shard, first in self._ahead.items() if first > batch}
            idle = THREADS - self._working
            self._working += idle
        for _ in range(idle):
            self._workers.submit(self._work)

    def expects(self, shard: int) -> bool:
        """Whether a batch that is not out yet is known to read it."""
        return shard in self._last

    def wanted_in(self, shard: int) -> float | None:
        """Seconds until a shard that is behind is read again on this node, about; None if nobody knows."""
        since, first = self._started
        batches = self._plan.next_use(shard, self._at)
        if batches is None or self._at == first:
            return None
        return batches * (time.monotonic() - since) / (self._at - first)

    def close(self) -> None:
        """Wait for the threads."""
        if self._workers is not None:
            self._workers.close()

    def _work(self, _: Task) -> None:
        """Fetch what comes; an error is left for the read to find."""
        try:
            self._let_go()
            while self._look_on():
                if (coming := self._next()) is not None:
                    try:
                        self._fetch(coming[1])
                    except NoRoomError:
                        with self._lock:
                            self._coming.appendleft(coming)
                            self._ahead.pop(coming[1], None)
                        return
        finally:
            with self._lock:
                self._working -= 1

    def _look_on(self) -> bool:
        """Look through a batch if nothing is coming; whether there is more to do now."""
        with self._lock:
            if self._coming:
                return self._fits(*self._coming[0])
            videos = self._plan.videos(self._seen) if self._seen - self._at < FURTHEST else []
            for shard in dict.fromkeys(self._dataset.shard_of[videos].tolist()) if videos else ():
                if is_remote(self._dataset.shards[shard]):
                    if shard not in self._last:
                        self._coming.append((self._seen, shard))
                    self._last[shard] = self._seen
            self._seen += bool(videos)
            return bool(videos)

    def _next(self) -> tuple[int, int] | None:
        """The next shard, if it is time to fetch it."""
        with self._lock:
            if not self._coming or not self._fits(*self._coming[0]):
                return None
            first, shard = self._coming.popleft()
            if first > self._at:
                self._ahead[shard] = first
            return first, shard

    def _fits(self, first: int, shard: int) -> bool:
        shards = self._dataset.info.shards
        ahead = sum(shards[other].num_bytes for other in self._ahead)
        return first <= self._at or ahead + shards[shard].num_bytes <= self._most_bytes
