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

from shard_tools.codecs import Codec

BT601 = 6  # AVCOL_SPC_SMPTE170M
LIMITED, FULL = 1, 2  # AVCOL_RANGE_MPEG, AVCOL_RANGE_JPEG
MAX_PIXELS = 8192 * 8192


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
    pixel_aspect: Fraction
    turn: tuple[str, ...]  # filters that bring it upright

    @classmethod
    def of(cls, frame: VideoFrame, pixel_aspect: Fraction | None = None) -> "Form":
        """The form of a frame whose stream's pixels are `pixel_aspect` times as wide as high."""
        aspect = pixel_aspect or Fraction(1)
        if not Fraction(1, 8) < aspect < 8:
            aspect = Fraction(1)  # nonsense in the header
        return cls(
            frame.width,
            frame.height,
            frame.format.name,
            int(frame.color_range),
            int(frame.colorspace),
            aspect,
            _turn(frame),
        )

    def shown_size(self) -> tuple[float, float]:
        """Width and height in square pixels, upright."""
        width, height = float(self.width * self.pixel_aspect), float(self.height)
        sideways = any(step.startswith("transpose") for step in self.turn)
        return (height, width) if sideways else (width, height)

    def source_filter(self) -> tuple[str, str]:
        fields = {
            "video_size": f"{self.width}x{self.height}",
            "pix_fmt": self.pixel_format,
            "time_base": "1/1000",
            "colorspace": self.color_matrix,
            "range": self.color_range,
        }
        return "buffer", ":".join(f"{name}={value}" for name, value in fields.items())


def _turn(frame: VideoFrame) -> tuple[str, ...]:
    """The filters that obey the frame's display matrix, like `ffmpeg -autorotate`; angles between are left alone."""
    data = cast(Any, frame.side_data).get(Type.DISPLAYMATRIX)
    if data is None:
        return ()
    # Column x to a x + c y, row y to b x + d y.
    a, b, _, c, d = np.frombuffer(bytes(data), np.int32)[:5].tolist()
    if a == d == 0 and b and c:
        direction = {(True, True): "cclock_flip", (True, False): "clock", (False, True): "cclock"}
        return (f"transpose={direction.get((b > 0, c > 0), 'clock_flip')}",)
    if b == c == 0:
        return tuple(name for name, value in (("hflip", a), ("vflip", d)) if value < 0)
    return ()


def stored_size(form: Form, short_side: int | None) -> tuple[int, int]:
    """Even width and height to store: the shorter side at most `short_side` pixels, never scaled up."""
    width, height = form.shown_size()
    scale = min(1.0, short_side / min(width, height)) if short_side else 1.0
    return max(2, round(width * scale / 2) * 2), max(2, round(height * scale / 2) * 2)


def _graph(form: Form, steps: list[tuple[str, str]]) -> Graph:
    graph = Graph()
    nodes = [graph.add(name, options or None) for name, options in [form.source_filter(), *steps, ("buffersink", "")]]
    graph.link_nodes(*nodes).configure()
    return graph


class Converter:
    """Turns, scales and recolours frames to one size and pixel format, whatever form they come in."""

    def __init__(self, codec: Codec, short_side: int | None, pixel_aspect: Fraction | None):
        self.codec = codec
        self.pixel_aspect = pixel_aspect
        self.short_side = short_side
        self.size: tuple[int, int] | None = None  # (width, height) of all frames, decided by the first
        self.form: Form | None = None
        self.graph: Graph | None = None

    def __call__(self, frame: VideoFrame) -> VideoFrame:
        """Raises UnusableError if the picture's shape changes in the middle of the video."""
        form = Form.of(frame, self.pixel_aspect)
        if form != self.form or self.graph is None:
            self.graph = self._build(form)
            self.form = form
        self.graph.push(frame)
        return self.graph.pull()  # type: ignore[return-value]

    def _build(self, form: Form) -> Graph:
        if form.width * form.height > MAX_PIXELS:
            raise UnusableError(f"its pictures of {form.width}x{form.height} pixels are larger than any real video's")
        if self.size is None:
            self.size = stored_size(form, self.short_side)
        width, height = form.shown_size()
        if abs(width / height / (self.size[0] / self.size[1]) - 1) > 0.05 and min(self.size) > 32:
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
        turns = [tuple((step + "=").split("=")[:2]) for step in form.turn]
        steps = [("scale", options), ("setsar", "1"), ("format", self.codec.pixel_format)]
        return _graph(form, [*turns, *steps] if turns else steps)  # type: ignore[list-item]


def deinterlaced(frames: Iterator[tuple[int, VideoFrame]]) -> Iterator[tuple[int, VideoFrame]]:
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
