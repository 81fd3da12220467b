"""Batches of clips on the device, prepared in the background.

1. The plan says what every clip is. It is a pure function, so whoever has it needs only the number
   of a batch.
2. Decode workers (decoding/decode_worker.py) have the dataset and the plan. They are sent chunks: a
   few videos of a batch. They read, decode, replace bad videos, and write clips, or the planes of
   which a GPU makes clips, into the batch's block of shared memory (clip_memory.py).
3. WorkerPool sends the chunks of `data.prefetch` batches, collects the results, and replaces
   workers that die.
4. A batch whose chunks are all there is uploaded on a stream of its own, during the training step
   (upload.py).
5. Of a batch that the GPU decoder makes (decoding/gpu_decoder.py), workers only read the videos;
   the GPU decoder decodes them.
6. Augmentation, if any, happens on the device.
"""

import atexit
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
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
from adamae.pipeline.decoding.chunks import Chunk, ChunkResult, LoadedClip, WorkerSetup
from adamae.pipeline.decoding.encoded import Encoded
from adamae.pipeline.decoding.gpu_codecs import find_gpu_codecs
from adamae.pipeline.decoding.gpu_decoder import GpuDecoder
from adamae.pipeline.planning.plan import ClipPlan
from adamae.pipeline.quarantine import Quarantine
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.upload import upload
from adamae.pipeline.worker_pool import WorkerPool

COUNTERS = (
    # Delivered clips, and those that the GPU decoder has made.
    "clips",
    "dali_clips",
    # Whenever a batch is asked for, the batches that are complete: 0 means that the step waits.
    "batches_ready",
    # Frames are also decoded that no clip shows: from a key frame on to the clip's first one.
    "frames_delivered",
    "frames_decoded",
    "videos_read",
    "bytes_read",
    # Clips that were replaced, clips that DALI left to PyAV, and workers or DALI taking too long.
    "bad_clips",
    "fallback_clips",
    "timeouts",
    # For which `batches` has kept the training step waiting; and for which it has waited for
    # workers and for DALI, also while the GPU was still at work on earlier steps.
    "wait_seconds",
    "worker_wait_seconds",
    "dali_wait_seconds",
    # Of all workers together.
    "download_seconds",
    "read_seconds",
    "decode_seconds",
    "cache_hits",
)
# Each chunk costs this process two messages, .05 ms. Chunks of 8 cost less, but make a small batch
# the work of one worker: 98 clips/s instead of 106 in batches of 8 by two workers.
MAX_VIDEOS_PER_CHUNK = 4


# Not frozen, since Lightning copies batches field by field.
@dataclass
class Batch:
    """Clips of one micro-batch, all on the device."""

    # RGB.
    clip: UInt8[Tensor, "B T H W C"]
    # -1 where a clip has no label. In datasets with several labels per video, ones mark them.
    labels: Int64[Tensor, " B"] | UInt8[Tensor, "B classes"]
    # Of the videos; where one could not be decoded, of its replacement.
    keys: list[str]
    # In the plan's stream.
    positions: list[int]
    # Whether this is the rank's last batch of an optimizer step.
    is_last: bool = True
    # The fields that data.fields names, with None for a video that lacks one.
    fields: dict[str, list[Any]] = field(default_factory=dict)


@dataclass
class PendingBatch:
    """A batch whose chunks are being made, or are all there."""

    number: int
    num_clips: int
    block_number: int
    # Of shared memory.
    block: UInt8[np.ndarray, " bytes"]
    # Whether the GPU decoder makes it, except for videos that do not suit it.
    is_for_gpu: bool
    # What workers have returned, by the index of each chunk's first clip.
    results: dict[int, ChunkResult] = field(default_factory=dict)
    # On the device; on a GPU perhaps still in flight, until `uploaded` has happened.
    clips: UInt8[Tensor, "B T H W C"] | None = None
    uploaded: torch.cuda.Event | None = None

    @property
    def is_loaded(self) -> bool:
        """Return whether all chunks are there."""
        return sum(result.chunk.num_clips for result in self.results.values()) == self.num_clips

    @property
    def ordered_results(self) -> list[ChunkResult]:
        """Return the results so far in the order of their clips; workers finish in any order."""
        return [self.results[first] for first in sorted(self.results)]

    @property
    def encoded(self) -> dict[int, Encoded]:
        """Return the videos that the GPU decoder decodes, by the indices of their first clips."""
        videos: dict[int, Encoded] = {}
        for result in self.ordered_results:
            videos.update(result.encoded)
        return videos


