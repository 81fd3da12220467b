"""Turn a video's frames upright: what its display matrix and the shape of its pixels say."""

from fractions import Fraction
from typing import Any, cast

import numpy as np
from av.filter import Graph
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame

# A name and its options.
Filter = tuple[str, str]
# The first one swaps rows and columns.
FLIPS = (("transpose", "cclock_flip"), ("hflip", ""), ("vflip", ""))


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
    if FLIPS[0] in flips:
        return height, width
    return width, height


def find_flips(frame: VideoFrame) -> list[Filter]:
    """Return the filters that obey the frame's display matrix, for quarter turns only.

    `ffmpeg -autorotate` does the same. The matrix is read off the first frame: PyAV's side data
    keeps every frame that is asked for it in memory for long.
    """
    # PyAV cannot list side data of types that FFmpeg has got since: EXIF, the view of a stereo
    # pair.
    unknown = [
        ("sidedata", f"mode=delete:type={number}") for number in range(len(Type), len(Type) + 32)
    ]
    graph = build_graph(read_form(frame), unknown)
    graph.push(frame)
    data = cast(Any, graph.pull()).side_data.get(Type.DISPLAYMATRIX)
    if data is None:
        return []
    # Of the matrix's 3x3 numbers these are a, b, c, d: column x goes to a x + c y, row y to b x + d
    # y.
    signs = np.sign(np.frombuffer(bytes(data), np.int32)[[0, 1, 3, 4]]).reshape(2, 2)
    # At a quarter turn, each row and each column of the four has one number that is not 0.
    if any((np.abs(signs).sum(axis) != 1).any() for axis in (0, 1)):
        return []
    swaps_sides = signs[0, 0] == 0
    mirrors_x, mirrors_y = signs.sum(axis=0) < 0
    is_needed = (swaps_sides, mirrors_x, mirrors_y)
    return [flip for flip, needed in zip(FLIPS, is_needed, strict=True) if needed]


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
