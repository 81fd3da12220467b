"""Batches of clips on the device, prepared in the background.

1. The plan says what every clip is; it is a pure function, so whoever has it needs only the number of a batch.
2. Decode workers (decoding/decode_worker.py) have the dataset and the plan. They are sent chunks: a few videos of a
   batch. They read, decode, replace bad videos, and write clips, or the planes of which a GPU makes clips, into the
   batch's block of shared memory (clip_memory.py).
3. WorkerPool sends the chunks of `data.prefetch` batches, collects the results, and replaces workers that die.
4. A batch whose chunks are all there is uploaded on a stream of its own, during the training step (upload.py).
5. Videos that are DALI's, if it is asked for, are only read by the workers; joined, they are decoded on the device.
6. Augmentation, if any, happens on the device.
"""

import atexit
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from common.arithmetic import ceil_div
from common.devices import to_device
from common.logging import log_note
from pipeline.clip_memory import BlockLayout, ClipMemory
from pipeline.config import DataConfig
from pipeline.decoding.dali import GPU_PIPELINES, Dali, adjust_share, choose_policy, shorten
from pipeline.decoding.decode_worker import Chunk, ChunkResult, LoadedClip, WorkerSetup
from pipeline.decoding.joining import EncodedVideo, is_in_share
from pipeline.planning.plan import ClipPlan
from pipeline.quarantine import Quarantine
from pipeline.shards.dataset import ShardDataset
from pipeline.upload import upload
from pipeline.worker_pool import WorkerPool

COUNTERS = (
    *("clips", "dali_clips", "batches_ready", "frames_delivered", "frames_decoded", "videos_read", "bytes_read"),
    *("bad_clips", "fallback_clips", "timeouts", "wait_seconds"),
    *("download_seconds", "read_seconds", "decode_seconds", "cache_hits"),
)
VIDEOS_PER_CHUNK = 4  # at most: each chunk costs this process two messages, .05 ms
MAX_DALI_FAILURES = 3  # in a row, with videos that PyAV decodes: building another graph takes long


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
    """A batch whose chunks are being made, or are all there."""

    number: int
    num_clips: int
    block_number: int
    block: UInt8[np.ndarray, " bytes"]  # of shared memory
    results: dict[int, ChunkResult] = field(default_factory=dict)  # by their first clip
    num_dali_clips: int = 0  # of chunks that may leave videos to DALI
    clips: UInt8[Tensor, "B T H W C"] | None = None  # on the device, perhaps still in flight
    uploaded: torch.cuda.Event | None = None

    @property
    def is_loaded(self) -> bool:
        return sum(result.chunk.num_clips for result in self.results.values()) == self.num_clips

    @property
    def is_read(self) -> bool:
        """Whether all is there that may be left to DALI."""
        found = sum(result.chunk.num_clips for result in self.results.values() if result.chunk.use_dali)
        return found == self.num_dali_clips

    @property
    def chunks(self) -> list[ChunkResult]:
        """What has been made, in order."""
        return [self.results[first] for first in sorted(self.results)]

    @property
    def encoded(self) -> dict[int, EncodedVideo]:
        """Videos that DALI decodes, by their first clip."""
        return {first: video for result in self.chunks for first, video in result.encoded.items()}


