"""The shards of batches to come, downloaded while there is room for them, and let go when they are behind.

A shard comes whole, or, where this node reads few of its videos, a video at a time.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

from common.logging import log_note
from pipeline.decoding.workers import Task, Workers
from pipeline.planning.plan import ClipPlan
from pipeline.reading.ledger import NoRoomError
from pipeline.reading.storage import is_remote
from pipeline.shards.dataset import ShardDataset

FURTHEST = 512  # batches that are looked through beyond the one in use; each costs its share of the plan, once
THREADS = 2  # that download

REQUEST = 2**22  # bytes that come in the time that a request takes, 40 ms at 100 MiB/s


class Piece(NamedTuple):
    """What is downloaded at once, and is a file in the cache."""

    shard: int
    sample: int | None = None  # None: all of them


Fetch = Callable[[Piece], None]  # raises NoRoomError
LetGo = Callable[[list[Piece]], None]  # of pieces that no batch is known to read from now on


class Pieces:
    """Which pieces of a dataset a plan is read in. Safe to use from many threads."""

    def __init__(self, dataset: ShardDataset, plan: ClipPlan | None) -> None:
        self._dataset, self._plan = dataset, plan
        self._comes = lru_cache(maxsize=4096)(self._comes_as)

    def of(self, sample: int) -> Piece | None:
        """What is to be here before a sample can be read; None: it is here."""
        shard = int(self._dataset.shard_of[sample])
        comes = self._comes(shard)
        return Piece(shard, sample if comes == "videos" else None) if comes else None

    def num_bytes(self, piece: Piece) -> int:
        if piece.sample is None:
            return self._dataset.info.shards[piece.shard].num_bytes
        return self._dataset.samples[piece.sample].size

    def _comes_as(self, shard: int) -> Literal["", "whole", "videos"]:
        if not is_remote(self._dataset.shards[shard]):
            return ""
        info, share = self._dataset.info.shards[shard], self._plan.share(shard) if self._plan else 1.0
        return "videos" if share * (info.num_samples * REQUEST + info.num_bytes) < info.num_bytes else "whole"


def check_cache(dataset: ShardDataset, plan: ClipPlan) -> None:
    """Say so where the cache is too small for the shards that clips are taken from in turns: of those, one that has to
    make room comes again for every clip (57 times an epoch: benchmarks/data/egress.py, 100 lanes on one node)."""
    needed = plan.shards_in_turns * dataset.info.num_bytes / max(1, len(dataset.info.shards))
    kept = dataset.cache.max_bytes
    if dataset.is_remote and needed > kept:
        log_note(
            f"this node takes clips from {plan.shards_in_turns} shards in turns, {needed / 2**30:.3g} GiB, and"
            f" data.cache_gib is {kept / 2**30:.3g}: they will be downloaded again and again; raise it, or lower"
            " data.canonical_nodes or data.shuffle_shards",
            once_per_node=True,
        )


class LookAhead:
    """Of one plan and process. Together, the processes of a node look ahead over half of their cache at most."""

    def __init__(self, plan: ClipPlan, pieces: Pieces, cache_bytes: int, fetch: Fetch, let_go: LetGo) -> None:
        self._plan, self._pieces, self._fetch, self._let_go = plan, pieces, fetch, let_go
        walkers = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), plan.lanes)  # others read the same shards
        self._most_bytes = cache_bytes // 2 // walkers
        self._lock = threading.Lock()
        self._workers: Workers | None = None
        self._working = 0
        self._at = 0  # the first batch that is not out yet
        self._seen = 0  # batches before this one have been looked through
        self._last: dict[Piece, int] = {}  # of what is expected, the last batch seen that reads it
        self._coming: deque[tuple[int, Piece]] = deque()  # (batch that reads it first, piece) of those to be fetched
        self._ahead: deque[tuple[int, Piece]] = deque()  # the same of those that were
        self._bytes_ahead = 0
        self._reads: deque[tuple[int, list[Piece]]] = deque()  # what each of the batches seen reads
        self._behind: list[Piece] = []  # to be let go
        self._started = (0.0, 0)  # when, and with which batch

    def reach(self, batch: int) -> None:
        """From `batch` on nothing is out yet; returns at once."""
        with self._lock:
            if self._workers is None:
                self._workers, self._started = Workers(THREADS, "shards"), (time.monotonic(), batch)
            if batch < self._at:  # from the beginning
                self._seen, self._started = batch, (time.monotonic(), batch)
                self._pass(2**62)
                self._coming.clear()
            self._at, self._seen = batch, max(batch, self._seen)
            self._pass(batch)
            idle = THREADS - self._working
            self._working += idle
        for _ in range(idle):
            self._workers.submit(self._work)

    def _pass(self, batch: int) -> None:
        """Leave behind what is read before a batch."""
        while self._reads and self._reads[0][0] < batch:
            number, pieces = self._reads.popleft()
            done = [piece for piece in pieces if self._last.get(piece) == number]
            self._behind += done
            for piece in done:
                del self._last[piece]
        while self._ahead and self._ahead[0][0] <= batch:
            self._bytes_ahead -= self._pieces.num_bytes(self._ahead.popleft()[1])

    def expects(self, piece: Piece) -> bool:
        """Whether a batch that is not out yet is known to read it."""
        return piece in self._last

    def wanted_in(self, piece: Piece) -> float | None:
        """Seconds until a piece that is behind is read again on this node, about; None if nobody knows."""
        since, first = self._started
        batches = self._plan.next_use(piece.shard, self._at)
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
            with self._lock:
                behind, self._behind = self._behind, []
            if behind:
                self._let_go(behind)
            room = True
            while (coming := self._next() if room else None) or self._look_on():
                if coming:
                    try:
                        self._fetch(coming[1])
                    except NoRoomError:
                        self._put_back(coming)
                        room = False
        finally:
            with self._lock:
                self._working -= 1

    def _look_on(self) -> bool:
        """Look through the next batch, also where nothing more can be fetched: what is read again is to stay."""
        with self._lock:
            videos = self._plan.videos(self._seen) if self._seen - self._at < FURTHEST else []
            if not videos:
                return False
            pieces = [piece for piece in dict.fromkeys(map(self._pieces.of, videos)) if piece]
            self._coming.extend((self._seen, piece) for piece in pieces if piece not in self._last)
            self._last.update(dict.fromkeys(pieces, self._seen))
            self._reads.append((self._seen, pieces))
            self._seen += 1
            return True

    def _next(self) -> tuple[int, Piece] | None:
        """The next piece, if it is time to fetch it."""
        with self._lock:
            while self._coming and self._coming[0][1] not in self._last:  # it is behind
                self._coming.popleft()
            if not self._coming or not self._fits(*self._coming[0]):
                return None
            first, piece = self._coming.popleft()
            if first > self._at:
                self._ahead.append((first, piece))
                self._bytes_ahead += self._pieces.num_bytes(piece)
            return first, piece

    def _put_back(self, coming: tuple[int, Piece]) -> None:
        with self._lock:
            self._coming.appendleft(coming)
            if coming in self._ahead:
                self._ahead.remove(coming)
                self._bytes_ahead -= self._pieces.num_bytes(coming[1])

    def _fits(self, first: int, piece: Piece) -> bool:
        return first <= self._at or self._bytes_ahead + self._pieces.num_bytes(piece) <= self._most_bytes
