"""Batches of clips on the device, prepared in the background.

A batch passes through these stages; while one is used for training, up to `data.prefetch` others are in the making:

1. plan: which video, frames, crop and flip each clip is (pipeline/planning)
2. threads read each video for DALI, or have a process decode its frames into host memory (HostLoader); beside a GPU
   without DALI, the plan and these threads have a process of their own (LoaderProcess)
3. DALI decodes its part of the batch on the device (Dali)
4. host memory is copied to the device on a stream of its own, where a GPU crops and scales the frames (HostClips); on a
   CPU, and where frames are unusual, this belongs to 2
5. both parts are joined
6. augmentation, if any, on the device
"""

import atexit
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from common.devices import add_device_index, to_device
from common.logging import log_note
from pipeline.config import DataConfig
from pipeline.decoding.dali import GPU_THREADS, Dali, shorten
from pipeline.decoding.policy import DecoderPolicy
from pipeline.host_loader import HostBatch, HostLoader
from pipeline.loader_process import LoaderProcess
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.shards.dataset import ShardDataset

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


class ClipLoader(AbstractContextManager["ClipLoader"]):
    """Reads and decodes the clips of a plan in the background; a context manager."""

    def __init__(
        self, dataset: ShardDataset, plan: ClipPlan, device: torch.device, config: DataConfig, quarantine: Path | None
    ) -> None:
        """quarantine: file that gets a line for every video that cannot be decoded; None: they are only counted.

        Raise InputError if data.decoder is dali and DALI lacks a codec of the shards on this device, or if no sample
        has one of data.fields.
        """
        dataset.require_fields(config.fields)
        self._device = device = add_device_index(device)
        on_gpu = device.type == "cuda"
        self._dataset, self._plan, self.config = dataset, plan, config
        self._policy = DecoderPolicy(dataset, device, config)
        stream = torch.cuda.Stream(device) if on_gpu else None
        self._host: HostLoader | LoaderProcess
        if on_gpu and not self._policy.dali_share:
            self._host = LoaderProcess(dataset, plan, config, quarantine, stream)
        else:
            self._host = HostLoader(dataset, plan, self._policy, config, quarantine, stream)
        self._host.takes_frames = on_gpu
        dali_threads = config.dali_threads or (GPU_THREADS if on_gpu else config.threads)
        self._dali = Dali(device, plan, dali_threads, config.decode_timeout_s)
        self._gave_up_dali = False
        self._counts: Counter[str] = Counter()
        self._stream: Iterator[Batch] = iter(())  # what `microbatches` reads on from
        self._next_step = -1
        atexit.register(self.close)  # threads must not be inside FFmpeg or DALI when the interpreter exits

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and threads."""
        atexit.unregister(self.close)
        self._host.close()
        self._dali.close()

    @property
    def counters(self) -> dict[str, float]:
        """Sums since the start, of this process and those that work for it."""
        return {name: float(self._counts[name] + self._host.counts[name]) for name in COUNTERS}

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
        self._dali.reset()  # an earlier iterator may have left batches in it
        self._dali.release()
        self._host.start(first)
        while True:
            started = time.perf_counter()
            self._counts["batches_ready"] += sum(batch.is_ready for batch in self._host.pending)
            self._start_transfers()
            if (current := self._host.take()) is None:
                return
            clips = self._finish(current)
            self._host.top_up()
            self._start_transfers()
            batch = self._make_batch(current.rows, clips)
            self._counts.update(wait_seconds=time.perf_counter() - started)  # type: ignore[call-overload]
            yield batch
            self._dali.release()

    def _start_transfers(self) -> None:
        """Feed DALI with what has been read, in order, and start the upload of the next batch, so that both happen
        during the training step."""
        for place, batch in enumerate(self._host.pending):
            if (is_ready := batch.is_ready) and not place and batch.host.copy is None and batch.host.is_allocated:
                batch.host.upload()
            if not is_ready and not batch.is_read:
                return
            try:
                self._feed_dali(batch)
            except RuntimeError:  # most likely of an earlier batch; it comes up again at its turn
                self._reset_dali()
                return

    def _feed_dali(self, batch: HostBatch) -> None:
        """Give DALI its videos of a batch, once. Raise RuntimeError if it refuses them."""
        if self._gave_up_dali or batch.is_fed or not (jobs := batch.dali_jobs):
            return
        self._dali.feed([(job.for_dali, job.rows) for job in jobs if job.for_dali])
        batch.is_fed = True

    def _reset_dali(self) -> None:
        """After an error: what is in flight is fed again to a new graph."""
        self._dali.reset()
        for batch in self._host.pending:
            batch.is_fed = False

    def _finish(self, batch: HostBatch) -> UInt8[Tensor, "B T H W C"]:
        """Put a batch on the device."""
        from_dali = None
        dali_jobs = batch.dali_jobs
        if dali_jobs and self._gave_up_dali:
            self._redo_with_pyav(batch)
        elif dali_jobs:
            try:
                from_dali = self._take_from_dali(batch)
            except RuntimeError as error:
                self._recover_from_dali(batch, error)
        if from_dali is not None and len(dali_jobs) == len(batch.jobs):
            return from_dali
        clips = batch.host.on_device()
        if from_dali is not None:
            places = [job.first + view for job in dali_jobs for view in range(len(job.rows))]
            for place, clip in zip(places, from_dali, strict=True):
                clips[place].copy_(clip)  # an indexed assignment of all goes byte by byte on a CPU: 9 times as long
        return clips

    def _take_from_dali(self, batch: HostBatch) -> UInt8[Tensor, "B T H W C"]:
        """Return DALI's part of a batch. Raise RuntimeError if a video of it cannot be decoded, or DALI hangs."""
        self._feed_dali(batch)
        jobs = batch.dali_jobs
        rows = [row for job in jobs for row in job.rows]
        try:
            clips = self._dali.take(rows)
        except TimeoutError as error:
            self._counts["timeouts"] += 1
            names = ", ".join(self._dataset.where(job.rows[0].sample) for job in jobs)
            raise RuntimeError(f"no answer for {self.config.decode_timeout_s:g} s to one of {names}") from error
        # DALI starts at the first frame of what it is given and never seeks.
        frames = sum(max(job.for_dali.numbers) + 1 for job in jobs if job.for_dali)
        self._counts.update(dali_clips=len(rows), frames_decoded=frames)
        return clips

    def _recover_from_dali(self, batch: HostBatch, error: RuntimeError) -> None:
        """Decode DALI's part of a failed batch with PyAV, which finds and replaces a corrupt video: DALI names none.

        PyAV also decodes these videos whenever they come again, beginning with the first batch that is not yet read.
        """
        self._reset_dali()
        failed = batch.dali_jobs
        self._counts["fallback_clips"] += sum(len(job.rows) for job in failed)
        self._policy.ban_from_dali([job.rows[0].sample for job in failed], batch.number + self.config.prefetch)
        if self._dali.count_failure(self._redo_with_pyav(batch)):
            self._gave_up_dali = True
            self._policy.ban_from_dali([None], batch.number)
            log_note(
                f"DALI has failed repeatedly, most recently with '{shorten(error)}': PyAV decodes everything from now"
                f" on, on {self.config.threads} CPU threads"
            )

    def _redo_with_pyav(self, batch: HostBatch) -> bool:
        assert isinstance(self._host, HostLoader)  # with DALI, it is
        return self._host.redo_with_pyav(batch)

    def _make_batch(self, rows: Sequence[PlanRow], clips: UInt8[Tensor, "B T H W C"]) -> Batch:
        if any(row.augment_ops or row.erase_box for row in rows):
            from pipeline.augment import augment  # torchvision takes a second to import; only fine-tuning needs it

            clips = augment(clips, rows)
        samples = [self._dataset.samples[row.sample] for row in rows]
        if self._dataset.info.multi_label:
            labels = to_device(self._dataset.mark_classes(row.sample for row in rows), self._device)
        else:
            labels = to_device([-1 if sample.label is None else sample.label for sample in samples], self._device)
        self._counts.update(clips=len(rows), frames_delivered=len(rows) * self._plan.num_frames)
        return Batch(
            clips, labels, [sample.key for sample in samples], [row.position for row in rows],
            fields={name: [sample.fields.get(name) for sample in samples] for name in self.config.fields},
        )  # fmt: skip
