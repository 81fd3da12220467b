"""Clips with DALI: decode, crop, flip and scale, on the GPU (NVDEC) or, for a few codecs, on the CPU."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from common.devices import to_device
from common.errors import InputError
from common.logging import log_note
from common.threads import run_in_thread
from pipeline.config import DataConfig
from pipeline.decoding.dali_policy import DaliPolicy
from pipeline.planning.crops import Crop, FrameSize
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import SIDE_STEP
from pipeline.video_error import VideoError

# What fn.decoders.video in DALI 2.4 takes, by FFmpeg's names; which of the latter a GPU has depends on its generation.
CPU_CODECS = frozenset({"vp8", "vp9", "mjpeg"})
GPU_CODECS = frozenset({"h264", "hevc", "av1", "vp8", "vp9", "mpeg4"})
GPU_THREADS = 8  # a decoder each; an H100 has 7 NVDEC engines, more than most GPUs
PROBED_SAMPLES = 1000  # the first ones of a dataset, among which one of each codec is looked for
PROBES = 3  # videos of a codec that are tried: one may be corrupt

Bytes = UInt8[np.ndarray, " bytes"]
# Videos, each with the numbers of the wanted frames in it, and the clips to cut from them.
Encoded = Sequence[tuple[Bytes, Sequence[int], list[PlanRow]]]


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
        self, device: torch.device, crops: int, frame_size: FrameSize, max_videos: int, num_threads: int
    ) -> None:
        from nvidia.dali import Pipeline, fn  # may be missing where PyAV decodes everything
        from nvidia.dali.types import DALIDataType, DALIInterpType

        self._crops = crops
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
            boxes = [fn.external_source(name=f"box{i}", dtype=DALIDataType.FLOAT, ndim=2) for i in range(crops)]
            linear: dict[str, Any] = {"interp_type": DALIInterpType.INTERP_LINEAR, "antialias": True}
            # An axis is mirrored if its region starts behind its end: flips are free.
            clips: list[Any] = [
                fn.resize(frames, roi_start=box[0], roi_end=box[1], size=list(frame_size), **linear) for box in boxes
            ]
            self._pipeline.set_outputs(fn.stack(*clips, axis=0) if crops > 1 else clips[0])
        self._pipeline.build()

    def feed(self, batch: Encoded) -> None:
        """Start on a batch."""
        feed = self._pipeline.feed_input
        feed("encoded", [data for data, _, _ in batch])
        feed("frames", [np.array(_sort_frames(numbers), np.int32) for _, numbers, _ in batch])
        for number in range(self._crops):
            feed(f"box{number}", [_region(rows[number]) for _, _, rows in batch])
        self._pipeline.schedule_run()

    def take(self) -> UInt8[Tensor, "B T H W C"]:
        """Wait for the batch that was fed first, its frames as `arrange` takes them.

        Nothing is copied: DALI's dynamic executor keeps the memory for as long as the tensor lives. Raise
        RuntimeError if a video of the batch cannot be decoded.
        """
        (clips,) = self._pipeline.share_outputs()
        tensor = torch.from_dlpack(clips.as_tensor())
        self._pipeline.release_outputs()
        return tensor.flatten(0, 1) if self._crops > 1 else tensor


def arrange(clips: UInt8[Tensor, "B T H W C"], rows: Sequence[PlanRow]) -> UInt8[Tensor, "B T H W C"]:
    """Put frames into the order of the plan; a copy only where frames are repeated."""
    decoded = [_sort_frames(row.frames) for row in rows]
    if all(list(row.frames) == numbers for row, numbers in zip(rows, decoded, strict=True)):
        return clips
    places = [[numbers.index(number) for number in row.frames] for row, numbers in zip(rows, decoded, strict=True)]
    return clips[torch.arange(len(rows), device=clips.device)[:, None], to_device(places, clips.device)]


def _region(row: PlanRow) -> np.ndarray:
    """Return [[top, left], [bottom, right]] of the crop, left and right exchanged for a flip."""
    x, y, width, height = row.crop
    first, last = (x + width, x) if row.flip else (x, x + width)
    return np.array([[y, first], [y + height, last]], np.float32)


def _sort_frames(frames: Sequence[int]) -> list[int]:
    """Return as many frames in ascending order, each once if possible: DALI decodes up to a repeated one again, and
    reopens the video for the last one. Padded with the first, the cheapest to return to."""
    unique = sorted(set(frames))
    return [unique[0]] * (len(frames) - len(unique)) + unique


def shorten(error: Exception) -> str:
    """Return DALI's message, which has many lines and a stack trace, as one."""
    return " ".join(str(error).split())[:400]


