"""ClipDecoder whose threads have a process each decode several videos at a time."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from pipeline.config import DataConfig
from pipeline.decoding.clip_decoder import ClipDecoder, DecodeJob
from pipeline.decoding.policy import DecoderPolicy
from pipeline.decoding.process import Decoded, DecodeProcess, HungError, Task
from pipeline.planning.plan import ClipPlan
from pipeline.shards import arrays
from pipeline.shards.dataset import ShardDataset
from pipeline.video_error import VideoError

Fault = tuple[DecodeJob, VideoError]


class ProcessClipDecoder(ClipDecoder):
    jobs_at_once = 4  # for all of which a thread takes Python's lock a few times

    def __init__(
        self, dataset: ShardDataset, plan: ClipPlan, policy: DecoderPolicy, config: DataConfig, quarantine: Path | None
    ) -> None:
        super().__init__(dataset, plan, policy, config, quarantine)
        self._timeout, self._of_thread = config.decode_timeout_s, threading.local()
        self._processes: list[DecodeProcess] = []

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def decode_all(self, jobs: Sequence[DecodeJob]) -> None:
        there: list[DecodeJob] = []
        for job in jobs:
            if self._is_for_process(job):
                there.append(job)
            else:
                self.decode(job)
        while there:
            faults = self._decode_there(there)
            for job, fault in faults:
                self.replace(job, str(fault))
            there = [job for job, _ in faults]

    def _is_for_process(self, job: DecodeJob) -> bool:
        sample = job.rows[0].sample
        if self._dataset.samples[sample].container == arrays.CONTAINER:
            return False  # there is nothing to decode
        return job.only_pyav or not self._policy.may_use_dali(sample, job.decode, job.batch)

    def _decode_there(self, jobs: Sequence[DecodeJob]) -> list[Fault]:
        """Return the jobs whose video cannot be decoded, and why not."""
        tasks = [self._make_task(job) for job in jobs]
        started = time.perf_counter()
        try:
            results, memory = self._find_process().decode(tasks)
        except VideoError as error:  # the process hung or crashed in one of them
            if len(jobs) == 1:
                self.count(timeouts=isinstance(error, HungError))
                return [(jobs[0], error)]
            return [fault for job in jobs for fault in self._decode_there([job])]
        decoded = [(job, result) for job, result in zip(jobs, results, strict=True) if isinstance(result, Decoded)]
        self._take_clips(decoded, memory)
        self.count(
            videos_read=len(decoded),
            bytes_read=sum(result.num_bytes_read for _, result in decoded),
            frames_decoded=sum(result.num_decoded for _, result in decoded),
            decode_seconds=time.perf_counter() - started,
        )
        return [(job, result) for job, result in zip(jobs, results, strict=True) if isinstance(result, VideoError)]

    def _make_task(self, job: DecodeJob) -> Task:
        while True:
            sample = job.rows[0].sample
            try:
                video = self.reader.find_clip(sample, job.rows[0].frames)
            except VideoError as error:
                self.replace(job, str(error))
                continue
            job.is_read = True
            size = self._plan.frame_size
            return Task(video, self._dataset.samples[sample], job.rows, size, job.host.takes_frames)

    def _find_process(self) -> DecodeProcess:
        """Return this thread's."""
        if not hasattr(self._of_thread, "process"):
            self._of_thread.process = DecodeProcess(self._timeout)
            self._processes.append(self._of_thread.process)
        process: DecodeProcess = self._of_thread.process
        return process

    def _take_clips(self, decoded: Sequence[tuple[DecodeJob, Decoded]], memory: UInt8[np.ndarray, " bytes"]) -> None:
        """Copy what the process has decoded into the memory of the batch."""
        address = None
        for job, result in decoded:
            if result.frames is None:
                images = job.host.images(job.first, len(job.rows))
                np.copyto(images, memory[result.start : result.start + images.size].reshape(images.shape))
                continue
            if address is None:  # all frames at once
                address, copy = job.host.allocate(len(memory))
                copy[:] = memory
            offsets = [address + offset for offset in result.frames.offsets]
            job.host.add_frames(job.first, job.rows, result.frames._replace(offsets=offsets))
