"""Makes whole batches on the GPU, of videos that decode workers have only read.

Workers leave the bytes of these videos in the batch's block of shared memory, and say what is where
(decoding/encoded.py). Each kind of decoder takes its own of them: JpegGraph (decoding/dali_jpeg.py)
MJPEG, VideoGraphs (decoding/dali_video.py) the others.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Protocol

import torch
from jaxtyping import UInt8
from torch import Tensor

from adamae.common.devices import load_cuda_runtime
from adamae.common.logging import log_note
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.dali_jpeg import JpegGraph
from adamae.pipeline.decoding.dali_video import DecodedVideo, VideoGraphs
from adamae.pipeline.decoding.encoded import MJPEG, Bytes, Encoded, GpuCodecs
from adamae.pipeline.decoding.gpu_codecs import shorten
from adamae.pipeline.planning.plan import ClipPlan
from adamae.pipeline.reading.storage import call_with_timeout

# One graph keeps 14 % of the NVDEC engines of an H100 busy, seven keep 89 % (NVIDIA/DALI#6387).
GRAPHS_PER_GPU = 8
# Threads of the graph of JPEGs, which prepare what the engines decode.
JPEG_THREADS_PER_GPU = 4
# A flag of cudaSetDeviceFlags, from driver_types.h.
SCHEDULE_BLOCKING_SYNC = 4
# So many failures in a row, with videos that PyAV decodes, end the use of DALI: each time the
# graphs are built again, which takes long.
MAX_FAILURES = 3
# Differences between waits that are shorter say nothing about who is slower.
MIN_WAIT_S = 0.002


class InFlight(Protocol):
    """A part of a batch on which a decoder has been started."""

    def take(self) -> list[DecodedVideo]:
        """Wait for it. Raise RuntimeError if a video cannot be decoded."""


class GpuDecoder:
    """Decodes batches one after the other, and is used from one thread.

    If it hangs or fails repeatedly, it is given up with a note, and the workers decode everything
    with PyAV.
    """

    def __init__(
        self,
        device: torch.device,
        plan: ClipPlan,
        config: DataConfig,
        codecs: GpuCodecs,
        counts: Counter[str],
    ) -> None:
        """Prepare to decode `codecs`, none of which means that PyAV decodes everything.

        counts: get `dali_clips`, `frames_decoded`, `timeouts` and `dali_wait_seconds`.
        """
        self._device = device
        self._plan = plan
        self._config = config
        self._counts = counts
        self._codecs = codecs
        self._is_enabled = bool(codecs.names)
        self._num_failures = 0
        # Of each kind that the codecs need. Built here, as that would hold up training later, and
        # again after an error.
        self._graphs: list[VideoGraphs | JpegGraph] = []
        self._in_flight: dict[int, list[InFlight]] = {}
        # Found while a batch was fed; `take` reports it.
        self._error: RuntimeError | None = None
        # Memory of DALI that is being copied from, with the event that ends the copy.
        self._in_copy: deque[tuple[torch.cuda.Event, list[DecodedVideo]]] = deque()
        # How long the last batch of the workers and of this decoder was waited for.
        self._wait_for_workers_s = 0.0
        self._wait_for_gpu_s = 0.0
        self._num_batches = 0
        if self._is_enabled:
            if device.type == "cuda":
                block_while_waiting(device)
            self._build_graphs()

    def wants_batch(self, is_idle: bool) -> bool:
        """Return whether the next batch, on which nobody has begun, is this decoder's.

        With data.decoder=auto it is if this decoder has no other batch to make (`is_idle`) and the
        workers' last batch was waited for longer than its own: none is, for as long as the workers
        keep up.
        """
        if not self._is_enabled:
            return False
        if self._config.decoder == "dali":
            return True
        return is_idle and self._wait_for_workers_s > self._wait_for_gpu_s + MIN_WAIT_S

    def record_wait(self, is_own: bool, seconds: float) -> None:
        """Remember how long the last batch was waited for.

        It was made by this decoder if `is_own`, otherwise by the workers.
        """
        if not is_own:
            self._wait_for_workers_s = seconds
            return
        self._num_batches += 1
        # The first batch also waits for DALI to open its decoders.
        if self._num_batches > 1:
            self._wait_for_gpu_s = seconds

    def feed(self, number: int, videos: Mapping[int, Encoded], block: Bytes) -> None:
        """Start on the batch `number`, once.

        The keys of `videos` are the indices of their first clips. `take` reports what goes wrong,
        most likely with an earlier batch.
        """
        if (
            not videos
            or not self._is_enabled
            or self._error is not None
            or number in self._in_flight
        ):
            return
        if not self._graphs:
            self._build_graphs()
        if not self._graphs:
            return
        try:
            self._in_flight[number] = [graphs.feed(videos, block) for graphs in self._graphs]
        except RuntimeError as error:
            self._error = error

    def _build_graphs(self) -> None:
        on_gpu = self._device.type == "cuda"
        try:
            graphs: list[VideoGraphs | JpegGraph] = []
            if self._codecs.names - {MJPEG}:
                num_graphs = GRAPHS_PER_GPU if on_gpu else self._config.workers
                graphs.append(VideoGraphs(self._device, self._plan, num_graphs))
            if MJPEG in self._codecs.names:
                graphs.append(self._build_jpeg_graph())
            self._graphs = graphs
        except RuntimeError as error:
            self._error = error

    def _build_jpeg_graph(self) -> JpegGraph:
        plan = self._plan
        num_threads = self._config.workers
        if self._device.type == "cuda":
            num_threads = JPEG_THREADS_PER_GPU
        # Of views that begin apart, no two may show the same frame.
        max_pictures = plan.batch_size * plan.num_frames
        return JpegGraph(
            self._device, plan.crops_per_decode, plan.frame_size, max_pictures, num_threads
        )

    def take(
        self, number: int, videos: Mapping[int, Encoded], block: Bytes
    ) -> list[DecodedVideo] | None:
        """Wait for the batch that was fed first, and return what `copy_clips` copies.

        Return None if the workers have to decode the batch, because a video cannot be decoded, or
        DALI hangs or was given up.
        """
        if not self._is_enabled:
            return None
        self.feed(number, videos, block)
        try:
            decoded = self._wait_for(number)
        except (RuntimeError, TimeoutError) as error:
            # What is in flight is fed again, to new graphs.
            self._graphs = []
            self.reset()
            self._count_failure(error)
            return None
        self._num_failures = 0
        num_clips = sum(len(video.rows) for video in videos.values())
        # A few frames less are decoded behind the last clip of a joined video.
        num_frames = sum(video.num_frames for video in videos.values())
        self._counts.update(dali_clips=num_clips, frames_decoded=num_frames)
        return decoded

    def _wait_for(self, number: int) -> list[DecodedVideo]:
        """Return the decoded videos of a batch.

        Raise RuntimeError if one cannot be decoded, TimeoutError if DALI hangs.
        """
        if self._error is not None:
            raise self._error
        parts = self._in_flight.pop(number)

        def take() -> list[DecodedVideo]:
            if self._device.type == "cuda":
                # A thread begins with the first GPU as its current one.
                torch.cuda.set_device(self._device)
            decoded = []
            for part in parts:
                decoded += part.take()
            return decoded

        started = time.perf_counter()
        try:
            return call_with_timeout(take, self._config.decode_timeout_s, "data.decode_timeout_s")
        finally:
            waited = time.perf_counter() - started
            self._counts.update(dali_wait_seconds=waited)  # type: ignore[call-overload]

    def _count_failure(self, error: Exception) -> None:
        """Give the decoder up if it hangs or fails repeatedly.

        What hangs keeps its memory, so it is not tried again.
        """
        is_hung = isinstance(error, TimeoutError)
        self._num_failures += 1
        self._counts["timeouts"] += int(is_hung)
        if is_hung or self._num_failures >= MAX_FAILURES:
            self._is_enabled = False
            how_often = "" if is_hung else "repeatedly, most recently "
            log_note(
                f"DALI has failed {how_often}with '{shorten(error)}': PyAV decodes everything from"
                f" now on, in {self._config.workers} processes"
            )

    def forgive_failure(self) -> None:
        """Do not count the failures so far.

        PyAV could not decode a video of the last one either, so the decoder is not to blame.
        """
        self._num_failures = 0

    def copy_clips(self, videos: list[DecodedVideo], clips: UInt8[Tensor, "B T H W C"]) -> None:
        """Copy what was taken to its indices of `clips` on the current stream.

        DALI's memory is kept until then.
        """
        for video in videos:
            start = 0
            for cut in video.cuts:
                frames = video.frames[start : start + cut.num_frames]
                start += cut.num_frames
                if cut.order == list(range(cut.num_frames)):
                    clips[cut.clip].copy_(frames)
                else:
                    torch.stack([frames[index] for index in cut.order], out=clips[cut.clip])
        if self._device.type == "cuda":
            while self._in_copy and self._in_copy[0][0].query():
                self._in_copy.popleft()
            self._in_copy.append((torch.cuda.current_stream(self._device).record_event(), videos))

    def reset(self) -> None:
        """Drop all that is in flight, with the graphs that are at work on it."""
        if self._in_flight:
            self._graphs = []
        self._in_flight.clear()
        self._error = None

    def close(self) -> None:
        """Drop everything, after the copies that are under way.

        Graphs of other loaders use the same memory pool.
        """
        self.reset()
        self._graphs = []
        for event, _ in self._in_copy:
            event.synchronize()
        self._in_copy.clear()


def block_while_waiting(device: torch.device) -> None:
    """Have threads that wait for a GPU sleep, and leave their cores to the decode workers.

    Each graph has a thread that waits after every picture. By default it would spin, so eight
    graphs would keep up to eight cores busy.
    """
    with torch.cuda.device(device):
        status = load_cuda_runtime().cudaSetDeviceFlags(SCHEDULE_BLOCKING_SYNC)
    if status != 0:
        log_note(f"DALI's threads keep cores busy while they wait (cudaSetDeviceFlags: {status})")