class ClipLoader(AbstractContextManager["ClipLoader"]):
    """Reads and decodes the clips of a plan in the background; a context manager.

    The methods stand in the order in which a batch meets them. What only a GPU needs comes last.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        plan: ClipPlan,
        device: torch.device,
        config: DataConfig,
        quarantine: Path | None,
        upload_planes: bool | None = None,
    ) -> None:
        """Prepare to load the clips of `plan`; workers are started by the first call of `batches`.

        quarantine: a file that gets a line for every video that cannot be decoded; None: they are
        only counted. upload_planes: whether the device makes clips of decoded planes; None: if it
        is a GPU.

        Raise InputError if data.decoder is dali and DALI lacks a codec of the shards on this
        device, or if no sample has one of data.fields.
        """
        dataset.require_fields(config.fields)
        # The device with its number: "cuda" means the current GPU, which differs between threads.
        device = torch.empty(0, device=device).device
        on_gpu = device.type == "cuda"
        self._device = device
        self._dataset = dataset
        self._plan = plan
        self.config = config
        gpu_codecs = find_gpu_codecs(dataset, device, config)
        self._upload_stream = torch.cuda.Stream(device) if on_gpu else None
        self._upload_planes = on_gpu if upload_planes is None else upload_planes
        self._quarantine = Quarantine(dataset, quarantine, config.max_bad_fraction)
        self._batch_numbers: Iterator[int] = count()
        # The batches that were begun and not delivered, in their order.
        self._pending: deque[PendingBatch] = deque()
        # Blocks that are being copied to the GPU: the reference keeps them from being reused.
        self._in_upload: list[tuple[torch.cuda.Event, np.ndarray]] = []
        self._counts: Counter[str] = Counter()
        self._gpu_decoder = GpuDecoder(device, plan, config, gpu_codecs, self._counts)
        self._layout = BlockLayout.choose(dataset, plan, self._upload_planes)
        self.memory = ClipMemory(self._layout)
        setup = WorkerSetup(dataset, plan, config, gpu_codecs, self._layout, self._upload_planes)
        self._pool = WorkerPool(setup, self.memory.fileno(), self._counts)
        # `microbatches` continues this one from step to step.
        self._stream: Iterator[Batch] = iter(())
        self._next_step = -1
        # DALI must not be at work when the interpreter exits.
        atexit.register(self.close)

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
        """Return sums since the start, of this process and of what its workers have answered.

        Seconds are summed over processes, so they may exceed the time that has passed.
        """
        return {name: float(self._counts[name]) for name in COUNTERS}

    def microbatches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's batches of an optimizer step.

        Consecutive steps are read from the same prefetched stream; any other step starts a new one.
        """
        num_batches = self._plan.microbatches_per_step
        if step != self._next_step:
            self._stream = self.batches(step * num_batches)
        self._next_step = step + 1
        for index in range(num_batches):
            yield replace(next(self._stream), is_last=index == num_batches - 1)

    def batches(self, first: int) -> Iterator[Batch]:
        """Yield the plan's batches from number `first` on, endlessly if the plan is endless.

        One iterator at a time: a new one ends the work for the one before. Raise InputError if too
        many videos cannot be decoded.
        """
        if self._pending:
            # The workers are at work for an earlier iterator, and would write to its blocks.
            self._end_workers()
        self._gpu_decoder.reset()
        self._pool.start()
        self._batch_numbers = count(first)
        self._begin_batches()
        while self._pending:
            started = time.perf_counter()
            last_step = self._record_queued_work()
            self._collect(wait=False)
            self._counts["batches_ready"] += sum(batch.is_loaded for batch in self._pending)
            batch = self._take_first()
            self._begin_batches()
            self._prepare_next()
            # The host runs ahead of a GPU. A wait that is over before the GPU has done what was
            # queued has cost nothing.
            if last_step is None or last_step.query():
                waited = time.perf_counter() - started
                self._counts.update(wait_seconds=waited)  # type: ignore[call-overload]
            yield batch
            # A reference from here would keep the batch's block in use for one batch longer.
            del batch

    def _record_queued_work(self) -> torch.cuda.Event | None:
        """Return the end of what is queued on the current stream, or None on a CPU."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def _end_workers(self) -> None:
        self._pool.close()
        self._pending.clear()
        if self._upload_stream is not None:
            self._upload_stream.synchronize()
        self._in_upload.clear()

    def _begin_batches(self) -> None:
        """Have workers begin on batches until `data.prefetch` are pending, or fewer large ones.

        All chunks of a batch are sent at once, as nobody could send more during a training step.
        With two chunks a worker under way and steps of 0.2 s, 120 clips/s came instead of 199.
        """
        max_by_memory = self.config.prefetch_mib * 2**20 // self._layout.block_bytes
        max_batches = max(1, min(self.config.prefetch, max_by_memory))
        while len(self._pending) < max_batches:
            number = next(self._batch_numbers)
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
        """Cut a batch into chunks, small enough that each worker has two of what is prefetched.

        With batches of 64 clips, 2 of each decoded video, a prefetch of 3 and 16 workers, 96 videos
        are pending; two chunks a worker leave 3 videos, or 6 clips, to a chunk.
        """
        crops = self._plan.crops_per_decode
        num_videos = self._plan.batch_size // crops * self.config.prefetch
        videos_per_chunk = num_videos // (2 * self.config.workers)
        chunk_size = max(1, min(MAX_VIDEOS_PER_CHUNK, videos_per_chunk)) * crops
        for first in range(0, batch.num_clips, chunk_size):
            num_clips = min(chunk_size, batch.num_clips - first)
            yield Chunk(batch.number, first, num_clips, batch.block_number, batch.is_for_gpu)

    def _collect(self, wait: bool) -> None:
        """Take what workers have made since the last call; `wait` until there is something."""
        for result in self._pool.collect(wait):
            (batch,) = [batch for batch in self._pending if batch.number == result.chunk.batch]
            batch.results[result.chunk.first] = result
            self._counts.update(result.counts)
            for fault in result.faults:
                self._counts["bad_clips"] += fault.num_clips
                self._quarantine.add(
                    fault.sample, fault.reason, self._counts["bad_clips"], self._counts["clips"]
                )

    def _wait_until_loaded(self, batch: PendingBatch) -> None:
        started = time.perf_counter()
        while not batch.is_loaded:
            self._collect(wait=True)
            self._feed_gpu_decoder()
        waited = time.perf_counter() - started
        self._counts.update(worker_wait_seconds=waited)  # type: ignore[call-overload]

    def _take_first(self) -> Batch:
        """Wait for the first pending batch, and put it on the device."""
        batch = self._pending[0]
        waited_before = self._waited_seconds
        self._wait_until_loaded(batch)
        if batch.encoded:
            self._decode_on_gpu(batch)
        # The first batch waits for the workers to start, which does not tell how fast they are.
        if self._counts["clips"]:
            waited = self._waited_seconds - waited_before
            self._gpu_decoder.record_wait(batch.is_for_gpu, waited)
        self._upload(batch)
        self._pending.popleft()
        return self._make_batch(batch)

    @property
    def _waited_seconds(self) -> float:
        """Return how long workers and DALI were waited for, without uploads and copies."""
        return float(self._counts["worker_wait_seconds"] + self._counts["dali_wait_seconds"])

    def _make_batch(self, pending: PendingBatch) -> Batch:
        clips = self._await_upload(pending)
        loaded: list[LoadedClip] = []
        for result in pending.ordered_results:
            loaded.extend(result.clips)
        if any(clip.augment_ops or clip.erase_box for clip in loaded):
            # Imported here: torchvision takes a second, and only fine-tuning needs it.
            from adamae.pipeline.augment import augment

            clips = augment(clips, loaded)
        fields = {}
        for index, name in enumerate(self.config.fields):
            fields[name] = [clip.fields[index] for clip in loaded]
        self._counts.update(clips=len(loaded), frames_delivered=len(loaded) * self._plan.num_frames)
        return Batch(
            clips,
            self._make_labels(loaded),
            [clip.key for clip in loaded],
            [clip.position for clip in loaded],
            fields=fields,
        )

    def _make_labels(
        self, loaded: Sequence[LoadedClip]
    ) -> Int64[Tensor, " B"] | UInt8[Tensor, "B classes"]:
        if self._dataset.info.multi_label:
            marks = self._dataset.mark_classes(clip.labels for clip in loaded)
            return to_device(marks, self._device)
        # A mix of datasets may hold samples with several labels beside those with one. They count
        # as unlabeled, as a batch has one label per clip.
        return to_device(
            [clip.labels[0] if len(clip.labels) == 1 else -1 for clip in loaded], self._device
        )

    def _prepare_next(self) -> None:
        """Start the next batch's upload and the GPU decoder, so that both work during the step."""
        self._collect(wait=False)
        self._feed_gpu_decoder()
        if self._pending and self._pending[0].is_loaded and not self._pending[0].encoded:
            self._upload(self._pending[0])

    def _upload(self, batch: PendingBatch) -> None:
        """Queue a batch's way to the device, once. On a CPU, clips stay where they are."""
        if batch.clips is not None:
            return
        if not self._upload_planes:
            clips = torch.from_numpy(batch.block[: batch.num_clips * self._layout.clip_bytes])
            batch.clips = clips.view(batch.num_clips, *self._layout.clip_shape)
            return
        with torch.cuda.stream(self._upload_stream):
            batch.clips = upload(batch.block, self._layout, batch.ordered_results, self._device)
        if self._upload_stream is not None:
            batch.uploaded = self._upload_stream.record_event()
            self._in_upload = [entry for entry in self._in_upload if not entry[0].query()]
            self._in_upload.append((batch.uploaded, batch.block))

    def _await_upload(self, batch: PendingBatch) -> UInt8[Tensor, "B T H W C"]:
        """Return a batch's clips for use on the current stream, which waits for them.

        The host does not wait.
        """
        assert batch.clips is not None
        if batch.uploaded is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(batch.uploaded)
            # The memory belongs to the upload stream, which must not reuse it while this one reads.
            batch.clips.record_stream(stream)
        return batch.clips

    def _feed_gpu_decoder(self) -> None:
        """Start the GPU decoder on its batches that have been read, in their order."""
        for batch in self._pending:
            if not batch.is_for_gpu:
                continue
            if not batch.is_loaded:
                # What was fed first is taken first, so a later batch must not overtake this one.
                return
            self._gpu_decoder.feed(batch.number, batch.encoded, batch.block)

    def _decode_on_gpu(self, batch: PendingBatch) -> None:
        """Decode a batch of encoded videos on the device; if that fails, have the workers do it."""
        decoded = self._gpu_decoder.take(batch.number, batch.encoded, batch.block)
        if decoded is None:
            self._redo_with_pyav(batch)
            return
        # Not before: an upload changes the block's tables, and workers that have to decode the
        # batch after all write to these again.
        self._upload(batch)
        self._gpu_decoder.copy_clips(decoded, self._await_upload(batch))

    def _redo_with_pyav(self, batch: PendingBatch) -> None:
        """Have the workers decode what the GPU decoder could not.

        DALI does not say which video is corrupt; the workers find it and replace it.
        """
        num_bad = self._counts["bad_clips"]
        chunks = []
        for result in batch.ordered_results:
            if not result.encoded:
                continue
            for video in result.encoded.values():
                self._counts["fallback_clips"] += len(video.rows)
            chunks.append(result.chunk._replace(is_for_gpu=False))
            del batch.results[result.chunk.first]
        self._pool.send(chunks, first=True)
        self._wait_until_loaded(batch)
        if self._counts["bad_clips"] > num_bad:
            self._gpu_decoder.forgive_failure()
