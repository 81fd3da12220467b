"""Bring frames of any source into the form that is stored: upright, square pixels, progressive, 8 bit 4:2:0, BT.601."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import av
import numpy as np
from av.filter import Graph
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame

from pipeline.shards.format import SIDE_STEP
from shard_tools.encoding.codecs import Codec

BT601 = 6  # AVCOL_SPC_SMPTE170M
LIMITED, FULL = 1, 2  # AVCOL_RANGE_MPEG, AVCOL_RANGE_JPEG


class UnusableError(Exception):
    """A video cannot become a sample; the message says why, for people."""


@dataclass(frozen=True, slots=True)
class Form:
    """What of a frame decides how it must be converted."""

    width: int
    height: int
    pixel_format: str
    color_range: int
    color_matrix: int

    @classmethod
    def of(cls, frame: VideoFrame) -> "Form":
        color = int(frame.color_range), int(frame.colorspace)
        return cls(frame.width, frame.height, frame.format.name, *color)

    def source_filter(self) -> tuple[str, str]:
        fields = {
            "video_size": f"{self.width}x{self.height}",
            "pix_fmt": self.pixel_format,
            "time_base": "1/1000",
            "colorspace": self.color_matrix,
            "range": self.color_range,
        }
        return "buffer", ":".join(f"{name}={value}" for name, value in fields.items())


@dataclass(frozen=True, slots=True)
class Pose:
    """How the pictures of a video are to be shown."""

    pixel_aspect: Fraction  # width of a pixel over its height
    turn: tuple[tuple[str, str], ...]  # the filters, with their options, that bring a picture upright

    @classmethod
    def of(cls, frame: VideoFrame, pixel_aspect: Fraction | None) -> "Pose":
        """Read it off the first frame: PyAV's side data keeps every frame that is asked for it in memory for long."""
        usual = pixel_aspect is not None and Fraction(1, 8) < pixel_aspect < 8  # else nonsense in the header
        return cls(pixel_aspect if pixel_aspect and usual else Fraction(1), _turn(frame))

    def shown_size(self, width: int, height: int) -> tuple[float, float]:
        """Width and height of a picture, upright and in square pixels."""
        wide, high = float(width * self.pixel_aspect), float(height)
        return (high, wide) if any(name == "transpose" for name, _ in self.turn) else (wide, high)


def _turn(frame: VideoFrame) -> tuple[tuple[str, str], ...]:
    """The filters that obey the frame's display matrix, like `ffmpeg -autorotate`; angles between are left alone."""
    data = cast(Any, frame.side_data).get(Type.DISPLAYMATRIX)
    if data is None:
        return ()
    # Column x to a x + c y, row y to b x + d y.
    a, b, _, c, d = np.frombuffer(bytes(data), np.int32)[:5].tolist()
    if a == d == 0 and b and c:
        direction = {(True, True): "cclock_flip", (True, False): "clock", (False, True): "cclock"}
        return (("transpose", direction.get((b > 0, c > 0), "clock_flip")),)
    if b == c == 0:
        return tuple((name, "") for name, value in (("hflip", a), ("vflip", d)) if value < 0)
    return ()


def stored_size(width: float, height: float, short_side: int | None) -> tuple[int, int]:
    """Width and height to store, multiples of SIDE_STEP: the shorter side is the nearest one, but at most `short_side`,
    the longer one what comes nearest to the same shape."""
    shorter, longer = sorted((width, height))
    steps = max(1, round(shorter / SIDE_STEP))
    if short_side:
        steps = min(steps, max(1, short_side // SIDE_STEP))
    others = max(steps, round(steps * longer / shorter))
    high = steps if height <= width else others
    return (steps + others - high) * SIDE_STEP, high * SIDE_STEP


def _graph(form: Form, steps: list[tuple[str, str]]) -> Graph:
    graph = Graph()
    nodes = [graph.add(name, options or None) for name, options in [form.source_filter(), *steps, ("buffersink", "")]]
    graph.link_nodes(*nodes).configure()
    return graph


class FrameConverter:
    """Turns, scales and recolours frames to one size and pixel format, whatever form they come in."""

    def __init__(self, codec: Codec, short_side: int | None, pixel_aspect: Fraction | None):
        self.codec = codec
        self.pixel_aspect = pixel_aspect
        self.short_side = short_side
        # Decided by the first frame for all of them.
        self.pose: Pose | None = None
        self.size = (0, 0)
        self.shape = 1.0  # width over height
        self.form: Form | None = None
        self.graph: Graph | None = None

    def __call__(self, frame: VideoFrame) -> VideoFrame:
        """Raises UnusableError if the picture's shape changes in the middle of the video."""
        form = Form.of(frame)
        if form != self.form or self.graph is None:
            if self.pose is None:
                self.pose = Pose.of(frame, self.pixel_aspect)
                width, height = self.pose.shown_size(form.width, form.height)
                self.size, self.shape = stored_size(width, height, self.short_side), width / height
            self.graph = self._build(form, self.pose)
            self.form = form
        self.graph.push(frame)
        return self.graph.pull()  # type: ignore[return-value]

    def _build(self, form: Form, pose: Pose) -> Graph:
        width, height = pose.shown_size(form.width, form.height)
        if abs(width / height / self.shape - 1) > 0.05 and min(self.size) > 32:
            raise UnusableError("its picture changes shape in the middle")
        scale = {
            "w": self.size[0],
            "h": self.size[1],
            # bitexact: the same pixels on every processor
            "flags": "bicubic+accurate_rnd+full_chroma_int+bitexact",
            "out_color_matrix": "smpte170m",
            "out_range": "pc" if self.codec.full_range else "tv",
        }
        options = ":".join(f"{name}={value}" for name, value in scale.items())
        steps = [("scale", options), ("setsar", "1"), ("format", self.codec.pixel_format)]
        return _graph(form, [*pose.turn, *steps])


def deinterlace(frames: Iterator[tuple[int, VideoFrame]]) -> Iterator[tuple[int, VideoFrame]]:
    """Pass on (tick, frame); from the first interlaced frame on, through a deinterlacer that keeps the frame rate."""
    graph: Graph | None = None
    form: Form | None = None
    ticks: deque[int] = deque()
    for tick, frame in frames:
        if graph is not None and Form.of(frame) != form:
            yield from _rest(graph, ticks)
            graph = None
        if graph is None and not frame.interlaced_frame:
            yield tick, frame
            continue
        if graph is None:
            form = Form.of(frame)
            graph = _graph(form, [("bwdif", "mode=send_frame:deint=interlaced")])
        frame.pts, frame.time_base = tick, Fraction(1, 1000)
        ticks.append(tick)
        graph.push(frame)
        yield from _ready(graph, ticks)
    if graph is not None:
        yield from _rest(graph, ticks)


def _ready(graph: Graph, ticks: deque[int]) -> Iterator[tuple[int, VideoFrame]]:
    while True:
        try:
            frame = graph.pull()
        except (av.error.BlockingIOError, av.error.EOFError):
            return
        yield ticks.popleft(), frame  # type: ignore[misc]


def _rest(graph: Graph, ticks: deque[int]) -> Iterator[tuple[int, VideoFrame]]:
    graph.push(None)
    yield from _ready(graph, ticks)
