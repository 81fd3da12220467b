"""MJPEG by DALI's image decoder, nvJPEG on a GPU: every frame is a picture that needs no other, and only the part of it
that is shown is decoded. All pictures of a batch are decoded at once."""

from itertools import accumulate

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from common.devices import to_device
from pipeline.decoding.graph import Encoded, box_of, decoder_settings, new_pipeline, resized, taken_of
from pipeline.planning.crops import Crop
from pipeline.planning.plan import ClipPlan, PlanRow
from pipeline.shards.gops import VideoSlice, pictures


class ImageGraph:
    """Decodes the frames of MJPEG that has a fragment a frame; see graph.Graph."""

    def __init__(self, device: torch.device, plan: ClipPlan, max_videos: int, num_threads: int) -> None:
        from nvidia.dali import fn
        from nvidia.dali.types import DALIDataType

        self._views = plan.views
        self._pipeline = new_pipeline(device, max_videos * plan.num_frames, num_threads)
        with self._pipeline:
            encoded = fn.external_source(name="encoded", dtype=DALIDataType.UINT8, ndim=1)
            start = fn.external_source(name="start", dtype=DALIDataType.INT32, ndim=1)
            shape = fn.external_source(name="shape", dtype=DALIDataType.INT32, ndim=1)
            part = fn.decoders.image_slice(
                encoded, start=start, shape=shape, axes=[0, 1],
                jpeg_fancy_upsampling=True,  # of colours, as FFmpeg and DALI's CPU decoder do it
                **decoder_settings(device),
            )  # fmt: skip
            images = [resized(part, f"box{view}", plan.frame_size) for view in range(plan.views)]
            self._pipeline.set_outputs(fn.stack(*images, axis=0) if plan.views > 1 else images[0])
        self._pipeline.build()

    def feed(self, batch: Encoded) -> None:
        feed = self._pipeline.feed_input
        found = [pictures(cut) for cut, _ in batch]
        wanted = [sorted(set(cut.numbers)) for cut, _ in batch]
        parts = [_shown(rows) for _, rows in batch]
        counts = [len(numbers) for numbers in wanted]
        images = [found[video][number] for video, numbers in enumerate(wanted) for number in numbers]
        feed("encoded", [np.frombuffer(image, np.uint8) for image in images])
        feed("start", _repeated([np.array([part.y, part.x], np.int32) for part in parts], counts))
        feed("shape", _repeated([np.array([part.height, part.width], np.int32) for part in parts], counts))
        for view in range(self._views):
            boxes = [box_of(rows[view], part.x, part.y) for (_, rows), part in zip(batch, parts, strict=True)]
            feed(f"box{view}", _repeated(boxes, counts))
        self._pipeline.schedule_run()

    def take(self) -> Tensor:
        return taken_of(self._pipeline)

    def arranged(self, taken: Tensor, rows: list[PlanRow]) -> UInt8[Tensor, "B T H W C"]:
        videos = rows[:: self._views]  # views share their frames
        once = [sorted(set(row.frames)) for row in videos]
        if self._views == 1 and all(list(row.frames) == numbers for row, numbers in zip(videos, once, strict=True)):
            return taken.unflatten(0, (len(rows), -1))
        firsts = [0, *accumulate(map(len, once))]
        places = [
            [first + numbers.index(number) for number in row.frames]
            for row, numbers, first in zip(videos, once, firsts, strict=False)
        ]
        index = to_device(places, taken.device)
        if self._views == 1:
            return taken[index]
        return taken[index].transpose(1, 2).flatten(0, 1)  # [videos, T, views, …] before

    def frames_decoded(self, cut: VideoSlice) -> int:
        return len(set(cut.numbers))


def _shown(rows: list[PlanRow]) -> Crop:
    """The smallest box that holds all crops."""
    boxes = [row.crop for row in rows]
    left, top = min(box.x for box in boxes), min(box.y for box in boxes)
    right, bottom = max(box.x + box.width for box in boxes), max(box.y + box.height for box in boxes)
    return Crop(left, top, right - left, bottom - top)


def _repeated(values: list[np.ndarray], counts: list[int]) -> list[np.ndarray]:
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
