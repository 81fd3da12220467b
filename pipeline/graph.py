"""The DALI way from bytes to clips: decode, crop, flip, scale, on the GPU (NVDEC) or, for a few codecs, on the CPU."""

import importlib.util
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from devices import on_device
from pipeline.groups import Cut
from pipeline.plan import ClipPlan, PlanRow

# What fn.decoders.video takes on the CPU in DALI 2.4, as FFmpeg names codecs; nvdec.py has the GPU's.
CPU_CODECS = {"vp8", "vp9", "mjpeg"}


def dali_is_installed() -> bool:
    """Asked for without importing it, which takes half a second."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


class Graph:
    """A DALI pipeline that is fed batches by hand and gives them back in the same order.

    Any number of batches may be fed before the first is taken; DALI works on them in its own threads meanwhile. An
    error of one batch ends the whole graph: build another.
    """

    def __init__(self, device: torch.device, plan: ClipPlan, max_videos: int, num_threads: int) -> None:
        from nvidia.dali import Pipeline, fn  # where PyAV decodes all, nothing needs DALI, and it may be missing
        from nvidia.dali.types import DALIDataType, DALIInterpType

        self._views = plan.views
        on_gpu = device.type == "cuda"
        self._pipeline = Pipeline(
            batch_size=max_videos,
            num_threads=num_threads,
            device_id=(device.index or 0) if on_gpu else None,
            prefetch_queue_depth=1,  # one run a feed; several may still be under way
        )
        with self._pipeline:
            encoded = fn.external_source(name="encoded", dtype=DALIDataType.UINT8, ndim=1)
            numbers = fn.external_source(name="frames", dtype=DALIDataType.INT32, ndim=1)
            boxes = [
                fn.external_source(name=f"box{view}", dtype=DALIDataType.FLOAT, ndim=2) for view in range(plan.views)
            ]
            frames = fn.decoders.video(encoded, frames=numbers, device="mixed" if on_gpu else "cpu")
            clips: list[Any] = [
                fn.resize(
                    frames,
                    # DALI mirrors an axis whose region starts behind its end: a flip costs nothing.
                    roi_start=box[0],
                    roi_end=box[1],
                    size=list(plan.frame_size),
                    interp_type=DALIInterpType.INTERP_LINEAR,
                    antialias=True,
                )
                for box in boxes
            ]
            self._pipeline.set_outputs(fn.stack(*clips, axis=0) if plan.views > 1 else clips[0])
        self._pipeline.build()

    def feed(self, batch: list[tuple[Cut, list[PlanRow]]]) -> None:
        """Start on a batch: videos, each with the clips to cut from it, which share the frames that it was cut for."""
        feed = self._pipeline.feed_input
        feed("encoded", [np.frombuffer(cut.data, np.uint8) for cut, _ in batch])
        feed("frames", [np.array(_each_once(cut.numbers), np.int32) for cut, _ in batch])
        for view in range(self._views):
            feed(f"box{view}", [_box(rows[view]) for _, rows in batch])
        self._pipeline.schedule_run()

    def take(self) -> UInt8[Tensor, "B T H W C"]:
        """The clips of the batch that was fed first, views of a video side by side, without a copy.

        Frames that the plan repeats come once: see `in_plan_order`. DALI's dynamic executor leaves the memory to the
        tensor for as long as it lives. Raises RuntimeError if a video of the batch does not decode.
        """
        (clips,) = self._pipeline.share_outputs()
        tensor = torch.from_dlpack(clips.as_tensor())
        self._pipeline.release_outputs()
        return tensor.flatten(0, 1) if self._views > 1 else tensor


def frames_decoded(cut: Cut) -> int:
    """How many frames DALI decodes for these: it begins with the first of a video, and never looks for a key frame."""
    return max(cut.numbers) + 1


def in_plan_order(clips: UInt8[Tensor, "B T H W C"], rows: list[PlanRow]) -> UInt8[Tensor, "B T H W C"]:
    """Clips that `take` gave, with the frames that their rows repeat; a copy only where there are such."""
    decoded = [_each_once(row.frames) for row in rows]
    if all(list(row.frames) == frames for row, frames in zip(rows, decoded, strict=True)):
        return clips
    places = [[frames.index(number) for number in row.frames] for row, frames in zip(rows, decoded, strict=True)]
    return clips[torch.arange(len(rows), device=clips.device)[:, None], on_device(places, clips.device)]


def _each_once(frames: tuple[int, ...]) -> list[int]:
    """As many frames in ascending order, each once if possible: DALI decodes its way to a repeated one again, and for
    the last one of a video opens it anew. Where some are left over, the first is repeated: it is nearest to go back to.
    """
    once = sorted(set(frames))
    return [once[0]] * (len(frames) - len(once)) + once


def _box(row: PlanRow) -> np.ndarray:
    """[[top, left], [bottom, right]] of the crop, left and right exchanged for a flip."""
    x, y, width, height = row.crop
    left, right = (x + width, x) if row.flip else (x, x + width)
    return np.array([[y, left], [y + height, right]], np.float32)
