"""Clips from videos with PyAV: decode the frames that are needed; crop, scale and flip each in one pass.

FFmpeg's scaler reads the crop straight from the decoded YUV planes, bilinearly with antialiasing and in the colors that
the frame declares. It writes planes of RGB, for which it has vector code, unlike for packed RGB: with interleaving,
16 frames of 200x220 to 224x224 take 3.0 ms of a core instead of 4.7, and are the same. OpenCV's merge would interleave
in .14 ms instead of NumPy's .7, a tenth of a clip with its decoding.
"""

from collections.abc import Sequence
from pathlib import Path

import av
import av.error
import numpy as np
from av.filter import Graph
from av.video.format import VideoFormat
from av.video.frame import VideoFrame
from jaxtyping import UInt8

from adamae.pipeline.decoding.colors import CHROMA_PLACES, describe, find_matrix, find_siting
from adamae.pipeline.decoding.planes import (
    BITS,
    Allocate,
    PlanarFrames,
    copy_frames,
    find_window,
    is_worth_uploading,
)
from adamae.pipeline.decoding.video import UPRIGHT, Video, as_rgb, count_turns, view_plane
from adamae.pipeline.planning.crops import Crop, FrameSize
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards import arrays
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError

FATAL = ("yaf32be", "yaf32le")  # pixel formats at which FFmpeg's scaler aborts the process (8.1)

Clips = UInt8[np.ndarray, "views T H W 3"]
Image = UInt8[np.ndarray, "H W 3"]


class VideoSource:
    """Whatever FFmpeg decodes; see sources.ClipSource."""

    def recognizes(self, source: bytes | Path) -> bool:
        return True

    def cut_views(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], clips: Clips
    ) -> int:
        if (channels := arrays.count_channels([sample.codec])) != 3:
            raise VideoError(
                f"it is not an array, but the sample table says that it has {channels} channels"
            )
        times: dict[int, list[int]] = {}
        for time, number in enumerate(video.numbers):
            times.setdefault(number, []).append(time)
        size = FrameSize(*clips.shape[2:4])
        scalers = [Scaler(row.crop, row.flip, size, (sample.width, sample.height)) for row in rows]
        decoder = Video(video.data, video.num_frames, video.in_groups)
        for number, frame in decoder.frames(video.numbers):
            first, *others = times[number]
            for clip, scaler in zip(clips, scalers, strict=True):
                scaler.scale(frame, clip[first])
                clip[others] = clip[first]
        return decoder.frames_decoded

    def copy_planes(
        self,
        video: VideoSlice,
        sample: Sample,
        rows: list[PlanRow],
        size: FrameSize,
        allocate: Allocate,
    ) -> PlanarFrames | None:
        stored = sample.width, sample.height
        window = find_window([row.crop for row in rows], *stored)
        if arrays.count_channels([sample.codec]) != 3 or not is_worth_uploading(
            window, len(rows), size
        ):
            return None
        decoder = Video(video.data, video.num_frames, video.in_groups)
        copied = copy_frames(decoder.frames(video.numbers), video.numbers, window, stored, allocate)
        return copied and copied._replace(num_decoded=decoder.frames_decoded)

    def read_frames(
        self, source: bytes | Path, numbers: Sequence[int], num_frames: int | None
    ) -> UInt8[np.ndarray, "T H W 3"]:
        frames = Video(source, num_frames).frames(numbers)
        decoded = {number: np.rot90(as_rgb(frame), count_turns(frame)) for number, frame in frames}
        return np.stack([decoded[number] for number in numbers])


