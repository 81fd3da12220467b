"""The work on each video of a batch in worker threads: have a process decode its clips, or read it for DALI; replace it
if it is bad."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import LifoQueue

import numpy as np
from jaxtyping import UInt8

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.planes import MAX_GROWTH
from pipeline.decoding.policy import DecoderPolicy
from pipeline.decoding.process import Decoded, DecodeProcess, HungError, Task
from pipeline.decoding.upload import HostClips
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.quarantine import Quarantine
from pipeline.reading.reader import LocalClip, Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice
from pipeline.shared_blocks import SharedBlocks
from pipeline.video_error import VideoError

MAX_ATTEMPTS = 100  # replacements in a row for one clip
JOBS_AT_ONCE = 4  # at most, for all of which a thread takes Python's lock a few times


@dataclass
class DecodeJob:
    """Clips that are cut from one decoded video."""

    first: int  # index of its first clip in the batch
    rows: list[PlanRow]
    batch: int  # number of the batch
    decode: int  # number of the decode in the run
    host: HostClips  # of the whole batch
    only_pyav: bool = False  # DALI has failed
    attempt: int = 0  # videos before this one that could not be decoded
    for_dali: VideoSlice | None = None  # what DALI is to decode, kept until the clips are out
    is_read: bool = False  # whether it is known who decodes
    future: Future[None] = field(init=False)


Fault = tuple[DecodeJob, VideoError]


class ClipDecoder:
    """Thread-safe. There is a process for each thread that decodes."""

    def __init__(
        self,
        dataset: ShardDataset,
        plan: ClipPlan,
        policy: DecoderPolicy,
        config: DataConfig,
        quarantine: Path | None,
        memory: SharedBlocks,
    ) -> None:
        """memory: where clips are, which processes write to."""
        self._dataset, self._plan, self._policy, self.reader = dataset, plan, policy, Reader(dataset, plan)
        self.quarantine = Quarantine(dataset, quarantine, config.max_bad_fraction)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._memory = memory
        # Planes have at most MAX_GROWTH times as many samples as the clips that are made of them, of up to two bytes.
        clip_bytes = plan.num_frames * plan.frame_size.height * plan.frame_size.width * dataset.channels
        scratch = JOBS_AT_ONCE * plan.views * clip_bytes * MAX_GROWTH * 2
        self._processes = [DecodeProcess(memory, scratch, config.decode_timeout_s) for _ in range(config.threads)]
        self._idle: LifoQueue[DecodeProcess] = LifoQueue()
        for process in self._processes:
            self._idle.put(process)

    def close(self) -> None:
        """End the processes; threads that wait for one raise CancelledError, as do those that wait for a download."""
        self.reader.close()
        for process in self._processes:
            process.close()

    @property
    def counts(self) -> Counter[str]:
        """Sums since the start; seconds are summed over threads."""
        with self._lock:
            return self._counts + self._dataset.cache.counts

    def decode(self, jobs: Sequence[DecodeJob]) -> None:
        """Write the clips of at most JOBS_AT_ONCE jobs to `job.host`, or leave a video in `job.for_dali`.

        A video that cannot be decoded is replaced as the plan says. Raise InputError if there are too many of these, or
        if the plan allows no replacement.
        """
        while jobs:
            tasks = [(job, task) for job in jobs if (task := self._prepare(job))]
            faults = self._carry_out(tasks)
            for job, fault in faults:
                self._replace(job, fault)
            jobs = [job for job, _ in faults]

    def _prepare(self, job: DecodeJob) -> Task | None:
        """Find a job's video; None: it is DALI's."""
        while True:
            sample = self._dataset.samples[job.rows[0].sample]
            try:
                video = self._find_video(job)
            except VideoError as error:
                self._replace(job, error)
                continue
            job.is_read = True
            if job.for_dali is not None:
                return None
            images = None
            if not job.host.takes_frames:
                images = self._memory.find(job.host.images(job.first, len(job.rows)))
            return Task(video, sample, job.rows, self._plan.frame_size, images)

    def _find_video(self, job: DecodeJob) -> LocalClip | VideoSlice:
        row = job.rows[0]
        if job.only_pyav or not self._policy.may_use_dali(row.sample, job.decode, job.batch):
            return self.reader.find_clip(row.sample, row.frames)
        started = time.perf_counter()
        video = self.reader.clip(row.sample, row.frames)
        if self._policy.uses_dali(row.sample, job.decode, job.batch, video):
            job.for_dali = video
            self._count(videos_read=1, bytes_read=len(video.data), read_seconds=time.perf_counter() - started)
        return video

    def _carry_out(self, tasks: Sequence[tuple[DecodeJob, Task]]) -> list[Fault]:
        """Return the jobs whose video cannot be decoded, and why not."""
        if not tasks:
            return []
        process = self._idle.get()
        try:
            results, scratch = process.decode([task for _, task in tasks])
            answered = [(job, result) for (job, _), result in zip(tasks, results, strict=True)]
            self._take_clips([(job, result) for job, result in answered if isinstance(result, Decoded)], scratch)
            return [(job, result) for job, result in answered if isinstance(result, VideoError)]
        except VideoError as error:  # the process hung or crashed in one of them
            if len(tasks) == 1:
                self._count(timeouts=isinstance(error, HungError))
                return [(tasks[0][0], error)]
        finally:
            self._idle.put(process)
        return [fault for task in tasks for fault in self._carry_out([task])]

    def _take_clips(self, decoded: Sequence[tuple[DecodeJob, Decoded]], scratch: UInt8[np.ndarray, " bytes"]) -> None:
        """Copy what a process has left in its scratch memory into that of the batch."""
        address = None
        for job, result in decoded:
            self._count(**result.counts)
            if not job.host.takes_frames:
                continue  # images have been written to their place
            if result.frames is None:
                images = job.host.images(job.first, len(job.rows))
                np.copyto(images, scratch[result.start : result.start + images.size].reshape(images.shape))
                continue
            if address is None:  # all frames at once
                address, copy = job.host.allocate(len(scratch))
                copy[:] = scratch
            offsets = [address + offset for offset in result.frames.offsets]
            job.host.add_frames(job.first, job.rows, result.frames._replace(offsets=offsets))

    def _count(self, **amounts: float) -> None:
        with self._lock:
            self._counts.update(amounts)

    def _replace(self, job: DecodeJob, fault: VideoError) -> None:
        """Replace a video that cannot be decoded by another one, and record it in the quarantine."""
        sample = job.rows[0].sample
        job.attempt += 1
        rows = [row for old in job.rows if (row := self._plan.replacement(old, job.attempt)) is not None]
        if len(rows) < len(job.rows) or job.attempt > MAX_ATTEMPTS:
            raise InputError(f"{self._dataset.where(sample)} cannot be decoded: {fault}")
        self._count(bad_clips=len(rows))
        self.quarantine.add(sample, str(fault), len(rows))
        job.rows, job.is_read = rows, False