class ClipLoader(AbstractContextManager["ClipLoader"]):
    """Reads and decodes the clips of a plan in the background; a context manager."""

    def __init__(
        self, dataset: ShardDataset, plan: ClipPlan, device: torch.device, config: DataConfig, quarantine: Path | None,
        upload_planes: bool | None = None,
    ) -> None:  # fmt: skip
        """quarantine: file that gets a line for every video that cannot be decoded; None: they are only counted.
        upload_planes: whether the device makes clips of decoded planes; None: if it is a GPU.

        Raise InputError if data.decoder is dali and DALI lacks a codec of the shards on this device, or if no sample
        has one of data.fields.
        """
        dataset.require_fields(config.fields)
        # With the number of this thread's current GPU, which is another one in other threads.
        self._device = device = torch.empty(0, device=device).device
        self._dataset, self._plan, self.config = dataset, plan, config
        policy = choose_policy(dataset, device, config)
        on_gpu = device.type == "cuda"
        self._upload_stream = torch.cuda.Stream(device) if on_gpu else None
        self._upload_planes = on_gpu if upload_planes is None else upload_planes
        self._quarantine = Quarantine(dataset, quarantine, config.max_bad_fraction)
        self._dali = Dali(device, plan, GPU_PIPELINES if on_gpu else config.workers, config.decode_timeout_s)
        self._use_dali, self._dali_failures = bool(policy.codecs), 0
        self._share = 0.0 if config.share_of_dali == "auto" else 1.0  # of the chunks, which may leave videos to DALI
        self._numbers: Iterator[int] = count()  # of batches
        self._pending: deque[PendingBatch] = deque()
        self._in_upload: list[tuple[torch.cuda.Event, np.ndarray]] = []  # blocks that are being copied
        self._counts: Counter[str] = Counter()
        self._layout = BlockLayout.choose(dataset, plan, self._upload_planes)
        self._memory = ClipMemory(self._layout)
        setup = WorkerSetup(dataset, plan, config, policy, self._layout, self._upload_planes)
        self._pool = WorkerPool(setup, self._memory.fileno(), self._counts)
        self._stream: Iterator[Batch] = iter(())  # what `microbatches` reads on from
        self._next_step = -1
        atexit.register(self.close)  # DALI must not be at work when the interpreter exits

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        atexit.unregister(self.close)
        self._end_workers()
        self._memory.close()
        self._dali.close()

    @property
    def counters(self) -> dict[str, float]:
        """Sums since the start, of this process and what has come from its workers; seconds are summed over these."""
        return {name: float(self._counts[name]) for name in COUNTERS}

    def microbatches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's batches of an optimizer step. Steps in a row are read from the same prefetched stream."""
        if step != self._next_step:
            self._stream = self.batches(step * self._plan.microbatches_per_step)
        self._next_step = step + 1
        for left in range(self._plan.microbatches_per_step, 0, -1):
            yield replace(next(self._stream), is_last=left == 1)

    def batches(self, first: int) -> Iterator[Batch]:
        """Yield the plan's batches from number `first` on, endlessly if the plan is endless. One iterator at a time.

        Raise InputError if too many videos cannot be decoded.
        """
        if self._pending:  # workers are at work for an earlier iterator
            self._end_workers()
        self._dali.reset()
        self._pool.start()
        self._numbers = count(first)
        self._top_up()
        while self._pending:
            started = time.perf_counter()
            self._collect(wait=False)
            self._counts["batches_ready"] += sum(batch.is_loaded for batch in self._pending)
            batch = self._make_batch(self._finish_first())
            self._top_up()
            self._prepare_next()
            self._counts.update(wait_seconds=time.perf_counter() - started)  # type: ignore[call-overload]
            yield batch
            del batch  # or its block would stay in use one batch longer

    def _end_workers(self) -> None:
        self._pool.close()
        self._pending.clear()
        if self._upload_stream is not None:
            self._upload_stream.synchronize()
        self._in_upload.clear()

    def _top_up(self) -> None:
        """Keep `data.prefetch` batches in the making, fewer if they are large."""
        most = min(self.config.prefetch, self.config.prefetch_mib * 2**20 // self._layout.block_bytes)
        while len(self._pending) < max(1, most):
            number = next(self._numbers)
            if not (num_clips := len(self._plan.positions(number))):
                return
            batch = PendingBatch(number, num_clips, *self._memory.acquire(pin=self._upload_stream is not None))
            self._pending.append(batch)
            chunks = list(self._cut_chunks(batch))
            batch.num_dali_clips = sum(chunk.num_clips for chunk in chunks if chunk.use_dali)
            self._pool.send(sorted(chunks, key=lambda chunk: not chunk.use_dali))  # DALI's, which are only read, first

    def _cut_chunks(self, batch: PendingBatch) -> Iterator[Chunk]:
        """Cut a batch into chunks, so small that each worker has two of what is prefetched."""
        crops, most = self._plan.crops_per_decode, self._plan.batch_size
        num_videos = most // crops * self.config.prefetch // (2 * self.config.workers)
        size = max(1, min(VIDEOS_PER_CHUNK, num_videos)) * crops
        for number, first in enumerate(range(0, batch.num_clips, size), batch.number * ceil_div(most, size)):
            use_dali = self._use_dali and is_in_share(self._share, number)
            yield Chunk(batch.number, first, min(size, batch.num_clips - first), batch.block_number, use_dali)

    def _collect(self, wait: bool) -> None:
        """Take what workers have made; `wait`: until there is something."""
        for result in self._pool.collect(wait):
            (batch,) = [batch for batch in self._pending if batch.number == result.chunk.batch]
            batch.results[result.chunk.first] = result
            self._counts.update(result.counts)
            for fault in result.faults:
                self._counts["bad_clips"] += fault.num_clips
                self._quarantine.add(fault.sample, fault.reason, self._counts["bad_clips"], self._counts["clips"])

    def _finish_first(self) -> PendingBatch:
        """Wait for the first batch, and put it on the device."""
        batch, started = self._pending[0], time.perf_counter()
        self._wait_until_loaded(batch)
        loaded = time.perf_counter()
        if batch.encoded and not (self._use_dali and self._decode_with_dali(batch)):
            self._redo_with_pyav(batch)
        if self.config.share_of_dali == "auto" and self._counts["clips"]:  # the first batch waits for workers to start
            self._share = adjust_share(self._share, loaded - started, time.perf_counter() - loaded)
        self._upload(batch)
        return self._pending.popleft()

    def _wait_until_loaded(self, batch: PendingBatch) -> None:
        while not batch.is_loaded:
            self._collect(wait=True)
            self._feed_ahead()

    def _prepare_next(self) -> None:
        """Start the upload of the next batch, and feed DALI, so that both happen during the training step."""
        self._collect(wait=False)
        self._feed_ahead()
        if self._pending and self._pending[0].is_loaded and not self._pending[0].encoded:
            self._upload(self._pending[0])

    def _feed_ahead(self) -> None:
        """Feed DALI with what has been read, in order."""
        for batch in self._pending:
            if not (self._use_dali and batch.is_read):
                return
            if batch.encoded:
                self._dali.feed(batch.number, batch.encoded, batch.block)

    def _upload(self, batch: PendingBatch) -> None:
        """Queue a batch's way to the device, once; on a CPU, clips stay where they are."""
        if batch.clips is not None:
            return
        if not self._upload_planes:
            clips = torch.from_numpy(batch.block[: batch.num_clips * self._layout.clip_bytes])
            batch.clips = clips.view(batch.num_clips, *self._layout.clip_shape)
            return
        with torch.cuda.stream(self._upload_stream):
            batch.clips = upload(batch.block, self._layout, batch.chunks, self._device)
        if self._upload_stream is not None:
            batch.uploaded = self._upload_stream.record_event()
            self._in_upload = [(event, block) for event, block in self._in_upload if not event.query()]
            self._in_upload.append((batch.uploaded, batch.block))

    def _await_upload(self, batch: PendingBatch) -> UInt8[Tensor, "B T H W C"]:
        """Return a batch's clips for use on the current stream, which waits for them; the host does not."""
        assert batch.clips is not None
        if batch.uploaded is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(batch.uploaded)
            batch.clips.record_stream(stream)  # memory of the other stream: not to be reused while this one reads
        return batch.clips

    def _decode_with_dali(self, batch: PendingBatch) -> bool:
        """Put a batch on the device with what DALI decodes of it; return whether DALI could."""
        try:
            self._dali.feed(batch.number, batch.encoded, batch.block)
            decoded = self._dali.take(batch.number)
        except (RuntimeError, TimeoutError) as error:
            self._dali.reset()  # what is in flight is fed again, to new graphs
            hung, self._dali_failures = isinstance(error, TimeoutError), self._dali_failures + 1
            self._counts.update(timeouts=hung)
            if hung or self._dali_failures >= MAX_DALI_FAILURES:  # what hangs keeps its memory
                self._use_dali = False
                log_note(
                    f"DALI has failed {'' if hung else 'repeatedly, most recently '}with '{shorten(error)}': PyAV"
                    f" decodes everything from now on, in {self.config.workers} processes"
                )
            return False
        self._upload(batch)  # once: had DALI failed, workers would have written to the block again
        self._dali.copy_clips(decoded, self._await_upload(batch))
        num_decoded = sum(video.num_frames for video in batch.encoded.values())  # a few less behind the last clip
        self._counts.update(dali_clips=len(decoded), frames_decoded=num_decoded)
        self._dali_failures = 0
        return True

    def _redo_with_pyav(self, batch: PendingBatch) -> None:
        """Have workers decode DALI's part of a batch; they find and replace a corrupt video: DALI names none."""
        num_bad = self._counts["bad_clips"]
        self._counts.update(fallback_clips=sum(len(video.rows) for video in batch.encoded.values()))
        chunks = [result.chunk for result in batch.chunks if result.encoded]
        for chunk in chunks:
            del batch.results[chunk.first]
        self._pool.send([chunk._replace(use_dali=False) for chunk in chunks], first=True)
        self._wait_until_loaded(batch)
        if self._counts["bad_clips"] > num_bad:  # then it was not DALI's fault
            self._dali_failures = 0

    def _make_batch(self, batch: PendingBatch) -> Batch:
        clips = self._await_upload(batch)
        loaded: list[LoadedClip] = [clip for result in batch.chunks for clip in result.clips]
        if any(clip.augment_ops or clip.erase_box for clip in loaded):
            from pipeline.augment import augment  # torchvision takes a second to import; only fine-tuning needs it

            clips = augment(clips, loaded)
        if self._dataset.info.multi_label:
            labels = to_device(self._dataset.mark_classes(clip.labels for clip in loaded), self._device)
        else:  # no label, or several ones in other samples of a mix: none
            labels = to_device([clip.labels[0] if len(clip.labels) == 1 else -1 for clip in loaded], self._device)
        self._counts.update(clips=len(loaded), frames_delivered=len(loaded) * self._plan.num_frames)
        return Batch(
            clips, labels, [clip.key for clip in loaded], [clip.position for clip in loaded],
            fields={name: [clip.fields[i] for clip in loaded] for i, name in enumerate(self.config.fields)},
        )  # fmt: skip
