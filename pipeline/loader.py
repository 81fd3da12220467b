"""Batches of clips on the device, prepared in the background.

A batch passes through these stages; while one is used for training, up to `data.prefetch` others are in the making:

1. plan: which video, frames, crop and flip each clip is (pipeline/planning)
2. worker threads read each video and, unless DALI is to decode it, decode its frames into host memory, many threads in
   a process each (ClipDecoder)
3. DALI decodes its part of the batch on the device (Dali)
4. host memory is copied to the device on a stream of its own, where a GPU crops and scales the frames (HostClips); on a
   CPU, and where frames are unusual, this belongs to 2
5. both parts are joined
6. augmentation, if any, on the device
"""

import atexit
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from common.devices import add_device_index, to_device
from common.logging import log_note
from kernels.crop_resize import frame_bytes
from pipeline.config import DataConfig
from pipeline.decoding.clip_decoder import ClipDecoder, DecodeJob
from pipeline.decoding.dali import GPU_THREADS, Dali, shorten
from pipeline.decoding.planes import find_window
from pipeline.decoding.policy import DecoderPolicy
from pipeline.decoding.process_decoder import ProcessClipDecoder
from pipeline.decoding.upload import HostClips
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.pool import ThreadPool
from pipeline.shards.dataset import ShardDataset

POLL_S = 0.2  # between looks at whether a decode hangs
COUNTERS = (
    *("clips", "dali_clips", "batches_ready", "frames_delivered", "frames_decoded", "videos_read", "bytes_read"),
    *("bad_clips", "fallback_clips", "timeouts", "wait_seconds"),
    *("download_seconds", "read_seconds", "decode_seconds", "cache_hits"),
)


@dataclass  # not frozen: Lightning copies batches field by field
class Batch:
    """Clips of one micro-batch, all on the device."""

    clip: UInt8[Tensor, "B T H W C"]  # RGB
    labels: Int64[Tensor, " B"] | UInt8[Tensor, "B classes"]  # -1: none; with several labels per video, ones mark them
    keys: list[str]  # of the videos; those of replacements where videos could not be decoded
    positions: list[int]  # in the plan
    is_last: bool = True  # of this rank's batches of an optimizer step
    fields: dict[str, list[Any]] = field(default_factory=dict)  # those of data.fields, None where a video has none


@dataclass
class PendingBatch:
    """A batch in the making."""

    number: int
    jobs: list[DecodeJob]
    host: HostClips
    num_bytes: int  # held until the batch is out
    is_fed: bool = False  # whether DALI has its part

    @property
    def dali_jobs(self) -> list[DecodeJob]:
        return [job for job in self.jobs if job.for_dali is not None]

    @property
    def rows(self) -> list[PlanRow]:
        return [row for job in self.jobs for row in job.rows]


