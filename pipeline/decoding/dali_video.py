"""The GPU decoder's kind for H.264, HEVC and VP9: joined videos through DALI's fn.decoders.video.

NVDEC decodes on a GPU, and a decoder of DALI's own on a CPU, for VP9 alone. Cropping,
flipping and scaling follow in the same graph.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from adamae.common.arithmetic import ceil_div
from adamae.pipeline.decoding.encoded import Bytes, Encoded, EncodedVideo
from adamae.pipeline.decoding.joining import CLIPS_PER_VIDEO, Cut, JoinedVideo, join_videos
from adamae.pipeline.planning.crops import FrameSize
from adamae.pipeline.planning.plan import ClipPlan, PlanRow


class DecodedVideo(NamedTuple):
    """The cropped and scaled frames of a joined video's cuts, in DALI's memory.

    The frames of each cut follow those of the one before.
    """

    frames: UInt8[Tensor, "frames H W C"]
    cuts: list[Cut]


def find_region(row: PlanRow) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the corners of a row's box, each as (y, x), from which scale_region makes its clip."""
    x, y, width, height = row.crop
    first_column = x
    last_column = x + width
    # An axis is mirrored if its region starts behind its end: flips are free.
    if row.flip:
        first_column = x + width
        last_column = x
    return (y, first_column), (y + height, last_column)


def scale_region(frames: Any, region: Any, size: FrameSize) -> Any:
    """Add the scaling of a region of frames to a graph; `region` is a node of [2, 2] floats."""
    from nvidia.dali import fn
    from nvidia.dali.types import DALIInterpType

    return fn.resize(
        frames,
        roi_start=region[0],
        roi_end=region[1],
        size=list(size),
        interp_type=DALIInterpType.INTERP_LINEAR,
        antialias=True,
    )


def make_pipeline(device: torch.device, batch_size: int, num_threads: int) -> Any:
    """Make a DALI pipeline without a graph, which is fed batches by hand."""
    # Imported here and in what fills it, as DALI may be missing where PyAV decodes everything.
    from nvidia.dali import Pipeline

    return Pipeline(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=device.index if device.type == "cuda" else None,
        # One run per feed; several may still be in flight.
        prefetch_queue_depth=1,
    )


class DaliGraph:
    """A DALI pipeline that is fed any number of batches by hand and returns them in the same order.

    An error in one batch invalidates the whole graph: build another.
    """

    def __init__(
        self, device: torch.device, num_cuts: int, frame_size: FrameSize, max_videos: int
    ) -> None:
        """Build the graph for `max_videos` videos or fewer at a time.

        Each of them has at most `num_cuts` cuts.
        """
        from nvidia.dali import fn
        from nvidia.dali.types import DALIDataType

        self._num_cuts = num_cuts
        # One thread, since several graphs run side by side.
        self._pipeline = make_pipeline(device, max_videos, num_threads=1)
        with self._pipeline:
            encoded = fn.external_source(name="encoded", dtype=DALIDataType.UINT8, ndim=1)
            numbers = fn.external_source(name="numbers", dtype=DALIDataType.INT32, ndim=1)
            frames = fn.decoders.video(
                encoded,
                frames=numbers,
                device="mixed" if device.type == "cuda" else "cpu",
                # A missing frame is an error, and not a black one.
                pad_mode="none",
                # Binding threads to cores needs NVML, which some virtual machines lack.
                affine=False,
            )
            spans = fn.external_source(name="spans", dtype=DALIDataType.INT32, ndim=2)
            regions = fn.external_source(name="regions", dtype=DALIDataType.FLOAT, ndim=3)
            clips: list[Any] = []
            for index in range(num_cuts):
                cut = frames[spans[index, 0] : spans[index, 1]]
                clips.append(scale_region(cut, regions[index], frame_size))
            self._pipeline.set_outputs(fn.cat(*clips, axis=0) if num_cuts > 1 else clips[0])
        self._pipeline.build()

    def feed(self, videos: Sequence[JoinedVideo]) -> None:
        """Start on a batch."""
        # A video with fewer cuts is given one frame and one pixel for each that it lacks.
        spans = np.full((len(videos), self._num_cuts, 2), (0, 1), np.int32)
        regions = np.full((len(videos), self._num_cuts, 2, 2), ((0, 0), (1, 1)), np.float32)
        for video_index, video in enumerate(videos):
            for cut_index, cut in enumerate(video.cuts):
                spans[video_index, cut_index] = cut.first, cut.first + cut.num_frames
                regions[video_index, cut_index] = find_region(cut.row)
        self._pipeline.feed_input("encoded", [video.data for video in videos])
        self._pipeline.feed_input(
            "numbers", [np.array(video.numbers, np.int32) for video in videos]
        )
        self._pipeline.feed_input("spans", spans)
        self._pipeline.feed_input("regions", regions)
        self._pipeline.schedule_run()

    def take(self) -> list[UInt8[Tensor, "frames H W C"]]:
        """Wait for the batch that was fed first, and return the frames of each video's cuts.

        The frames of each cut follow those of the one before. Nothing is copied: DALI's dynamic
        executor keeps the memory for as long as the tensors live. Raise RuntimeError if a video of
        the batch cannot be decoded.
        """
        (frames,) = self._pipeline.share_outputs()
        tensors = [torch.from_dlpack(frames[index]) for index in range(len(frames))]
        self._pipeline.release_outputs()
        return tensors


class BatchInFlight:
    """A batch on which several graphs have been started."""

    def __init__(self) -> None:
        self._parts: list[tuple[DaliGraph, list[JoinedVideo]]] = []

    def feed(self, graph: DaliGraph, videos: list[JoinedVideo]) -> None:
        """Start a graph on a part of the batch."""
        graph.feed(videos)
        self._parts.append((graph, videos))

    def take(self) -> list[DecodedVideo]:
        """Wait for all parts. Raise RuntimeError if a video cannot be decoded."""
        decoded = []
        for graph, videos in self._parts:
            for video, frames in zip(videos, graph.take(), strict=True):
                decoded.append(DecodedVideo(frames, video.cuts))
        return decoded


class VideoGraphs:
    """Graphs that decode batches side by side: each is started on a part of the joined videos."""

    def __init__(self, device: torch.device, plan: ClipPlan, num_graphs: int) -> None:
        crops = plan.crops_per_decode
        num_videos = plan.batch_size // crops
        max_videos = ceil_div(num_videos, num_graphs)
        max_cuts = crops * CLIPS_PER_VIDEO
        self._graphs = [
            DaliGraph(device, max_cuts, plan.frame_size, max_videos) for _ in range(num_graphs)
        ]
        self._next_graph = 0

    def feed(self, videos: Mapping[int, Encoded], block: Bytes) -> BatchInFlight:
        """Start on what can be joined of a batch; the keys are the indices of first clips.

        Batches are to be taken in the order in which they were fed. Raise RuntimeError if a graph
        has failed.
        """
        own = {
            first_clip: video
            for first_clip, video in videos.items()
            if isinstance(video, EncodedVideo)
        }
        joined = join_videos(own, block)
        num_parts = min(len(joined), len(self._graphs))
        batch = BatchInFlight()
        for part in range(num_parts):
            graph = self._graphs[(self._next_graph + part) % len(self._graphs)]
            batch.feed(graph, joined[part :: len(self._graphs)])
        # The next batch begins with the graph that has waited longest.
        self._next_graph = (self._next_graph + num_parts) % len(self._graphs)
        return batch
