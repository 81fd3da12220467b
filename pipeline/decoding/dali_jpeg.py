"""The GPU decoder's kind for MJPEG: every frame is a JPEG, which needs no other frame.

DALI's fn.decoders.image decodes all pictures of a batch at once, with the JPEG engines of a GPU
that has some (A100, H100, H200), otherwise with CUDA. One graph is enough: there are no sessions to
open, no lead frames, and nothing to join.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from adamae.pipeline.decoding.dali_video import (
    DecodedVideo,
    find_region,
    make_pipeline,
    scale_region,
)
from adamae.pipeline.decoding.encoded import Bytes, Encoded, EncodedPictures
from adamae.pipeline.decoding.joining import cut_clips
from adamae.pipeline.planning.crops import FrameSize


class JpegGraph:
    """A DALI pipeline that is fed batches by hand and returns them in the same order.

    An error in one batch invalidates the graph: build another.
    """

    def __init__(
        self,
        device: torch.device,
        num_crops: int,
        frame_size: FrameSize,
        max_pictures: int,
        num_threads: int,
    ) -> None:
        """Build the graph for `num_crops` clips of each video, and `max_pictures` at a time."""
        from nvidia.dali import fn
        from nvidia.dali.types import DALIDataType

        self._pipeline = make_pipeline(device, max_pictures, num_threads)
        with self._pipeline:
            encoded = fn.external_source(name="encoded", dtype=DALIDataType.UINT8, ndim=1)
            regions = fn.external_source(name="regions", dtype=DALIDataType.FLOAT, ndim=3)
            pictures = fn.decoders.image(
                encoded,
                device="mixed" if device.type == "cuda" else "cpu",
                # By default, a part of the pictures would be decoded beside the engines.
                hw_decoder_load=1.0,
                # Chroma is interpolated, as FFmpeg does it.
                jpeg_fancy_upsampling=True,
                # Binding threads to cores needs NVML, which some virtual machines lack.
                affine=False,
            )
            # One decode, however many clips are cut from it.
            clips = [
                scale_region(pictures, regions[index], frame_size) for index in range(num_crops)
            ]
            self._pipeline.set_outputs(*clips)
        self._pipeline.build()

    def feed(self, videos: Mapping[int, Encoded], block: Bytes) -> "PicturesInFlight":
        """Start on the videos of JPEGs in a batch; see VideoGraphs.feed."""
        in_flight = PicturesInFlight(self, [])
        pictures: list[Bytes] = []
        regions: list[Any] = []
        for first_clip, video in videos.items():
            if isinstance(video, EncodedPictures):
                content = block[video.span]
                pictures += [content[picture] for picture in video.pictures]
                region_of_each_clip = [find_region(row) for row in video.rows]
                regions += [region_of_each_clip] * len(video.pictures)
                in_flight.videos.append((first_clip, video))
        if pictures:
            self._pipeline.feed_input("encoded", pictures)
            self._pipeline.feed_input("regions", np.array(regions, np.float32))
            self._pipeline.schedule_run()
        return in_flight

    def take(self) -> list[torch.Tensor]:
        """Wait for the batch that was fed first.

        Return uint8 [pictures, H, W, 3] for the first clips of all videos, for the second ones, and
        so on; see DaliGraph.take.
        """
        outputs = self._pipeline.share_outputs()
        clips = [torch.from_dlpack(output.as_tensor()) for output in outputs]
        self._pipeline.release_outputs()
        return clips


class PicturesInFlight(NamedTuple):
    """The videos of a batch on which a graph has been started, with the index of their clips."""

    graph: JpegGraph
    videos: list[tuple[int, EncodedPictures]]

    def take(self) -> list[DecodedVideo]:
        """Wait for the pictures. Raise RuntimeError if one cannot be decoded."""
        if not self.videos:
            return []
        clips = self.graph.take()
        decoded = []
        start = 0
        for first_clip, video in self.videos:
            cuts = cut_clips(first_clip, video.rows, start)
            for frames, cut in zip(clips, cuts, strict=True):
                decoded.append(DecodedVideo(frames[cut.first : cut.first + cut.num_frames], [cut]))
            start += len(video.pictures)
        return decoded
