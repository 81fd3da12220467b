"""Clips from videos with PyAV: decode what is needed; crop, scale and flip each in one pass.

FFmpeg's scaler reads the crop straight from the decoded YUV planes, bilinearly with antialiasing
and in the colors that the frame declares. It writes planes of RGB, for which it has vector code,
unlike for packed RGB: with interleaving, 16 frames of 200x220 to 224x224 take 3.0 ms of a core
instead of 4.7, and are the same. OpenCV's merge would interleave in .14 ms instead of NumPy's .7, a
tenth of a clip with its decoding.
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

from adamae.pipeline.decoding.colors import CHROMA_OFFSETS, describe, find_matrix, find_siting
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
from adamae.pipeline.planning.plan import PlanRow, index_frames
from adamae.pipeline.shards import arrays
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError

# Pixel formats at which FFmpeg's scaler aborts the process (8.1).
FATAL = ("yaf32be", "yaf32le")
# The channels of the planes of FFmpeg's planar RGB, "gbrp": green, blue, red.
CHANNELS_OF_GBRP = (1, 2, 0)
# FFmpeg's in_h_chr_pos and in_v_chr_pos count in so many parts of a pixel.
CHROMA_UNITS = 256

Clips = UInt8[np.ndarray, "views T H W 3"]
Image = UInt8[np.ndarray, "H W 3"]
# A name and its options.
Filter = tuple[str, str]


class VideoSource:
    """Whatever FFmpeg decodes; see sources.ClipSource."""

    def recognizes(self, source: bytes | Path) -> bool:
        return True

    def cut_views(
        self, video: VideoSlice, sample: Sample, rows: list[PlanRow], clips: Clips
    ) -> int:
        num_channels = arrays.count_channels([sample.codec])
        if num_channels != 3:
            raise VideoError(
                f"it is not an array, but the sample table says that it has {num_channels} channels"
            )
        times_of_clips = [find_times(indices) for indices in index_frames(rows)]
        size = FrameSize(*clips.shape[2:4])
        stored = sample.width, sample.height
        scalers = [Scaler(row.crop, row.flip, size, stored) for row in rows]
        decoder = Video(video.data, video.num_frames, video.in_groups)
        for index, (_, frame) in enumerate(decoder.frames(video.numbers)):
            for clip, scaler, times in zip(clips, scalers, times_of_clips, strict=True):
                # Clips that begin apart share only some of their frames.
                if index not in times:
                    continue
                time, *repeats = times[index]
                scaler.scale(frame, clip[time])
                # Without any, the assignment would still copy the frame.
                if repeats:
                    clip[repeats] = clip[time]
        return decoder.frames_decoded

    def copy_planes(
        self,
        video: VideoSlice,
        sample: Sample,
        rows: list[PlanRow],
        size: FrameSize,
        allocate: Allocate,
    ) -> PlanarFrames | None:
        if arrays.count_channels([sample.codec]) != 3:
            return None
        stored = sample.width, sample.height
        window = find_window([row.crop for row in rows], *stored)
        num_images = sum(len(row.frames) for row in rows)
        if not is_worth_uploading(window, len(video.numbers), num_images, size):
            return None
        decoder = Video(video.data, video.num_frames, video.in_groups)
        copied = copy_frames(decoder.frames(video.numbers), video.numbers, window, stored, allocate)
        if copied is None:
            return None
        return copied._replace(num_decoded=decoder.frames_decoded)

    def read_frames(
        self, source: bytes | Path, numbers: Sequence[int], num_frames: int | None
    ) -> UInt8[np.ndarray, "T H W 3"]:
        images = {}
        for number, frame in Video(source, num_frames).frames(numbers):
            images[number] = np.rot90(as_rgb(frame), count_turns(frame))
        return np.stack([images[number] for number in numbers])


def find_times(indices: Sequence[int]) -> dict[int, list[int]]:
    """Return at which times of a clip each of its frames is shown.

    Several times, for example, the last frame of a video that is shorter than a clip: [5, 6, 6] is
    {5: [0], 6: [1, 2]}.
    """
    times: dict[int, list[int]] = {}
    for time, index in enumerate(indices):
        times.setdefault(index, []).append(time)
    return times


class Scaler:
    """Crops, flips and scales frames to `size`: the side of a square, or height and width."""

    def __init__(
        self, crop: Crop, flip: bool, size: int | FrameSize, stored: tuple[int, int]
    ) -> None:
        """Prepare to cut `crop`, a box of whole chroma samples, out of upright frames.

        `stored` is the width and height in which it is counted.
        """
        self._crop = crop
        self._flip = flip
        self._size = FrameSize.of(size)
        self._stored = stored
        self._layout: tuple[object, ...] | None = None

    def __call__(self, frame: VideoFrame) -> Image:
        image = np.empty((*self._size, 3), np.uint8)
        self.scale(frame, image)
        return image

    def scale(self, frame: VideoFrame, image: Image) -> None:
        """Write the scaled frame to `image`. Raise VideoError if it cannot be scaled."""
        layout = describe(frame)
        try:
            if layout != self._layout:
                # The first frame, or a stream that changes midway.
                self._graph = self._build_graph(frame)
                self._layout = layout
            self._graph.vpush(frame)
            interleave(self._graph.vpull(), self._flip, image)
        except av.error.FFmpegError as error:
            raise VideoError(f"a frame of {layout} cannot be scaled: {error.strerror}") from error

    def _build_graph(self, frame: VideoFrame) -> Graph:
        """Build FFmpeg's graph of filters for frames like this one."""
        name = frame.format.name
        if name in FATAL:
            raise VideoError(f"frames of format {name} cannot be scaled")
        siting = find_siting(frame)
        turns = count_turns(frame)
        sides = frame.width, frame.height
        if turns % 2 == 1:
            sides = frame.height, frame.width
        box = self._crop.within(self._stored, sides)
        # The graph passes frames through one by one and never looks at their timestamps.
        source = f"video_size={frame.width}x{frame.height}:pix_fmt={name}:time_base=1/1"
        filters = [
            ("buffer", source),
            declare_colors(find_matrix(frame)),
            *UPRIGHT[turns],
            *crop_filters(frame.format, box, siting),
            self._scale_filter(name, box, siting),
            ("buffersink", "pixel_formats=gbrp"),
        ]
        graph = Graph()
        # Each worker decodes and scales on one core.
        graph.threads = 1
        nodes = [graph.add(filter_name, options or None) for filter_name, options in filters]
        graph.link_nodes(*nodes).configure()
        return graph

    def _scale_filter(self, format_name: str, box: Crop, siting: str) -> Filter:
        flags = "bilinear+full_chroma_int"
        if (box.height, box.width) == self._size:
            # Without this, FFmpeg's unscaled path gives pixels a neighbor's color.
            flags += "+accurate_rnd"
        if BITS.get(format_name) == 8:
            right, below = CHROMA_OFFSETS[siting]
            across = int(CHROMA_UNITS * right)
            down = int(CHROMA_UNITS * below)
            chroma = f"in_h_chr_pos={across}:in_v_chr_pos={down}"
        else:
            chroma = f"in_chroma_loc={siting}"
        return "scale", f"{self._size.width}:{self._size.height}:flags={flags}:{chroma}"