class Dali:
    """DALI's part of the batches of a run. Used from one thread, batch after batch."""

    def __init__(self, device: torch.device, plan: ClipPlan, num_threads: int, timeout: float) -> None:
        """timeout: seconds after which a batch counts as hung."""
        self._device, self._plan, self._num_threads, self._timeout = device, plan, num_threads, timeout
        self._graph: DaliGraph | None = None
        self._in_use: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # DALI's memory, until it has been copied

    def feed(self, batch: Encoded) -> None:
        """Start on DALI's part of a batch. Raise RuntimeError if it is refused."""
        if self._graph is None:
            crops = self._plan.crops_per_decode
            max_videos = self._plan.batch_size // crops
            self._graph = DaliGraph(self._device, crops, self._plan.frame_size, max_videos, self._num_threads)
        self._graph.feed(batch)

    def take(self, rows: Sequence[PlanRow]) -> UInt8[Tensor, "B T H W C"]:
        """Wait for the clips that were fed first, in DALI's memory. Raise RuntimeError if one cannot be decoded,
        TimeoutError if DALI hangs."""
        graph = self._graph
        assert graph is not None

        def take() -> Tensor:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first GPU
            return graph.take()

        waiting = run_in_thread(take, "dali")
        if not wait([waiting], self._timeout).done:
            raise TimeoutError(f"no answer for {self._timeout:g} s")
        return arrange(waiting.result(), rows)

    def copy_clips(
        self, taken: UInt8[Tensor, "B T H W C"], clips: UInt8[Tensor, "B T H W C"], indices: Sequence[int]
    ) -> None:
        """Copy what was taken to `indices` of `clips`, and keep DALI's memory until that is done."""
        for index, clip in zip(indices, taken, strict=True):
            clips[index].copy_(clip)  # an indexed assignment of all goes byte by byte on a CPU: 9 times as long
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()
        if self._device.type == "cuda":
            self._in_use.append((torch.cuda.current_stream(self._device).record_event(), taken))

    def reset(self) -> None:
        """Drop the graph with all that is in flight."""
        self._graph = None

    def close(self) -> None:
        self.reset()
        for event, _ in self._in_use:  # graphs of other loaders take their memory from the same pool
            event.synchronize()
        self._in_use.clear()


def choose_policy(dataset: ShardDataset, device: torch.device, config: DataConfig) -> DaliPolicy:
    """Raise InputError if data.decoder is dali and DALI lacks a codec of these shards on this device."""
    share = (config.decoder == "dali") if config.dali_share is None else config.dali_share
    if config.decoder == "pyav" or not share:
        return DaliPolicy()
    side_step = SIDE_STEP if device.type == "cuda" else 1  # see SIDE_STEP
    return DaliPolicy(_find_codecs(dataset, device, config), share, side_step)


def _find_codecs(dataset: ShardDataset, device: torch.device, config: DataConfig) -> frozenset[str]:
    """Return which codecs of a dataset DALI decodes."""
    held = dataset.info.codecs.keys()
    reason = ""
    if fault := find_dali_fault():
        known, reason = frozenset[str](), f", since it cannot be imported ({fault})"
    elif device.type == "cpu":
        known = frozenset(held & CPU_CODECS)
    else:
        errors = {codec: _probe_codec(dataset, codec, device) for codec in held & GPU_CODECS}
        known = frozenset(codec for codec, error in errors.items() if not error)
        reason = "".join(f" ({codec}: {error})" for codec, error in sorted(errors.items()) if error)
    unknown = ", ".join(sorted(held - known))
    if unknown:
        sentence = f"DALI cannot decode {unknown} on {device.type}{reason}, which {dataset.folder} contains"
        if config.decoder == "dali":
            raise InputError(f"{sentence}: set data.decoder to auto")
        log_note(f"{sentence}: PyAV decodes it, in {config.workers} processes", once_per_node=True)
    return known


_PROBED: dict[tuple[str, torch.device], str] = {}  # a run opens several loaders


def _probe_codec(dataset: ShardDataset, codec: str, device: torch.device) -> str:
    """Decode samples of a codec with DALI until one succeeds. Return the error if none does, otherwise ""."""
    if (codec, device) in _PROBED:
        return _PROBED[codec, device]
    error, tried, reader = "", 0, Reader(dataset)
    for index in range(min(PROBED_SAMPLES, len(dataset.samples))):
        sample = dataset.samples[index]
        if sample.codec == codec and not sample.width % SIDE_STEP and not sample.height % SIDE_STEP:
            with suppress(VideoError):
                error = try_decoding(reader.clip(index, (0,)).data, device)
                tried += 1
                if not error or tried == PROBES:
                    break
    _PROBED[codec, device] = error
    return error


def try_decoding(video: bytes, device: torch.device) -> str:
    """Decode the first frame of a video. Return DALI's error, "" if there is none."""
    try:
        graph = DaliGraph(device, 1, FrameSize(16, 16), max_videos=1, num_threads=1)
        graph.feed([(np.frombuffer(video, np.uint8), (0,), [PlanRow(0, 0, (0,), Crop(0, 0, 16, 16), flip=False)])])
        graph.take()
    except RuntimeError as error:
        return shorten(error)
    return ""
