"""Clips with DALI: decode, crop, flip and scale, on the GPU (NVDEC) or, for a few codecs, on the CPU."""

import ctypes
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from common.arithmetic import ceil_div
from common.errors import InputError
from common.logging import log_note
from pipeline.config import DataConfig
from pipeline.decoding.joining import CLIPS_PER_VIDEO, Bytes, Cut, DaliPolicy, EncodedVideo, JoinedVideo, join_videos
from pipeline.planning.crops import Crop, FrameSize
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.reading.storage import call_with_timeout
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import SIDE_STEP
from pipeline.video_error import VideoError

# Side by side: one keeps 14 % of the NVDEC engines of an H100 busy, seven 89 % (NVIDIA/DALI#6387).
GPU_PIPELINES = 8
PROBED_SAMPLES = 1000  # the first ones of a dataset, among which one of each codec is looked for
NVDEC = "libnvcuvid.so.1"
PROBES = 3  # videos of a codec that are tried: one may be corrupt
SHARE_STEP = 1 / 16
MIN_WAIT_S = 0.002  # shorter waits say nothing


class DaliGraph:
    """A DALI pipeline that is fed any number of batches by hand and returns them in the same order.

    An error in one batch invalidates the whole graph: build another.
    """

    def __init__(self, device: torch.device, num_cuts: int, frame_size: FrameSize, max_videos: int) -> None:
        """num_cuts: of a video, at most."""
        from nvidia.dali import Pipeline, fn  # may be missing where PyAV decodes everything
        from nvidia.dali.types import DALIDataType, DALIInterpType

        self._num_cuts = num_cuts
        self._pipeline = Pipeline(
            batch_size=max_videos,
            num_threads=1,  # there are several pipelines
            device_id=device.index if device.type == "cuda" else None,
            prefetch_queue_depth=1,  # one run per feed; several may still be in flight
        )
        with self._pipeline:
            encoded = fn.external_source(name="encoded", dtype=DALIDataType.UINT8, ndim=1)
            numbers = fn.external_source(name="numbers", dtype=DALIDataType.INT32, ndim=1)
            frames = fn.decoders.video(
                encoded,
                frames=numbers,
                device="mixed" if device.type == "cuda" else "cpu",
                pad_mode="none",  # a frame that is missing is an error, and not black
                affine=False,  # binding threads to cores needs NVML, which some virtual machines lack
            )
            spans = fn.external_source(name="spans", dtype=DALIDataType.INT32, ndim=2)
            boxes = fn.external_source(name="boxes", dtype=DALIDataType.FLOAT, ndim=3)
            linear: dict[str, Any] = {"interp_type": DALIInterpType.INTERP_LINEAR, "antialias": True}
            # An axis is mirrored if its region starts behind its end: flips are free.
            clips: list[Any] = [
                fn.resize(
                    frames[spans[i, 0] : spans[i, 1]],
                    roi_start=boxes[i, 0], roi_end=boxes[i, 1], size=list(frame_size), **linear,
                )
                for i in range(num_cuts)
            ]  # fmt: skip
            self._pipeline.set_outputs(fn.cat(*clips, axis=0) if num_cuts > 1 else clips[0])
        self._pipeline.build()

    def feed(self, videos: Sequence[JoinedVideo]) -> None:
        """Start on a batch."""
        spans = np.full((len(videos), self._num_cuts, 2), (0, 1), np.int32)  # one frame where there is no cut
        boxes = np.full((len(videos), self._num_cuts, 2, 2), ((0, 0), (1, 1)), np.float32)
        for number, video in enumerate(videos):
            for place, cut in enumerate(video.cuts):
                spans[number, place] = cut.first, cut.first + cut.num_frames
                x, y, width, height = cut.row.crop
                left, right = (x + width, x) if cut.row.flip else (x, x + width)
                boxes[number, place] = (y, left), (y + height, right)
        self._pipeline.feed_input("encoded", [video.data for video in videos])
        self._pipeline.feed_input("numbers", [np.array(video.numbers, np.int32) for video in videos])
        self._pipeline.feed_input("spans", spans)
        self._pipeline.feed_input("boxes", boxes)
        self._pipeline.schedule_run()

    def take(self) -> list[UInt8[Tensor, "frames H W C"]]:
        """Wait for the batch that was fed first: of each video the frames of its cuts, one behind the other.

        Nothing is copied: DALI's dynamic executor keeps the memory for as long as the tensors live. Raise
        RuntimeError if a video of the batch cannot be decoded.
        """
        (frames,) = self._pipeline.share_outputs()
        tensors = [torch.from_dlpack(frames[number]) for number in range(len(frames))]
        self._pipeline.release_outputs()
        return tensors


def shorten(error: Exception) -> str:
    """Return DALI's message, which has many lines and stack traces, as one."""
    reason = str(error).rpartition("encountered:")[2].partition("C++ context:")[0]
    return " ".join(reason.split())[:400]


