"""Clips with DALI: decode, crop, flip and scale, on the GPU (NVDEC) or, for a few codecs, on the CPU."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from common.devices import to_device
from pipeline.planning.crops import Crop, FrameSize
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.pool import ThreadPool
from pipeline.shards.gops import VideoSlice

# What fn.decoders.video in DALI 2.4 takes, by FFmpeg's names; which of the latter a GPU has depends on its generation.
CPU_CODECS = frozenset({"vp8", "vp9", "mjpeg"})
GPU_CODECS = frozenset({"h264", "hevc", "av1", "vp8", "vp9", "mpeg4"})
GPU_THREADS = 8  # a decoder each; an H100 has 7 NVDEC engines, more than most GPUs
# DALI is given up after so many failures.
MAX_HUNG = 3  # each keeps its memory, and the run has waited for it
MAX_FAILED = 3  # in a row, with videos that PyAV decodes; building another graph takes long

Encoded = Sequence[tuple[VideoSlice, list[PlanRow]]]  # videos, each with the clips to cut from it, which share frames


@lru_cache
def find_dali_fault() -> str:
    """Return why DALI cannot be imported, "" if it can: installed without what it depends on, it is of no use."""
    try:
        from nvidia.dali import Pipeline, fn  # noqa: F401
    except (ImportError, OSError) as error:  # the latter of its libraries
        return str(error)
    return ""


class DaliGraph:
    """A DALI pipeline that is fed any number of batches by hand and returns them in the same order.

    An error in one batch invalidates the whole graph: build another.
    """

    def __init__(
        self, device: torch.device, views: int, frame_size: FrameSize, max_videos: int, num_threads: int
    ) -> None:
        from nvidia.dali import Pipeline, fn  # may be missing where PyAV decodes everything
        from nvidia.dali.types import DALIDataType, DALIInterpType

        self._views = views
        self._pipeline = Pipeline(
            batch_size=max_videos,
            num_threads=num_threads,
            device_id=device.index if device.type == "cuda" else None,
            prefetch_queue_depth=1,  # one run per feed; several may still be in flight
        )
        with self._pipeline:
            encoded = fn.external_source(name="encoded", dtype=DALIDataType.UINT8, ndim=1)
            numbers = fn.external_source(name="frames", dtype=DALIDataType.INT32, ndim=1)
            frames = fn.decoders.video(
                encoded,
                frames=numbers,
                device="mixed" if device.type == "cuda" else "cpu",
                pad_mode="none",  # a frame that is missing is an error, and not black
                affine=False,  # binding threads to cores needs NVML, which some virtual machines lack
            )
            boxes = [fn.external_source(name=f"box{view}", dtype=DALIDataType.FLOAT, ndim=2) for view in range(views)]
            linear: dict[str, Any] = {"interp_type": DALIInterpType.INTERP_LINEAR, "antialias": True}
            # An axis is mirrored if its region starts behind its end: flips are free.
            clips: list[Any] = [
                fn.resize(frames, roi_start=box[0], roi_end=box[1], size=list(frame_size), **linear) for box in boxes
            ]
            self._pipeline.set_outputs(fn.stack(*clips, axis=0) if views > 1 else clips[0])
        self._pipeline.build()

    def feed(self, batch: Encoded) -> None:
        """Start on a batch."""
        feed = self._pipeline.feed_input
        feed("encoded", [np.frombuffer(video.data, np.uint8) for video, _ in batch])
        feed("frames", [np.array(_ascending(video.numbers), np.int32) for video, _ in batch])
        for view in range(self._views):
            feed(f"box{view}", [_region(rows[view]) for _, rows in batch])
        self._pipeline.schedule_run()

    def take(self) -> UInt8[Tensor, "B T H W C"]:
        """Wait for the batch that was fed first, its frames as `arrange` takes them.

        Nothing is copied: DALI's dynamic executor keeps the memory for as long as the tensor lives. Raise
        RuntimeError if a video of the batch cannot be decoded.
        """
        (clips,) = self._pipeline.share_outputs()
        tensor = torch.from_dlpack(clips.as_tensor())
        self._pipeline.release_outputs()
        return tensor.flatten(0, 1) if self._views > 1 else tensor


def arrange(clips: UInt8[Tensor, "B T H W C"], rows: Sequence[PlanRow]) -> UInt8[Tensor, "B T H W C"]:
    """Put frames into the order of the plan; a copy only where frames are repeated."""
    decoded = [_ascending(row.frames) for row in rows]
    if all(list(row.frames) == numbers for row, numbers in zip(rows, decoded, strict=True)):
        return clips
    places = [[numbers.index(number) for number in row.frames] for row, numbers in zip(rows, decoded, strict=True)]
    return clips[torch.arange(len(rows), device=clips.device)[:, None], to_device(places, clips.device)]


def _region(row: PlanRow) -> np.ndarray:
    """Return [[top, left], [bottom, right]] of the crop, left and right exchanged for a flip."""
    x, y, width, height = row.crop
    first, last = (x + width, x) if row.flip else (x, x + width)
    return np.array([[y, first], [y + height, last]], np.float32)


def _ascending(frames: Sequence[int]) -> list[int]:
    """Return as many frames in ascending order, each once if possible: DALI decodes up to a repeated one again, and
    reopens the video for the last one. Padded with the first, the cheapest to return to."""
    unique = sorted(set(frames))
    return [unique[0]] * (len(frames) - len(unique)) + unique


def try_decoding(video: VideoSlice, device: torch.device) -> str:
    """Decode a frame. Return DALI's error, "" if there is none."""
    row = PlanRow(0, 0, video.numbers[:1], Crop(0, 0, 16, 16), flip=False)
    try:
        graph = DaliGraph(device, 1, FrameSize(16, 16), max_videos=1, num_threads=1)
        graph.feed([(video._replace(numbers=video.numbers[:1]), [row])])
        graph.take()
    except RuntimeError as error:
        return shorten(error)
    return ""


