"""The part of the loader that runs on CPU cores: clips of a plan, read and decoded into host memory."""

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from kernels.decoded_clips import frame_bytes
from pipeline.config import DataConfig
from pipeline.decoding.clip_decoder import JOBS_AT_ONCE, ClipDecoder, DecodeJob
from pipeline.decoding.planes import find_window
from pipeline.decoding.policy import DecoderPolicy
from pipeline.decoding.upload import HostClips
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.pool import ThreadPool
from pipeline.shards.dataset import ShardDataset
from pipeline.shared_blocks import SharedBlocks


@dataclass
class HostBatch:
    """A batch in the making, or ready: clips in host memory, but for those that DALI decodes."""

    number: int
    rows: list[PlanRow]  # with those of replacements, once it is ready
    host: HostClips
    jobs: list[DecodeJob] = field(default_factory=list)  # none: another process has done them
    num_bytes: int = 0  # held until the batch is out
    is_fed: bool = False  # whether DALI has its part

    @property
    def dali_jobs(self) -> list[DecodeJob]:
        return [job for job in self.jobs if job.for_dali is not None]

    @property
    def is_read(self) -> bool:
        """Whether it is known of each video who decodes it."""
        return all(job.is_read for job in self.jobs)

    @property
    def is_ready(self) -> bool:
        return all(future.done() and not future.exception() for future in {job.future for job in self.jobs})


class HostLoader:
    """`pending` are the batches in the making, in the order of the plan."""

    takes_frames = False  # see HostClips

    def __init__(
        self,
        dataset: ShardDataset,
        plan: ClipPlan,
        policy: DecoderPolicy,
        config: DataConfig,
        quarantine: Path | None,
        stream: torch.cuda.Stream | None = None,
        memory: SharedBlocks | None = None,
    ) -> None:
        """quarantine: file that gets a line for every video that cannot be decoded; None: they are only counted.

        stream: see HostClips. memory: for clips; None: its own.
        """
        self._dataset, self._plan, self._config, self._stream = dataset, plan, config, stream
        self._memory = memory or SharedBlocks()
        self._decoder = ClipDecoder(dataset, plan, policy, config, quarantine, self._memory)
        self._pool = ThreadPool(config.threads, "clips")
        self._numbers: Iterator[int] = count()
        self.pending: deque[HostBatch] = deque()
        self._in_upload: list[HostClips] = []

    def close(self) -> None:
        """End all processes and threads."""
        self._decoder.close()  # first: threads are waiting for it
        self._pool.close()
        if self._stream is not None:
            self._stream.synchronize()
        self._memory.close()

    @property
    def counts(self) -> Counter[str]:
        """Sums since the start; seconds are summed over threads."""
        return self._decoder.counts

    def start(self, first: int) -> None:
        """Begin with the plan's batch number `first`."""
        self._numbers = count(first)
        self.pending.clear()
        self.top_up()

    def top_up(self) -> None:
        """Keep `data.prefetch` batches in the making, fewer if they are large."""
        limit = self._config.prefetch_mib * 2**20
        while len(self.pending) < self._config.prefetch and sum(batch.num_bytes for batch in self.pending) < limit:
            number = next(self._numbers)
            rows = self._plan.batch(number)
            if not rows:
                return
            self._decoder.reader.advance(number)
            self.pending.append(self._start(number, rows))

    def take(self) -> HostBatch | None:
        """Wait for the next batch; None: the plan has ended. Raise InputError if too many videos cannot be decoded."""
        if not self.pending:
            return None
        batch = self.pending.popleft()
        self.wait_for(batch)
        if self._stream is not None:
            hosts = (*self._in_upload, batch.host)
            self._in_upload = [host for host in hosts if host.is_allocated and not host.is_uploaded]
        self._decoder.quarantine.delivered(len(batch.rows))
        return batch

    def wait_for(self, batch: HostBatch) -> None:
        """Wait until all videos of a batch are read and PyAV's part is decoded. Raise what a job has raised."""
        for job in batch.jobs:
            job.future.result()
        batch.rows = [row for job in batch.jobs for row in job.rows]

    def redo_with_pyav(self, batch: HostBatch) -> bool:
        """Decode DALI's part of a batch with PyAV, and wait for it. Return whether a video of it was replaced."""
        attempts = sum(job.attempt for job in batch.jobs)
        for job in batch.dali_jobs:
            batch.host.copy = None
            job.for_dali, job.only_pyav = None, True
            self._submit([job])
        self.wait_for(batch)
        return sum(job.attempt for job in batch.jobs) > attempts

    def _start(self, number: int, rows: list[PlanRow]) -> HostBatch:
        views = self._plan.views
        shape = (len(rows), self._plan.num_frames, *self._plan.frame_size, self._dataset.channels)
        host = HostClips(shape, self._stream, self.takes_frames, self._allocate)
        first_decode = number * (self._plan.batch_size // views)
        jobs = [
            DecodeJob(first, rows[first : first + views], number, first_decode + first // views, host)
            for first in range(0, len(rows), views)
        ]
        # So many that every thread has two times as many in the batches that are in the making.
        share = len(jobs) * self._config.prefetch // (2 * self._config.threads)
        at_once = max(1, min(JOBS_AT_ONCE, share))
        for place in range(0, len(jobs), at_once):
            self._submit(jobs[place : place + at_once])
        return HostBatch(number, rows, host, jobs, math.prod(shape) + sum(map(self._count_bytes, jobs)))

    def _allocate(self, num_bytes: int) -> UInt8[np.ndarray, " bytes"]:
        memory = self._memory.allocate(num_bytes)
        return memory if self._stream is None else self._memory.pin(memory)

    def _count_bytes(self, job: DecodeJob) -> int:
        """Return how many bytes a video takes, and its frames if they are kept for the device to scale."""
        sample = self._dataset.samples[job.rows[0].sample]
        if not job.host.takes_frames:
            return sample.size
        window = find_window([row.crop for row in job.rows], sample.width, sample.height)
        return sample.size + self._plan.num_frames * frame_bytes(window.height, window.width, 1)

    def _submit(self, jobs: Sequence[DecodeJob]) -> None:
        future = self._pool.submit(partial(self._decoder.decode, jobs))
        for job in jobs:
            job.future = future
