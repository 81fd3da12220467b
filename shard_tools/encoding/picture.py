"""Bring frames of any source into the form that is stored: upright, square pixels, progressive, 8 bit 4:2:0, BT.601."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import chain, groupby
from typing import Any, cast

import av
import numpy as np
from av.filter import Graph
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame

from pipeline.decoding.colors import find_siting
from pipeline.shards.format import SIDE_STEP
from shard_tools.codecs import FULL, Codec

MAX_SHAPE_CHANGE = 0.05  # of width over height, in the middle of a video
Filter = tuple[str, str]  # name and options
Frames = Iterator[tuple[int, VideoFrame]]  # each with the tick at which it is shown
FLIPS = ("transpose", "cclock_flip"), ("hflip", ""), ("vflip", "")  # the first one swaps rows and columns


class UnusableError(Exception):
    """A video cannot become a sample; the message says why."""


def display_size(frame: VideoFrame, pixel_aspect: Fraction | None, flips: list[Filter]) -> tuple[float, float]:
    """Return width and height of a picture, upright and in square pixels; `pixel_aspect`: width of one over height."""
    is_plausible = pixel_aspect is not None and Fraction(1, 8) < pixel_aspect < 8
    wide, high = float(frame.width * (pixel_aspect if pixel_aspect and is_plausible else 1)), float(frame.height)
    return (high, wide) if FLIPS[0] in flips else (wide, high)


def find_flips(frame: VideoFrame) -> list[Filter]:
    """Return the filters that obey the frame's display matrix, like `ffmpeg -autorotate`, for quarter turns only.

    It is read off the first frame: PyAV's side data keeps every frame that is asked for it in memory for long.
    """
    # PyAV cannot list side data of types that FFmpeg has got since: EXIF, the view of a stereo pair.
    unknown = [("sidedata", f"mode=delete:type={number}") for number in range(len(Type), len(Type) + 32)]
    graph = _build_graph(_read_form(frame), unknown)
    graph.push(frame)
    data = cast(Any, graph.pull()).side_data.get(Type.DISPLAYMATRIX)
    if data is None:
        return []
    # Column x goes to a x + c y, row y to b x + d y.
    signs = np.sign(np.frombuffer(bytes(data), np.int32)[[0, 1, 3, 4]]).reshape(2, 2)  # a, b, c, d
    if any((np.abs(signs).sum(axis) != 1).any() for axis in (0, 1)):
        return []
    is_needed = (signs[0, 0] == 0, *(signs.sum(axis=0) < 0))
    return [flip for flip, needed in zip(FLIPS, is_needed, strict=True) if needed]


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


def _read_form(frame: VideoFrame) -> dict[str, Any]:
    """Return what of a frame decides how it must be converted, as options of FFmpeg's buffer filter."""
    return {
        "video_size": f"{frame.width}x{frame.height}",
        "pix_fmt": frame.format.name,
        "time_base": "1/1000",
        "colorspace": int(frame.colorspace),
        "range": int(frame.color_range),
    }


def _build_graph(form: dict[str, Any], filters: list[Filter]) -> Graph:
    graph = Graph()
    source = "buffer", ":".join(f"{name}={value}" for name, value in form.items())
    nodes = [graph.add(name, options or None) for name, options in [source, *filters, ("buffersink", "")]]
    graph.link_nodes(*nodes).configure()
    return graph


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
        """Raise UnusableError if the picture's shape changes in the middle of the video."""
        form = _read_form(frame)
        if form != self.form or self.graph is None:
            if self.graph is None:
                self.flips = find_flips(frame)
            width, height = display_size(frame, self.pixel_aspect, self.flips)
            if self.graph is None:
                self.size, self.shape = choose_size(width, height, self.short_side), width / height
            if abs(width / height / self.shape - 1) > MAX_SHAPE_CHANGE and min(self.size) > 32:
                raise UnusableError("its picture changes shape in the middle")
            color_range, siting = ("pc", "center") if self.codec.color_range == FULL else ("tv", "left")
            # bitexact: the same pixels on every processor
            scale = (
                f"w={self.size[0]}:h={self.size[1]}:flags=bicubic+accurate_rnd+full_chroma_int+bitexact"
                f":out_color_matrix=smpte170m:out_range={color_range}"
                f":in_chroma_loc={find_siting(frame)}:out_chroma_loc={siting}"
            )
            filters = [*self.flips, ("scale", scale), ("setsar", "1"), ("format", self.codec.pixel_format)]
            self.graph = _build_graph(form, filters)
            self.form = form
        self.graph.push(frame)
        return self.graph.pull()  # type: ignore[return-value]


def deinterlace(frames: Frames) -> Frames:
    """Pass on (tick, frame); from the first interlaced frame on, through a deinterlacer that keeps the frame rate."""
    for form, run in groupby(frames, lambda shown: _read_form(shown[1])):
        for tick, frame in run:
            if frame.interlaced_frame:
                graph = _build_graph(form, [("bwdif", "mode=send_frame:deint=interlaced")])
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