def shorten(error: Exception) -> str:
    """Return DALI's message, which has many lines and a stack trace, as one."""
    return " ".join(str(error).split())[:400]


class Dali:
    """DALI's part of the batches of a run. Used from one thread, batch after batch."""

    def __init__(self, device: torch.device, plan: ClipPlan, num_threads: int, timeout: float) -> None:
        """timeout: seconds after which a batch counts as hung."""
        self._device, self._plan, self._num_threads, self._timeout = device, plan, num_threads, timeout
        self._graph: DaliGraph | None = None
        self._waiter = ThreadPool(1, "dali")
        self._hung = self._failed = 0
        self._lent: list[Tensor] = []  # DALI's memory that the current batch is in, or was copied from
        self._in_use: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()  # of earlier ones, until an event

    def feed(self, batch: Encoded) -> None:
        """Start on DALI's part of a batch. Raise RuntimeError if it is refused."""
        if self._graph is None:
            max_videos = self._plan.batch_size // self._plan.views
            shape = self._plan.views, self._plan.frame_size, max_videos
            self._graph = DaliGraph(self._device, *shape, self._num_threads)
        self._graph.feed(batch)

    def take(self, rows: Sequence[PlanRow]) -> UInt8[Tensor, "B T H W C"]:
        """Return the clips that were fed first.

        Raise RuntimeError if one cannot be decoded, TimeoutError if DALI hangs and its graph is left behind.
        """
        graph = self._graph
        assert graph is not None

        def take() -> Tensor:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first GPU
            return graph.take()

        waiting = self._waiter.submit(take)
        if not wait([waiting], self._timeout).done:
            self._hung += 1
            self._waiter.abandon(waiting)
            raise TimeoutError
        taken = waiting.result()
        self._failed = 0
        self._lent.append(taken)
        return arrange(taken, rows)

    def count_failure(self, found_bad_video: bool) -> bool:
        """Count a failed batch; return whether DALI is to be given up."""
        self._failed = 0 if found_bad_video else self._failed + 1
        return self._failed >= MAX_FAILED or self._hung >= MAX_HUNG

    def reset(self) -> None:
        """Drop the graph with all that is in flight."""
        self._graph = None

    def release(self) -> None:
        """Return the memory of the last batch to DALI once the device has done what is queued by now."""
        if self._lent and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._in_use.append((event, self._lent))
        self._lent = []
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()

    def close(self) -> None:
        self._waiter.close()
        self.reset()
        self.release()
        for event, _ in self._in_use:  # graphs of other loaders take their memory from the same pool
            event.synchronize()
        self._in_use.clear()
