"""Decoded frames for the device, which crops and scales them: their planes, as far as clips show them."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from av.video.frame import VideoFrame
from jaxtyping import UInt8

from adamae.pipeline.clip_memory import MAX_GROWTH
from adamae.pipeline.decoding.colors import describe, find_matrix, find_siting, is_full_range
from adamae.pipeline.decoding.video import count_turns
from adamae.pipeline.planning.crops import Crop, FrameSize

BITS = {"yuv420p": 8, "yuvj420p": 8, "yuv420p10le": 10, "yuv420p12le": 12}

# Where in a block of memory so many bytes begin, and the bytes; None if there are not so many.
Allocate = Callable[[int], tuple[int, UInt8[np.ndarray, " bytes"]] | None]


class Layout(NamedTuple):
    """How samples of planar 4:2:0 are to be read."""

    matrix: str
    full_range: bool
    siting: str
    bits: int

    @property
    def sample_bytes(self) -> int:
        return 1 if self.bits == 8 else 2

    @classmethod
    def find(cls, frame: VideoFrame) -> "Layout | None":
        """Return None for other formats, and for frames that are not upright."""
        bits = BITS.get(frame.format.name)
        if bits is None or count_turns(frame):
            return None
        return cls(find_matrix(frame), is_full_range(frame), find_siting(frame), bits)


class PlanarFrames(NamedTuple):
    """A window of the frames of a video, in the block of a batch, laid out as kernels.crop_resize takes them."""

    offsets: list[int]  # of each frame of a clip
    window: Crop
    layout: Layout
    num_decoded: int = 0


def find_window(crops: Sequence[Crop], width: int, height: int) -> Crop:
    """Return the smallest part of a frame of whole chroma samples that holds all crops."""
    left, top = min(crop.x for crop in crops) // 2 * 2, min(crop.y for crop in crops) // 2 * 2
    right, bottom = (
        max(crop.x + crop.width for crop in crops),
        max(crop.y + crop.height for crop in crops),
    )
    return Crop(
        left, top, min(right + right % 2, width) - left, min(bottom + bottom % 2, height) - top
    )


def is_worth_uploading(window: Crop, num_clips: int, size: FrameSize) -> bool:
    """Return whether frames of a window, of 8 bits, are not much larger than the clips that are made of them."""
    return (
        window.width * window.height * 3 // 2
        <= MAX_GROWTH * num_clips * size.height * size.width * 3
    )


def copy_frames(
    frames: Iterable[tuple[int, VideoFrame]],
    numbers: Sequence[int],
    window: Crop,
    stored: tuple[int, int],
    allocate: Allocate,
) -> PlanarFrames | None:
    """Copy a window of the frames with these numbers, each once; None if they are not upright 4:2:0, all alike, or if
    there is no room.

    stored: width and height that the frames must have.
    """
    places = {number: place for place, number in enumerate(sorted(set(numbers)))}
    layout, known = None, None
    for number, frame in frames:
        if layout is None:
            layout, known = Layout.find(frame), describe(frame)
            if layout is None or (frame.width, frame.height) != stored:
                return None
            chroma = (window.height + 1) // 2, (window.width + 1) // 2
            sizes = (window.height, window.width), chroma, chroma
            shapes = [(rows, columns * layout.sample_bytes) for rows, columns in sizes]
            ends = list(accumulate(rows * width for rows, width in shapes))
            length = ends[-1]
            if (room := allocate(len(places) * length)) is None:
                return None
            start, memory = room
            planes = np.split(memory.reshape(len(places), length), ends[:-1], axis=1)
            targets = [
                plane.reshape(-1, *shape) for plane, shape in zip(planes, shapes, strict=True)
            ]
        elif describe(frame) != known:
            return None
        for plane, target, step in zip(frame.planes, targets, (1, 2, 2), strict=True):
            first = window.y // step * plane.line_size + window.x // step * layout.sample_bytes
            copy = target[places[number]]
            copy[:] = np.ndarray(
                copy.shape, np.uint8, memoryview(plane), first, (plane.line_size, 1)
            )
    assert layout is not None
    return PlanarFrames([start + places[number] * length for number in numbers], window, layout)
