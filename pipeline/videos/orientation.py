"""Turn a video's frames upright: what its display matrix and the shape of its pixels say."""

from fractions import Fraction
from typing import Any, cast

import numpy as np
from av.filter import Graph
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame

# A name and its options.
Filter = tuple[str, str]
# Swaps rows and columns.
TRANSPOSE = ("transpose", "cclock_flip")
HFLIP = ("hflip", "")
VFLIP = ("vflip", "")


def display_size(
    frame: VideoFrame, pixel_aspect: Fraction | None, flips: list[Filter]
) -> tuple[float, float]:
    """Return width and height of a picture, upright and in square pixels.

    `pixel_aspect` is the width of a pixel over its height; beyond 1:8 and 8:1 it is taken for an
    error.
    """
    width = float(frame.width)
    if pixel_aspect is not None and Fraction(1, 8) < pixel_aspect < 8:
        width = float(frame.width * pixel_aspect)
    height = float(frame.height)
    if TRANSPOSE in flips:
        return height, width
    return width, height


def find_flips(frame: VideoFrame) -> list[Filter]:
    """Return the filters that obey the frame's display matrix, for quarter turns only.

    `ffmpeg -autorotate` does the same. The matrix is read off the first frame: PyAV's side data
    keeps every frame that is asked for it in memory for long.
    """
    # PyAV cannot list side data of types that FFmpeg has got since: EXIF, the view of a stereo
    # pair. So these are removed first.
    newer_types = range(len(Type), len(Type) + 32)
    unknown = [("sidedata", f"mode=delete:type={number}") for number in newer_types]
    graph = build_graph(read_form(frame), unknown)
    graph.push(frame)
    data = cast(Any, graph.pull()).side_data.get(Type.DISPLAYMATRIX)
    if data is None:
        return []
    matrix = np.frombuffer(bytes(data), np.int32, count=9).reshape(3, 3)
    # With a, b in the first row and c, d in the second, the pixel at (x, y) is shown at
    # (a x + c y, b x + d y).
    signs = np.sign(matrix[:2, :2])
    # At a quarter turn, each row and each column of the four has one number that is not 0.
    is_nonzero = np.abs(signs)
    if (is_nonzero.sum(axis=0) != 1).any() or (is_nonzero.sum(axis=1) != 1).any():
        return []
    mirrors_x, mirrors_y = signs.sum(axis=0) < 0
    flips = []
    if signs[0, 0] == 0:
        flips.append(TRANSPOSE)
    if mirrors_x:
        flips.append(HFLIP)
    if mirrors_y:
        flips.append(VFLIP)
    return flips


def read_form(frame: VideoFrame) -> dict[str, Any]:
    """Return what decides how a frame must be converted, as options of FFmpeg's buffer filter."""
    return {
        "video_size": f"{frame.width}x{frame.height}",
        "pix_fmt": frame.format.name,
        "time_base": "1/1000",
        "colorspace": int(frame.colorspace),
        "range": int(frame.color_range),
    }


def build_graph(form: dict[str, Any], filters: list[Filter]) -> Graph:
    """Return FFmpeg's graph that takes frames of a form through filters, one after the other."""
    graph = Graph()
    source = "buffer", ":".join(f"{name}={value}" for name, value in form.items())
    nodes = [
        graph.add(name, options or None) for name, options in [source, *filters, ("buffersink", "")]
    ]
    graph.link_nodes(*nodes).configure()
    return graph
