"""The DALI way from bytes to clips: decode, crop, flip, scale, on the GPU or, for a few codecs, on the CPU.

`VideoGraph` decodes videos (NVDEC); `ImageGraph` (images.py) decodes pictures that need no others (nvJPEG).
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from common.devices import to_device
from pipeline.planning.crops import FrameSize
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.shards.gops import VideoSlice

# What fn.decoders.video takes on the CPU in DALI 2.4, as FFmpeg names codecs; nvdec.py has the GPU's.
CPU_CODECS = {"vp8", "vp9", "mjpeg"}
Encoded = list[tuple[VideoSlice, list[PlanRow]]]  # videos, each with the clips to cut from it, which share its frames


class Graph(Protocol):
    """A DALI pipeline that is fed batches by hand and gives them back in the same order.

    Any number of batches may be fed before the first is taken; DALI works on them in its own threads meanwhile. An
    error of one batch ends the whole graph: build another.
    """

    def feed(self, batch: Encoded) -> None:
        """Start on a batch."""

    def take(self) -> Tensor:
        """What became of the batch that was fed first, without a copy.

        DALI's dynamic executor leaves the memory to the tensor for as long as it lives. Raises RuntimeError if a video
        of the batch does not decode.
        """

    def arranged(self, taken: Tensor, rows: list[PlanRow]) -> UInt8[Tensor, "B T H W C"]:
        """What `take` gave as the plan has it; a copy only where that is needed."""

    def frames_decoded(self, cut: VideoSlice) -> int:
        """How many frames it decodes for the wanted ones of a video."""


def dali_is_installed() -> bool:
    """Asked for without importing it, which takes half a second."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


class VideoGraph:
    """Decodes with NVDEC, or on the CPU; see Graph."""

    def __init__(self, device: torch.device, plan: ClipPlan, max_videos: int, num_threads: int) -> None:
        from nvidia.dali import fn  # where PyAV decodes all, nothing needs DALI, and it may be missing
        from nvidia.dali.types import DALIDataType

        self._views = plan.views
        self._pipeline = new_pipeline(device, max_videos, num_threads)
        with self._pipeline:
            encoded = fn.external_source(name="encoded", dtype=DALIDataType.UINT8, ndim=1)
            numbers = fn.external_source(name="frames", dtype=DALIDataType.INT32, ndim=1)
            frames = fn.decoders.video(encoded, frames=numbers, **decoder_settings(device))
            clips = [resized(frames, f"box{view}", plan.frame_size) for view in range(plan.views)]
            self._pipeline.set_outputs(fn.stack(*clips, axis=0) if plan.views > 1 else clips[0])
        self._pipeline.build()

    def feed(self, batch: Encoded) -> None:
        feed = self._pipeline.feed_input
        feed("encoded", [np.frombuffer(cut.data, np.uint8) for cut, _ in batch])
        feed("frames", [np.array(_each_once(cut.numbers), np.int32) for cut, _ in batch])
        for view in range(self._views):
            feed(f"box{view}", [box_of(rows[view]) for _, rows in batch])
        self._pipeline.schedule_run()

    def take(self) -> Tensor:
        clips = taken_of(self._pipeline)
        return clips.flatten(0, 1) if self._views > 1 else clips

    def arranged(self, taken: Tensor, rows: list[PlanRow]) -> UInt8[Tensor, "B T H W C"]:
        decoded = [_each_once(row.frames) for row in rows]
        if all(list(row.frames) == frames for row, frames in zip(rows, decoded, strict=True)):
            return taken
        places = [[frames.index(number) for number in row.frames] for row, frames in zip(rows, decoded, strict=True)]
        return taken[torch.arange(len(rows), device=taken.device)[:, None], to_device(places, taken.device)]

    def frames_decoded(self, cut: VideoSlice) -> int:
        """All up to the last wanted one: DALI begins with the first of a video, and never looks for a key frame."""
        return max(cut.numbers) + 1


def _each_once(frames: Sequence[int]) -> list[int]:
    """As many frames in ascending order, each once if possible: DALI decodes its way to a repeated one again, and for
    the last one of a video opens it anew. Where some are left over, the first is repeated: it is nearest to go back to.
    """
    once = sorted(set(frames))
    return [once[0]] * (len(frames) - len(once)) + once


def new_pipeline(device: torch.device, batch_size: int, num_threads: int) -> Any:
    from nvidia.dali import Pipeline

    return Pipeline(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=device.index if device.type == "cuda" else None,
        prefetch_queue_depth=1,  # one run a feed; several may still be under way
    )


def decoder_settings(device: torch.device) -> dict[str, Any]:
    """`affine`: binding threads to cores needs NVML, and where that has no answer (some virtual machines), every batch
    is an error."""
    return {"device": "mixed" if device.type == "cuda" else "cpu", "affine": False}


def resized(pictures: Any, box: str, size: FrameSize) -> Any:
    """The part of pictures, or videos, that an input called `box` names, as frames of `size`."""
    from nvidia.dali import fn
    from nvidia.dali.types import DALIDataType, DALIInterpType

    corners = fn.external_source(name=box, dtype=DALIDataType.FLOAT, ndim=2)
    return fn.resize(
        pictures,
        # DALI mirrors an axis whose region starts behind its end: a flip costs nothing.
        roi_start=corners[0],
        roi_end=corners[1],
        size=list(size),
        interp_type=DALIInterpType.INTERP_LINEAR,
        antialias=True,
    )


def box_of(row: PlanRow, left: int = 0, top: int = 0) -> np.ndarray:
    """[[top, left], [bottom, right]] of the crop in a picture that begins at (`left`, `top`) of the frame, left and
    right exchanged for a flip."""
    x, y, width, height = row.crop
    x, y = x - left, y - top
    first, last = (x + width, x) if row.flip else (x, x + width)
    return np.array([[y, first], [y + height, last]], np.float32)


def taken_of(pipeline: Any) -> Tensor:
    """The batch that was fed first; raises RuntimeError."""
    (clips,) = pipeline.share_outputs()
    tensor = torch.from_dlpack(clips.as_tensor())
    pipeline.release_outputs()
    return tensor