class Scaler:
    """Crops, flips and scales frames to `size`: the side of a square, or height and width."""

    def __init__(
        self, crop: Crop, flip: bool, size: int | FrameSize, stored: tuple[int, int]
    ) -> None:
        """crop: a box of whole chroma samples in upright frames of `stored` = (width, height) pixels."""
        self._crop, self._flip, self._size, self._stored = crop, flip, FrameSize.of(size), stored
        self._layout: tuple[object, ...] | None = None

    def __call__(self, frame: VideoFrame) -> Image:
        image = np.empty((*self._size, 3), np.uint8)
        self.scale(frame, image)
        return image

    def scale(self, frame: VideoFrame, image: Image) -> None:
        """Write the scaled frame to `image`. Raise VideoError if it cannot be scaled."""
        layout = describe(frame)
        try:
            if layout != self._layout:  # also when a stream changes its size on the way
                self._graph, self._layout = self._build(frame), layout
            self._graph.vpush(frame)
            interleave(self._graph.vpull(), self._flip, image)
        except av.error.FFmpegError as error:
            raise VideoError(f"a frame of {layout} cannot be scaled: {error.strerror}") from error

    def _build(self, frame: VideoFrame) -> Graph:
        if frame.format.name in FATAL:
            raise VideoError(f"frames of format {frame.format.name} cannot be scaled")
        graph = Graph()
        graph.threads = 1  # clips are decoded in parallel, one per thread
        siting, turns = find_siting(frame), count_turns(frame)
        sides = (frame.height, frame.width) if turns % 2 else (frame.width, frame.height)
        box = self._crop.within(self._stored, sides)
        # FFmpeg's unscaled path gives pixels a neighbor's color, but for accurate_rnd.
        exact = "+accurate_rnd" if (box.height, box.width) == self._size else ""
        across, down = (int(256 * place) for place in CHROMA_PLACES[siting])
        is_placed = BITS.get(frame.format.name) == 8
        place = (
            f"in_h_chr_pos={across}:in_v_chr_pos={down}" if is_placed else f"in_chroma_loc={siting}"
        )
        filters = [
            # The graph passes frames through one by one and never looks at their timestamps.
            (
                "buffer",
                f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1",
            ),
            declare_colors(find_matrix(frame)),
            *UPRIGHT[turns],
            *crop_filters(frame.format, box, siting),
            (
                "scale",
                f"{self._size.width}:{self._size.height}:flags=bilinear+full_chroma_int{exact}:{place}",
            ),
            ("buffersink", "pixel_formats=gbrp"),
        ]
        graph.link_nodes(
            *(graph.add(name, options or None) for name, options in filters)
        ).configure()
        return graph


def declare_colors(matrix: str) -> tuple[str, str]:
    """Return the filter that says how to read frames. Primaries stay what they are, so that nothing converts them."""
    return "setparams", f"colorspace={matrix}:color_primaries=smpte170m:color_trc=smpte170m"


def interleave(planar: VideoFrame, flip: bool, image: Image) -> None:
    """Write a frame of planes (gbrp) to `image` as RGB."""
    for plane, channel in zip(planar.planes, (1, 2, 0), strict=True):
        values = view_plane(plane, image.shape[:2])
        image[..., channel] = values[:, ::-1] if flip else values


def crop_filters(form: VideoFormat, box: Crop, siting: str) -> list[tuple[str, str]]:
    """Return the filters that crop `box` out of upright frames.

    FFmpeg's crop expects boxes of whole chroma samples, which are four pixels wide in 4:1:1 and 4:1:0: these become
    4:4:4 first. Bayer patterns and formats below 8 bits, which FFmpeg expands in several ways, become RGB.
    """
    crop = "crop", f"{box.width}:{box.height}:{box.x}:{box.y}:exact=1"
    if form.is_bayer or any(component.bits < 8 for component in form.components):
        return [
            ("format", "rgb24|rgb48le" if form.is_bayer else "gbrp"),
            ("format", "gbrp|gbrp16le"),
            crop,
        ]
    if min(form.chroma_width(64), form.chroma_height(64)) >= 32:
        return [crop]
    return [
        ("scale", f"flags=bilinear:in_chroma_loc={siting}"),
        ("format", "yuv444p|yuv444p16le"),
        crop,
    ]
