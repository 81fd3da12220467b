"""Bring frames of any source into the form that is stored.

That is upright, with square pixels, progressive, in 8-bit 4:2:0 and BT.601.
"""

from collections import deque
from contextlib import suppress
from fractions import Fraction
from itertools import chain, groupby
from typing import Any

import av
from av.filter import Graph
from av.video.frame import VideoFrame

from adamae.pipeline.decoding.colors import find_siting
from adamae.pipeline.shards.format import SIDE_STEP
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.orientation import (
    Filter,
    build_graph,
    display_size,
    find_flips,
    read_form,
)
from adamae.pipeline.videos.source_video import Frames
from adamae.shard_tools.codecs import FULL, Codec

# Of the aspect ratio, relative: a video that changes its size may be off by the rounding of it.
MAX_SHAPE_CHANGE = 0.05
# In pixels; at smaller stored sizes the rounding of a side is a larger change than that.
MIN_CHECKED_SIDE = 32


def choose_size(width: float, height: float, short_side: int | None) -> tuple[int, int]:
    """Return the width and height to store, multiples of SIDE_STEP.

    The short side is the multiple nearest to the source's, at most `short_side`; the long side is
    the one that comes nearest to the source's aspect ratio.

    Example: 342×256 with a short side of 256 becomes 336×256, 1920×1080 becomes 448×256.
    """
    shorter = min(width, height)
    longer = max(width, height)
    short_steps = max(1, round(shorter / SIDE_STEP))
    if short_side:
        short_steps = min(short_steps, max(1, short_side // SIDE_STEP))
    long_steps = max(short_steps, round(short_steps * longer / shorter))
    if height <= width:
        return long_steps * SIDE_STEP, short_steps * SIDE_STEP
    return short_steps * SIDE_STEP, long_steps * SIDE_STEP


class FrameConverter:
    """Rotates, scales and converts frames of any form to one size and pixel format."""

    def __init__(self, codec: Codec, short_side: int | None, pixel_aspect: Fraction | None) -> None:
        self.codec = codec
        self.short_side = short_side
        self.pixel_aspect = pixel_aspect
        # The first frame decides these for all of them. The aspect ratio is that of the source.
        self.flips: list[Filter] = []
        self.size = (0, 0)
        self.aspect_ratio = 1.0
        # What the graph was built for: some videos change their form in the middle.
        self._form: dict[str, Any] = {}
        self._graph: Graph | None = None

    def __call__(self, frame: VideoFrame) -> VideoFrame:
        """Return a converted frame; raise VideoError if it has another shape than the first."""
        form = read_form(frame)
        if self._graph is None or form != self._form:
            is_first = self._graph is None
            if is_first:
                self.flips = find_flips(frame)
            width, height = display_size(frame, self.pixel_aspect, self.flips)
            if is_first:
                self.size = choose_size(width, height, self.short_side)
                self.aspect_ratio = width / height
            change = abs(width / height / self.aspect_ratio - 1)
            if change > MAX_SHAPE_CHANGE and min(self.size) > MIN_CHECKED_SIDE:
                raise VideoError("its picture changes shape in the middle")
            self._graph = self._build_graph(frame, form)
            self._form = form
        self._graph.push(frame)
        return self._graph.pull()  # type: ignore[return-value]

    def _build_graph(self, frame: VideoFrame, form: dict[str, Any]) -> Graph:
        # FFmpeg places the chroma samples of JPEG in the center of four luma samples, those of
        # MPEG video at the left.
        color_range = "tv"
        siting = "left"
        if self.codec.color_range == FULL:
            color_range = "pc"
            siting = "center"
        # bitexact gives the same pixels on every processor.
        scale = (
            f"w={self.size[0]}:h={self.size[1]}"
            ":flags=bicubic+accurate_rnd+full_chroma_int+bitexact"
            f":out_color_matrix=smpte170m:out_range={color_range}"
            f":in_chroma_loc={find_siting(frame)}:out_chroma_loc={siting}"
        )
        filters = [
            *self.flips,
            ("scale", scale),
            ("setsar", "1"),
            ("format", self.codec.pixel_format),
        ]
        return build_graph(form, filters)


def deinterlace(frames: Frames) -> Frames:
    """Pass on (tick, frame), deinterlaced at the same frame rate from an interlaced frame on.

    Videos without interlaced frames are never filtered. A filter ends where the frames' form
    changes, since FFmpeg's graphs take frames of one form.
    """
    for form, run in groupby(frames, lambda item: read_form(item[1])):
        for tick, frame in run:
            if frame.interlaced_frame:
                graph = build_graph(form, [("bwdif", "mode=send_frame:deint=interlaced")])
                # The filter takes the rest of the run, after which this loop finds none.
                rest = chain([(tick, frame)], run)  # noqa: B031
                yield from _filter(graph, rest)
            else:
                yield tick, frame


def _filter(graph: Graph, frames: Frames) -> Frames:
    """Pass (tick, frame) through a graph that may hold frames back, one out for each one in."""
    ticks: deque[int] = deque()
    # None flushes the graph.
    for tick, frame in chain(frames, [(0, None)]):
        if frame is not None:
            frame.pts = tick
            frame.time_base = Fraction(1, 1000)
            ticks.append(tick)
        graph.push(frame)
        with suppress(av.error.BlockingIOError, av.error.EOFError):
            while True:
                picture = graph.pull()
                yield ticks.popleft(), picture  # type: ignore[misc]
