"""Batches of clips on the device, prepared in the background.

1. The plan says what every clip is; it is a pure function, so whoever has it needs only the number of a batch.
2. Decode workers (decoding/decode_worker.py) have the dataset and the plan. They are sent chunks: a few videos of a
   batch. They read, decode, replace bad videos, and write clips, or the planes of which a GPU makes clips, into the
   batch's block of shared memory (clip_memory.py).
3. WorkerPool sends the chunks of `data.prefetch` batches, collects the results, and replaces workers that die.
4. A batch whose chunks are all there is uploaded on a stream of its own, during the training step (upload.py).
5. Of a batch that the GPU decoder makes (decoding/gpu_decoder.py), workers only read the videos; it decodes them.
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

from adamae.common.devices import to_device
from adamae.pipeline.clip_memory import BlockLayout, ClipMemory
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.decode_worker import Chunk, ChunkResult, LoadedClip, WorkerSetup
from adamae.pipeline.decoding.gpu_codecs import find_gpu_codecs
from adamae.pipeline.decoding.gpu_decoder import GpuDecoder
from adamae.pipeline.decoding.joining import EncodedVideo
from adamae.pipeline.planning.plan import ClipPlan
from adamae.pipeline.quarantine import Quarantine
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.upload import upload
from adamae.pipeline.worker_pool import WorkerPool

COUNTERS = (
    *(
        "clips",
        "dali_clips",
        "batches_ready",
        "frames_delivered",
        "frames_decoded",
        "videos_read",
        "bytes_read",
    ),
    *("bad_clips", "fallback_clips", "timeouts", "wait_seconds"),
    *("download_seconds", "read_seconds", "decode_seconds", "cache_hits"),
)
VIDEOS_PER_CHUNK = 4  # at most: each chunk costs this process two messages, .05 ms


@dataclass  # not frozen: Lightning copies batches field by field
class Batch:
    """Clips of one micro-batch, all on the device."""

    clip: UInt8[Tensor, "B T H W C"]  # RGB
    labels: (
        Int64[Tensor, " B"] | UInt8[Tensor, "B classes"]
    )  # -1: none; with several labels per video, ones mark them
    keys: list[str]  # of the videos; those of replacements where videos could not be decoded
    positions: list[int]  # in the plan
    is_last: bool = True  # of this rank's batches of an optimizer step
    fields: dict[str, list[Any]] = field(
        default_factory=dict
    )  # those of data.fields, None where a video has none


@dataclass
class PendingBatch:
    """A batch whose chunks are being made, or are all there."""

    number: int
    num_clips: int
    block_number: int
    block: UInt8[np.ndarray, " bytes"]  # of shared memory
    is_for_gpu: bool  # whether the GPU decoder makes it, except of videos that do not suit it
    results: dict[int, ChunkResult] = field(default_factory=dict)  # by their first clip
    clips: UInt8[Tensor, "B T H W C"] | None = None  # on the device, perhaps still in flight
    uploaded: torch.cuda.Event | None = None

    @property
    def is_loaded(self) -> bool:
        return sum(result.chunk.num_clips for result in self.results.values()) == self.num_clips

    @property
    def chunks(self) -> list[ChunkResult]:
        """What has been made, in order."""
        return [self.results[first] for first in sorted(self.results)]

    @property
    def encoded(self) -> dict[int, EncodedVideo]:
        """The videos that the GPU decoder decodes, by the indices of their first clips."""
        videos: dict[int, EncodedVideo] = {}
        for result in self.chunks:
            videos.update(result.encoded)
        return videos


class ClipLoader(AbstractContextManager["ClipLoader"]):
    """Reads and decodes the clips of a plan in the background; a context manager."""

    def __init__(
        self,
        dataset: ShardDataset,
        plan: ClipPlan,
        device: torch.device,
        config: DataConfig,
        quarantine: Path | None,
        upload_planes: bool | None = None,
    ) -> None:
        """quarantine: file that gets a line for every video that cannot be decoded; None: they are only counted.
        upload_planes: whether the device makes clips of decoded planes; None: if it is a GPU.

        Raise InputError if data.decoder is dali and DALI lacks a codec of the shards on this device, or if no sample
        has one of data.fields.
        """
        dataset.require_fields(config.fields)
        # With the number of this thread's current GPU, which is another one in other threads.
        self._device = device = torch.empty(0, device=device).device
        self._dataset, self._plan, self.config = dataset, plan, config
        gpu_codecs = find_gpu_codecs(dataset, device, config)
        on_gpu = device.type == "cuda"
        self._upload_stream = torch.cuda.Stream(device) if on_gpu else None
        self._upload_planes = on_gpu if upload_planes is None else upload_planes
        self._quarantine = Quarantine(dataset, quarantine, config.max_bad_fraction)
        self._numbers: Iterator[int] = count()  # of batches
        self._pending: deque[PendingBatch] = deque()
        self._in_upload: list[
            tuple[torch.cuda.Event, np.ndarray]
        ] = []  # blocks that are being copied
        self._counts: Counter[str] = Counter()
        self._gpu_decoder = GpuDecoder(device, plan, config, gpu_codecs, self._counts)
        self._layout = BlockLayout.choose(dataset, plan, self._upload_planes)
        self.memory = ClipMemory(self._layout)
        setup = WorkerSetup(dataset, plan, config, gpu_codecs, self._layout, self._upload_planes)
        self._pool = WorkerPool(setup, self.memory.fileno(), self._counts)
        self._stream: Iterator[Batch] = iter(())  # what `microbatches` reads on from
        self._next_step = -1
        atexit.register(self.close)  # DALI must not be at work when the interpreter exits

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        atexit.unregister(self.close)
        self._end_workers()
        self.memory.close()
        self._gpu_decoder.close()

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
        self._gpu_decoder.reset()
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
        max_batches = min(
            self.config.prefetch, self.config.prefetch_mib * 2**20 // self._layout.block_bytes
        )
        while len(self._pending) < max(1, max_batches):
            number = next(self._numbers)
            num_clips = len(self._plan.positions(number))
            if num_clips == 0:
                return
            block_number, block = self.memory.acquire(pin=self._upload_stream is not None)
            gpu_is_idle = not any(batch.is_for_gpu for batch in self._pending)
            is_for_gpu = self._gpu_decoder.wants_batch(gpu_is_idle)
            batch = PendingBatch(number, num_clips, block_number, block, is_for_gpu)
            self._pending.append(batch)
            self._pool.send(self._cut_chunks(batch))

    def _cut_chunks(self, batch: PendingBatch) -> Iterator[Chunk]:
        """Cut a batch into chunks, so small that each worker has two of what is prefetched."""
        crops = self._plan.crops_per_decode
        num_videos = (
            self._plan.batch_size // crops * self.config.prefetch // (2 * self.config.workers)
        )
        size = max(1, min(VIDEOS_PER_CHUNK, num_videos)) * crops
        for first in range(0, batch.num_clips, size):
            num_clips = min(size, batch.num_clips - first)
            yield Chunk(batch.number, first, num_clips, batch.block_number, batch.is_for_gpu)

    def _collect(self, wait: bool) -> None:
        """Take what workers have made; `wait`: until there is something."""
        for result in self._pool.collect(wait):
            (batch,) = [batch for batch in self._pending if batch.number == result.chunk.batch]
            batch.results[result.chunk.first] = result
            self._counts.update(result.counts)
            for fault in result.faults:
                self._counts["bad_clips"] += fault.num_clips
                self._quarantine.add(
                    fault.sample, fault.reason, self._counts["bad_clips"], self._counts["clips"]
                )

    def _finish_first(self) -> PendingBatch:
        """Wait for the first batch, and put it on the device."""
        batch = self._pending[0]
        started = time.perf_counter()
        self._wait_until_loaded(batch)
        if batch.encoded:
            self._decode_on_gpu(batch)
        # The first batch waits for the workers to start, which says nothing.
        if self._counts["clips"]:
            self._gpu_decoder.record_wait(batch.is_for_gpu, time.perf_counter() - started)
        self._upload(batch)
        return self._pending.popleft()

    def _wait_until_loaded(self, batch: PendingBatch) -> None:
        while not batch.is_loaded:
            self._collect(wait=True)
            self._feed_gpu_decoder()

    def _prepare_next(self) -> None:
        """Start the upload of the next batch and the GPU decoder, so that both work during the training step."""
        self._collect(wait=False)
        self._feed_gpu_decoder()
        if self._pending and self._pending[0].is_loaded and not self._pending[0].encoded:
            self._upload(self._pending[0])

    def _feed_gpu_decoder(self) -> None:
        """Start the GPU decoder on its batches that have been read, in their order."""
        for batch in self._pending:
            if not batch.is_for_gpu:
                continue
            if not batch.is_loaded:
                return
            self._gpu_decoder.feed(batch.number, batch.encoded, batch.block)

    def _decode_on_gpu(self, batch: PendingBatch) -> None:
        """Decode a batch of encoded videos on the device; if that fails, have the workers decode it."""
        decoded = self._gpu_decoder.take(batch.number, batch.encoded, batch.block)
        if decoded is None:
            self._redo_with_pyav(batch)
            return
        # Not before: an upload changes the block's tables, and after a failure workers write to these again.
        self._upload(batch)
        self._gpu_decoder.copy_clips(decoded, self._await_upload(batch))

    def _redo_with_pyav(self, batch: PendingBatch) -> None:
        """Have the workers decode what the GPU decoder could not.

        They find out which video is corrupt, which DALI does not say, and replace it.
        """
        num_bad = self._counts["bad_clips"]
        chunks = []
        for result in batch.chunks:
            if result.encoded:
                self._counts["fallback_clips"] += sum(
                    len(video.rows) for video in result.encoded.values()
                )
                chunks.append(result.chunk._replace(is_for_gpu=False))
                del batch.results[result.chunk.first]
        self._pool.send(chunks, first=True)
        self._wait_until_loaded(batch)
        if self._counts["bad_clips"] > num_bad:
            self._gpu_decoder.forgive_failure()

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
            self._in_upload = [
                (event, block) for event, block in self._in_upload if not event.query()
            ]
            self._in_upload.append((batch.uploaded, batch.block))

    def _await_upload(self, batch: PendingBatch) -> UInt8[Tensor, "B T H W C"]:
        """Return a batch's clips for use on the current stream, which waits for them; the host does not."""
        assert batch.clips is not None
        if batch.uploaded is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(batch.uploaded)
            batch.clips.record_stream(
                stream
            )  # memory of the other stream: not to be reused while this one reads
        return batch.clips

    def _make_batch(self, batch: PendingBatch) -> Batch:
        clips = self._await_upload(batch)
        loaded: list[LoadedClip] = [clip for result in batch.chunks for clip in result.clips]
        if any(clip.augment_ops or clip.erase_box for clip in loaded):
            from adamae.pipeline.augment import (
                augment,  # torchvision takes a second to import; only fine-tuning needs it
            )

            clips = augment(clips, loaded)
        if self._dataset.info.multi_label:
            labels = to_device(
                self._dataset.mark_classes(clip.labels for clip in loaded), self._device
            )
        else:  # no label, or several ones in other samples of a mix: none
            labels = to_device(
                [clip.labels[0] if len(clip.labels) == 1 else -1 for clip in loaded], self._device
            )
        self._counts.update(clips=len(loaded), frames_delivered=len(loaded) * self._plan.num_frames)
        return Batch(
            clips,
            labels,
            [clip.key for clip in loaded],
            [clip.position for clip in loaded],
            fields={
                name: [clip.fields[i] for clip in loaded]
                for i, name in enumerate(self.config.fields)
            },
        )
