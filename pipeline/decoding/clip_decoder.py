"""The work on each video of a batch in worker threads: read it, decode its clips or leave them to DALI,
replace it if it is bad."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.policy import DecoderPolicy
from pipeline.decoding.sources import ClipSource, find_source
from pipeline.decoding.upload import HostClips
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.quarantine import Quarantine
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import Sample
from pipeline.shards.gops import VideoSlice
from pipeline.video_error import VideoError

MAX_ATTEMPTS = 100  # replacements in a row for one clip


@dataclass
class DecodeJob:
    """Clips that are cut from one decoded video."""

    first: int  # index of its first clip in the batch
    rows: list[PlanRow]
    batch: int  # number of the batch
    decode: int  # number of the decode in the run
    host: HostClips  # of the whole batch, where PyAV writes
    only_pyav: bool = False  # DALI has failed
    attempt: int = 0  # videos before this one that could not be decoded
    for_dali: VideoSlice | None = None  # what DALI is to decode, kept until the clips are out

    # The state of the call that works on it.
    future: Future[Any] = field(init=False)
    is_read: bool = field(default=False, init=False)  # whether it is known who decodes
    started: float | None = field(default=None, init=False)  # when decoding began, None: not yet
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)  # held while clips are written
    is_abandoned: bool = field(default=False, init=False)  # nobody waits for it any more: it must not write

    def retry(self, only_pyav: bool = False) -> "DecodeJob":
        """Return a job for the same clips. A thread that hangs may still change this one."""
        return replace(self, for_dali=None, only_pyav=only_pyav or self.only_pyav)


class ClipDecoder:
    """Thread-safe."""

    jobs_at_once = 1  # at most

    def __init__(
        self, dataset: ShardDataset, plan: ClipPlan, policy: DecoderPolicy, config: DataConfig, quarantine: Path | None
    ) -> None:
        self._dataset, self._plan, self._policy, self.reader = dataset, plan, policy, Reader(dataset, plan)
        self.quarantine = Quarantine(dataset, quarantine, config.max_bad_fraction)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def close(self) -> None:
        """End what threads leave behind: nothing of these."""

    @property
    def counts(self) -> Counter[str]:
        """Sums since the start; seconds are summed over threads."""
        with self._lock:
            return self._counts + self._dataset.cache.counts

    def count(self, **amounts: float) -> None:
        with self._lock:
            self._counts.update(amounts)

    def decode_all(self, jobs: Sequence[DecodeJob]) -> None:
        """Do the work on videos of one batch, as many as `jobs_at_once`."""
        for job in jobs:
            self.decode(job)

    def decode(self, job: DecodeJob) -> None:
        """Read the job's video; write its clips to `job.host`, or leave the video in `job.for_dali`.

        A video that cannot be decoded is replaced as the plan says. Raise InputError if there are too many of these, or
        if the plan allows no replacement.
        """
        while not job.is_abandoned:
            sample = job.rows[0].sample
            try:
                started = time.perf_counter()
                video = self.reader.clip(sample, job.rows[0].frames)
                self.count(videos_read=1, bytes_read=len(video.data), read_seconds=time.perf_counter() - started)
                job.started = time.monotonic()  # not before: downloads have a timeout of their own
                if not job.only_pyav and self._policy.uses_dali(sample, job.decode, job.batch, video):
                    job.for_dali = video
                job.is_read = True
                if job.for_dali is None:
                    self._decode_with_pyav(job, video)
                return
            except VideoError as error:
                if not job.is_abandoned:
                    self.replace(job, str(error))
            finally:
                job.started = None

    def _decode_with_pyav(self, job: DecodeJob, video: VideoSlice) -> None:
        started = time.perf_counter()
        task = find_source(video.data), video, self._dataset.samples[job.rows[0].sample]
        decoded = job.host.takes_frames and self._copy_planes(job, *task)
        if not decoded:
            decoded = self._cut_views(job, *task)
        self.count(frames_decoded=decoded, decode_seconds=time.perf_counter() - started)

    def _copy_planes(self, job: DecodeJob, source: ClipSource, video: VideoSlice, sample: Sample) -> int:
        frames = source.copy_planes(video, sample, job.rows, self._plan.frame_size, job.host.allocate)
        if frames is None:
            return 0
        with job.lock:
            if not job.is_abandoned:
                job.host.add_frames(job.first, job.rows, frames)
        return frames.num_decoded

    def _cut_views(self, job: DecodeJob, source: ClipSource, video: VideoSlice, sample: Sample) -> int:
        images = job.host.images(job.first, len(job.rows))

        def store(view: int, time: int, write: Callable[[np.ndarray], object]) -> None:
            with job.lock:
                if not job.is_abandoned:
                    write(images[view, time])

        return source.cut_views(video, sample, job.rows, self._plan.frame_size, store)

    def replace(self, job: DecodeJob, reason: str) -> None:
        """Replace a video that cannot be decoded by another one, and record it in the quarantine."""
        sample = job.rows[0].sample
        job.attempt += 1
        rows = [row for old in job.rows if (row := self._plan.replacement(old, job.attempt)) is not None]
        if len(rows) < len(job.rows) or job.attempt > MAX_ATTEMPTS:
            raise InputError(f"{self._dataset.where(sample)} cannot be decoded: {reason}")
        self.count(bad_clips=len(rows))
        self.quarantine.add(sample, reason, len(rows))
        job.rows, job.is_read = rows, False