class ClipLoader(AbstractContextManager["ClipLoader"]):
    """Reads and decodes the clips of a plan in background threads; a context manager."""

    def __init__(
        self, dataset: ShardDataset, plan: ClipPlan, device: torch.device, config: DataConfig, quarantine: Path | None
    ) -> None:
        """quarantine: file that gets a line for every video that cannot be decoded; None: they are only counted.

        Raise InputError if data.decoder is dali and DALI lacks a codec of the shards on this device, or if no sample
        has one of data.fields.
        """
        self._dataset, self._plan, self.config = dataset, plan, config
        dataset.require_fields(config.fields)
        self._device = device = add_device_index(device)
        self._policy = DecoderPolicy(dataset, device, config)
        decoder = ProcessClipDecoder if config.uses_processes else ClipDecoder
        self._decoder = decoder(dataset, plan, self._policy, config, quarantine)
        self._pool = ThreadPool(config.threads, "clips")
        dali_threads = config.dali_threads or (GPU_THREADS if device.type == "cuda" else config.threads)
        self._dali = Dali(device, plan, dali_threads, config.decode_timeout_s)
        self._gave_up_dali = False
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.scales_on_device = device.type == "cuda"
        self._stream: Iterator[Batch] = iter(())  # what `microbatches` reads on from
        self._next_step = -1
        atexit.register(self.close)  # threads must not be inside FFmpeg or DALI when the interpreter exits

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all threads after the frame that each is decoding."""
        atexit.unregister(self.close)
        self._decoder.reader.close()  # first: threads may be waiting for a download
        self._pool.close()
        self._decoder.close()
        self._dali.close()

    @property
    def counters(self) -> dict[str, float]:
        """Sums since the start, of this process."""
        counts = self._decoder.counts
        return {name: float(counts[name]) for name in COUNTERS}

    def microbatches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's batches of an optimizer step. Steps in a row are read from the same prefetched stream."""
        if step != self._next_step:
            self._stream = self.batches(step * self._plan.passes)
        self._next_step = step + 1
        for left in range(self._plan.passes, 0, -1):
            yield replace(next(self._stream), is_last=left == 1)

    def batches(self, first: int) -> Iterator[Batch]:
        """Yield the plan's batches from number `first` on, endlessly if the plan is endless. One iterator at a time.

        Clips may lie in DALI's memory: use them on the stream that is current when the next batch is asked for, or copy
        them. Raise InputError if too many videos cannot be decoded.
        """
        pending: deque[PendingBatch] = deque()
        numbers = count(first)
        self._dali.reset()  # an earlier iterator may have left batches in it
        self._dali.release()
        self._top_up(pending, numbers)
        while pending:
            started = time.perf_counter()
            self._decoder.count(batches_ready=sum(all(job.future.done() for job in batch.jobs) for batch in pending))
            self._start_transfers(pending)
            current = pending.popleft()
            clips = self._finish(current, pending)
            self._top_up(pending, numbers)
            self._start_transfers(pending)
            batch = self._make_batch(current.rows, clips)
            self._decoder.count(wait_seconds=time.perf_counter() - started)
            yield batch
            self._dali.release()

    def _top_up(self, pending: deque[PendingBatch], numbers: Iterator[int]) -> None:
        """Keep `data.prefetch` batches in the making, fewer if they are large."""
        limit = self.config.prefetch_mib * 2**20
        while len(pending) < self.config.prefetch and sum(batch.num_bytes for batch in pending) < limit:
            number = next(numbers)
            rows = self._plan.batch(number)
            if not rows:
                return
            self._decoder.reader.advance(number)
            pending.append(self._start(number, rows))

    def _start(self, number: int, rows: list[PlanRow]) -> PendingBatch:
        views = self._plan.views
        shape = (len(rows), self._plan.num_frames, *self._plan.frame_size, self._dataset.channels)
        host = HostClips(shape, self._copying, self.scales_on_device)
        first_decode = number * (self._plan.batch_size // views)
        jobs = [
            DecodeJob(first, rows[first : first + views], number, first_decode + first // views, host)
            for first in range(0, len(rows), views)
        ]
        # So many that every thread has two times as many in the batches that are in the making.
        share = len(jobs) * self.config.prefetch // (2 * self.config.threads)
        at_once = max(1, min(self._decoder.jobs_at_once, share))
        for place in range(0, len(jobs), at_once):
            self._submit(jobs[place : place + at_once])
        return PendingBatch(number, jobs, host, math.prod(shape) + sum(map(self._count_bytes, jobs)))

    def _count_bytes(self, job: DecodeJob) -> int:
        """Return how many bytes a video takes, and its frames if they are kept for the device to scale."""
        sample = self._dataset.samples[job.rows[0].sample]
        if not job.host.takes_frames:
            return sample.size
        window = find_window([row.crop for row in job.rows], sample.width, sample.height)
        return sample.size + self._plan.num_frames * frame_bytes(window.height, window.width, 1)

    def _submit(self, jobs: Sequence[DecodeJob]) -> None:
        future = self._pool.submit(partial(self._decoder.decode_all, jobs))
        for job in jobs:
            job.future = future

    def _start_transfers(self, pending: Sequence[PendingBatch]) -> None:
        """Feed DALI with what has been read, in order, and start the upload of the next batch, so that both happen
        during the training step."""
        for batch in pending:
            all_ready = all(job.is_ready for job in batch.jobs)
            if batch is pending[0] and batch.host.copy is None and batch.host.is_allocated and all_ready:
                batch.host.upload()
            if not all_ready and not all(job.is_read for job in batch.jobs):
                return
            try:
                self._feed_dali(batch)
            except RuntimeError:  # most likely of an earlier batch; it comes up again at its turn
                self._reset_dali(pending)
                return

    def _feed_dali(self, batch: PendingBatch) -> None:
        """Give DALI its videos of a batch, once. Raise RuntimeError if it refuses them."""
        if self._gave_up_dali or batch.is_fed or not (jobs := batch.dali_jobs):
            return
        self._dali.feed([(job.for_dali, job.rows) for job in jobs if job.for_dali])
        batch.is_fed = True

    def _reset_dali(self, pending: Sequence[PendingBatch]) -> None:
        """After an error: what is in flight is fed again to a new graph."""
        self._dali.reset()
        for batch in pending:
            batch.is_fed = False

    def _finish(self, batch: PendingBatch, later: Sequence[PendingBatch]) -> UInt8[Tensor, "B T H W C"]:
        """Wait for a batch and put it on the device."""
        self._wait_for_workers(batch, later)
        from_dali = None
        dali_jobs = batch.dali_jobs
        if dali_jobs and self._gave_up_dali:
            self._redo_with_pyav(batch, later)
        elif dali_jobs:
            try:
                from_dali = self._take_from_dali(batch)
            except RuntimeError as error:
                self._recover_from_dali(batch, later, error)
        if from_dali is not None and len(dali_jobs) == len(batch.jobs):
            return from_dali
        clips = batch.host.on_device()
        if from_dali is not None:
            places = [job.first + view for job in dali_jobs for view in range(len(job.rows))]
            for place, clip in zip(places, from_dali, strict=True):
                clips[place].copy_(clip)  # an indexed assignment of all goes byte by byte on a CPU: 9 times as long
        return clips

    def _wait_for_workers(self, batch: PendingBatch, later: Sequence[PendingBatch]) -> None:
        """Wait until all videos of a batch are read and PyAV's part is decoded; replace videos whose decode hangs."""
        for place in range(len(batch.jobs)):
            while not (future := batch.jobs[place].future).done():
                wait([future], min(POLL_S, self.config.decode_timeout_s / 4))
                for other in (batch, *later):  # all threads may hang in videos of later batches
                    self._replace_hung(other)
            future.result()  # raises what the job has raised

    def _replace_hung(self, batch: PendingBatch) -> None:
        timeout = self.config.decode_timeout_s
        for place, job in enumerate(batch.jobs):
            started = job.started
            if started is None or time.monotonic() - started < timeout:
                continue
            with job.lock:
                job.is_abandoned = True
            self._pool.abandon(job.future)
            self._decoder.count(timeouts=1)
            batch.jobs[place] = new = job.retry()
            self._decoder.replace(new, f"decoding took more than {timeout:g} s")
            self._submit([new])

    def _take_from_dali(self, batch: PendingBatch) -> UInt8[Tensor, "B T H W C"]:
        """Return DALI's part of a batch. Raise RuntimeError if a video of it cannot be decoded, or DALI hangs."""
        self._feed_dali(batch)
        jobs = batch.dali_jobs
        rows = [row for job in jobs for row in job.rows]
        try:
            clips = self._dali.take(rows)
        except TimeoutError as error:
            self._decoder.count(timeouts=1)
            names = ", ".join(self._dataset.where(job.rows[0].sample) for job in jobs)
            raise RuntimeError(f"no answer for {self.config.decode_timeout_s:g} s to one of {names}") from error
        # DALI starts at the first frame of what it is given and never seeks.
        frames = sum(max(job.for_dali.numbers) + 1 for job in jobs if job.for_dali)
        self._decoder.count(dali_clips=len(rows), frames_decoded=frames)
        return clips

    def _recover_from_dali(self, batch: PendingBatch, later: Sequence[PendingBatch], error: RuntimeError) -> None:
        """Decode DALI's part of a failed batch with PyAV, which finds and replaces a corrupt video: DALI names none.

        PyAV also decodes these videos whenever they come again, beginning with the first batch that is not yet read.
        """
        self._reset_dali(later)
        failed = batch.dali_jobs
        self._decoder.count(fallback_clips=sum(len(job.rows) for job in failed))
        self._policy.ban_from_dali([job.rows[0].sample for job in failed], batch.number + self.config.prefetch)
        attempts = sum(job.attempt for job in batch.jobs)
        self._redo_with_pyav(batch, later)
        found_bad_video = sum(job.attempt for job in batch.jobs) > attempts
        if self._dali.count_failure(found_bad_video):
            self._gave_up_dali = True
            self._policy.ban_from_dali([None], batch.number)
            log_note(
                f"DALI has failed repeatedly, most recently with '{shorten(error)}': PyAV decodes everything from now"
                f" on, on {self.config.threads} CPU threads"
            )

    def _redo_with_pyav(self, batch: PendingBatch, later: Sequence[PendingBatch]) -> None:
        """Decode DALI's part of a batch with PyAV, and wait for it."""
        for place, job in enumerate(batch.jobs):
            if job.for_dali is not None:
                batch.host.copy = None
                batch.jobs[place] = job.retry(only_pyav=True)
                self._submit([batch.jobs[place]])
        self._wait_for_workers(batch, later)

    def _make_batch(self, rows: Sequence[PlanRow], clips: UInt8[Tensor, "B T H W C"]) -> Batch:
        if any(row.augment_ops or row.erase_box for row in rows):
            from pipeline.augment import augment  # torchvision takes a second to import; only fine-tuning needs it

            clips = augment(clips, rows)
        samples = [self._dataset.samples[row.sample] for row in rows]
        if self._dataset.info.multi_label:
            labels = to_device(self._dataset.mark_classes(row.sample for row in rows), self._device)
        else:
            labels = to_device([-1 if sample.label is None else sample.label for sample in samples], self._device)
        self._decoder.quarantine.delivered(len(rows))
        self._decoder.count(clips=len(rows), frames_delivered=len(rows) * self._plan.num_frames)
        return Batch(
            clips, labels, [sample.key for sample in samples], [row.position for row in rows],
            fields={name: [sample.fields.get(name) for sample in samples] for name in self.config.fields},
        )  # fmt: skip