class Dali:
    """DALI's part of the batches of a run. Used from one thread, batch after batch."""

    def __init__(self, device: torch.device, plan: ClipPlan, num_graphs: int, timeout: float) -> None:
        """timeout: seconds after which a batch counts as hung."""
        self._device, self._plan, self._num_graphs, self._timeout = device, plan, num_graphs, timeout
        self._graphs: deque[DaliGraph] = deque()  # the next one first
        self._fed: dict[int, list[tuple[DaliGraph, list[JoinedVideo]]]] = {}  # by batch
        self._error: RuntimeError | None = None
        self._in_use: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()  # DALI's memory, until it has been copied

    def feed(self, batch: int, videos: Mapping[int, EncodedVideo], block: Bytes) -> None:
        """Start on DALI's part of a batch, once. `take` raises what goes wrong, most likely with an earlier batch."""
        if self._error or batch in self._fed:
            return
        try:
            if not self._graphs:
                crops = self._plan.crops_per_decode
                max_videos = ceil_div(self._plan.batch_size, crops * self._num_graphs)
                sizes = crops * CLIPS_PER_VIDEO, self._plan.frame_size, max_videos
                self._graphs.extend(DaliGraph(self._device, *sizes) for _ in range(self._num_graphs))
            joined = join_videos(videos, block)
            parts = [(graph, joined[number :: self._num_graphs]) for number, graph in enumerate(self._graphs)]
            self._fed[batch] = parts[: len(joined)]
            for graph, part in self._fed[batch]:
                graph.feed(part)
            self._graphs.rotate(-len(joined))
        except RuntimeError as error:
            self._error = error

    def take(self, batch: int) -> dict[int, UInt8[Tensor, "T H W C"]]:
        """Wait for the clips of the batch that was fed first, by their indices in it, in DALI's memory. Raise
        RuntimeError if a video cannot be decoded, TimeoutError if DALI hangs."""
        if self._error:
            raise self._error
        parts = self._fed.pop(batch)

        def take() -> list[list[Tensor]]:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first GPU
            return [graph.take() for graph, _ in parts]

        videos = [video for _, part in parts for video in part]
        taken = chain.from_iterable(call_with_timeout(take, self._timeout, "data.decode_timeout_s"))
        clips = {}
        for video, frames in zip(videos, taken, strict=True):
            end = 0
            for cut in video.cuts:
                start, end = end, end + cut.num_frames
                clip = frames[start:end]
                if cut.order != list(range(cut.num_frames)):  # a copy only where frames repeat
                    clip = torch.stack([clip[number] for number in cut.order])
                clips[cut.clip] = clip
        return clips

    def copy_clips(self, taken: Mapping[int, UInt8[Tensor, "T H W C"]], clips: UInt8[Tensor, "B T H W C"]) -> None:
        """Copy what was taken to its indices of `clips`, and keep DALI's memory until that is done."""
        for index, clip in taken.items():
            clips[index].copy_(clip)
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()
        if self._device.type == "cuda":
            self._in_use.append((torch.cuda.current_stream(self._device).record_event(), list(taken.values())))

    def reset(self) -> None:
        """Drop the graphs with all that is in flight."""
        self._graphs.clear()
        self._fed.clear()
        self._error = None

    def close(self) -> None:
        self.reset()
        for event, _ in self._in_use:  # graphs of other loaders take their memory from the same pool
            event.synchronize()
        self._in_use.clear()


def adjust_share(share: float, workers_s: float, dali_s: float) -> float:
    """Return DALI's share of the next chunks, so that it and the workers, which were waited for so long, come to be
    equally far ahead: none while workers alone keep up."""
    change = SHARE_STEP if workers_s > dali_s else -SHARE_STEP
    return min(1.0, max(0.0, share + change)) if abs(workers_s - dali_s) >= MIN_WAIT_S else share


def choose_policy(dataset: ShardDataset, device: torch.device, config: DataConfig) -> DaliPolicy:
    """Find which codecs of a dataset DALI decodes on a device. Raise InputError if data.decoder is dali and it lacks
    one."""
    share, codecs = config.share_of_dali, dataset.info.codecs.keys()
    if not share:
        return DaliPolicy()
    side_step = SIDE_STEP if device.type == "cuda" else 1
    errors = {codec: error for codec in sorted(codecs) if (error := _probe_codec(dataset, codec, device, side_step))}
    if errors:
        reasons = "; ".join(dict.fromkeys(errors.values()))
        sentence = (
            f"DALI cannot decode {', '.join(errors)} on {device.type} ({reasons}), which {dataset.folder} contains"
        )
        if config.decoder == "dali":
            raise InputError(f"{sentence}: set data.decoder to auto")
        log_note(f"{sentence}: PyAV decodes it, in {config.workers} processes", once_per_node=True)
    return DaliPolicy(frozenset(codecs - errors.keys()), 1.0 if share == "auto" else share, side_step)


def _probe_codec(dataset: ShardDataset, codec: str, device: torch.device, side_step: int) -> str:
    """Decode videos of a codec with DALI until one succeeds. Return the error if none does, otherwise ""."""
    if codec == "mjpeg" and device.type == "cuda":
        return "no NVDEC decodes mjpeg"
    suitable = (
        index
        for index, x in enumerate(islice(dataset.samples, PROBED_SAMPLES))
        if x.codec == codec and not (x.width % side_step or x.height % side_step)
    )
    error = ""
    for index in islice(suitable, PROBES):
        with suppress(VideoError):
            if not (error := try_decoding(dataset.read_clip(index, (0,)).data, device)):
                break
    return error


@lru_cache(maxsize=16)  # a run opens several loaders
def try_decoding(video: bytes, device: torch.device) -> str:
    """Decode the first frame of a video. Return the error, "" if there is none."""
    try:
        if device.type == "cuda":
            ctypes.CDLL(NVDEC)
        graph = DaliGraph(device, 1, FrameSize(16, 16), max_videos=1)
        row = PlanRow(0, 0, (0,), Crop(0, 0, 16, 16), flip=False)
        graph.feed([JoinedVideo(np.frombuffer(video, np.uint8), [0], [Cut(0, row, 0, [0])])])
        graph.take()
    except (RuntimeError, ImportError, OSError) as error:  # the latter of its libraries
        advice = "; containers have it with NVIDIA_DRIVER_CAPABILITIES=compute,video,utility"
        return shorten(error) + (advice if NVDEC in str(error) else "")
    return ""