def declare_colors(matrix: str) -> Filter:
    """Return the filter that says how to read frames.

    Primaries and transfer function are the same before and after, so that nothing converts them.
    """
    return "setparams", f"colorspace={matrix}:color_primaries=smpte170m:color_trc=smpte170m"


def interleave(planar: VideoFrame, flip: bool, image: Image) -> None:
    """Write a frame of planes (gbrp) to `image` as RGB."""
    for plane, channel in zip(planar.planes, CHANNELS_OF_GBRP, strict=True):
        values = view_plane(plane, image.shape[:2])
        if flip:
            values = values[:, ::-1]
        image[..., channel] = values


def crop_filters(pixels: VideoFormat, box: Crop, siting: str) -> list[Filter]:
    """Return the filters that crop `box` out of upright frames.

    FFmpeg's crop expects boxes of whole chroma samples, which are four pixels wide in 4:1:1 and
    4:1:0: these become 4:4:4 first. Bayer patterns and formats below 8 bits, which FFmpeg expands
    in several ways, become RGB.
    """
    crop = "crop", f"{box.width}:{box.height}:{box.x}:{box.y}:exact=1"
    if pixels.is_bayer:
        return [("format", "rgb24|rgb48le"), ("format", "gbrp|gbrp16le"), crop]
    if any(component.bits < 8 for component in pixels.components):
        return [("format", "gbrp"), ("format", "gbrp|gbrp16le"), crop]
    # Of 64 pixels, chroma has 32 samples or more unless each is wider than two pixels.
    if min(pixels.chroma_width(64), pixels.chroma_height(64)) >= 32:
        return [crop]
    to_444 = ("scale", f"flags=bilinear:in_chroma_loc={siting}")
    return [to_444, ("format", "yuv444p|yuv444p16le"), crop]
