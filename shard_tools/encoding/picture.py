"""Bring frames of any source into the form that is stored: upright, square pixels, progressive, 8 bit 4:2:0, BT.601."""

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

MAX_SHAPE_CHANGE = 0.05  # of width over height, in the middle of a video


def choose_size(width: float, height: float, short_side: int | None) -> tuple[int, int]:
    """Return the width and height to store, multiples of SIDE_STEP: the nearest short side up to `short_side`, and the
    long side that comes nearest to the same shape."""
    shorter, longer = sorted((width, height))
    steps = max(1, round(shorter / SIDE_STEP))
    if short_side:
        steps = min(steps, max(1, short_side // SIDE_STEP))
    others = max(steps, round(steps * longer / shorter))
    high = steps if height <= width else others
    return (steps + others - high) * SIDE_STEP, high * SIDE_STEP


class FrameConverter:
    """Rotates, scales and converts frames to one size and pixel format, whatever form they come in."""

    def __init__(self, codec: Codec, short_side: int | None, pixel_aspect: Fraction | None):
        self.codec, self.short_side, self.pixel_aspect = codec, short_side, pixel_aspect
        # Decided by the first frame for all of them; shape: width over height.
        self.flips: list[Filter] = []
        self.size, self.shape = (0, 0), 1.0
        self.form: dict[str, Any] = {}
        self.graph: Graph | None = None

    def __call__(self, frame: VideoFrame) -> VideoFrame:
        """Raise VideoError if the picture's shape changes in the middle of the video."""
        form = read_form(frame)
        if form != self.form or self.graph is None:
            if self.graph is None:
                self.flips = find_flips(frame)
            width, height = display_size(frame, self.pixel_aspect, self.flips)
            if self.graph is None:
                self.size, self.shape = choose_size(width, height, self.short_side), width / height
            if abs(width / height / self.shape - 1) > MAX_SHAPE_CHANGE and min(self.size) > 32:
                raise VideoError("its picture changes shape in the middle")
            color_range, siting = (
                ("pc", "center") if self.codec.color_range == FULL else ("tv", "left")
            )
            # bitexact: the same pixels on every processor
            scale = (
                f"w={self.size[0]}:h={self.size[1]}:flags=bicubic+accurate_rnd+full_chroma_int+bitexact"
                f":out_color_matrix=smpte170m:out_range={color_range}"
                f":in_chroma_loc={find_siting(frame)}:out_chroma_loc={siting}"
            )
            filters = [
                *self.flips,
                ("scale", scale),
                ("setsar", "1"),
                ("format", self.codec.pixel_format),
            ]
            self.graph = build_graph(form, filters)
            self.form = form
        self.graph.push(frame)
        return self.graph.pull()  # type: ignore[return-value]


def deinterlace(frames: Frames) -> Frames:
    """Pass on (tick, frame); from the first interlaced frame on, through a deinterlacer that keeps the frame rate."""
    for form, run in groupby(frames, lambda shown: read_form(shown[1])):
        for tick, frame in run:
            if frame.interlaced_frame:
                graph = build_graph(form, [("bwdif", "mode=send_frame:deint=interlaced")])
                yield from _filter(graph, chain([(tick, frame)], run))  # noqa: B031  # all that is left of it
            else:
                yield tick, frame


def _filter(graph: Graph, frames: Frames) -> Frames:
    """Pass (tick, frame) through a graph that may keep frames back."""
    ticks: deque[int] = deque()
    for tick, frame in chain(frames, [(0, None)]):  # None: no other will come
        if frame is not None:
            frame.pts, frame.time_base = tick, Fraction(1, 1000)
            ticks.append(tick)
        graph.push(frame)
        with suppress(av.error.BlockingIOError, av.error.EOFError):
            while picture := graph.pull():
                yield ticks.popleft(), picture  # type: ignore[misc]
