"""Copy decoded planes for the device, which crops and scales them: as far as clips show them."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from av.video.frame import VideoFrame
from jaxtyping import UInt8

from adamae.common.arithmetic import round_up
from adamae.pipeline.clip_memory import MAX_GROWTH
from adamae.pipeline.decoding.colors import describe, find_matrix, find_siting, is_full_range
from adamae.pipeline.decoding.video import count_turns
from adamae.pipeline.planning.crops import Crop, FrameSize

# Of the formats of planar 4:2:0, which are what videos are stored in almost without exception.
BITS = {"yuv420p": 8, "yuvj420p": 8, "yuv420p10le": 10, "yuv420p12le": 12}
# Pixels of luma to a sample of each plane: Y, U, V.
SUBSAMPLING = (1, 2, 2)

# Takes a number of bytes; returns where in a block of memory they begin, and the bytes, or None if
# there are not so many.
Allocate = Callable[[int], tuple[int, UInt8[np.ndarray, " bytes"]] | None]


class Layout(NamedTuple):
    """How samples of planar 4:2:0 are to be read."""

    # As color_matrix takes it.
    matrix: str
    full_range: bool
    # A key of CHROMA_OFFSETS.
    siting: str
    bits: int

    @property
    def sample_bytes(self) -> int:
        """Return how many bytes hold a sample."""
        return 1 if self.bits == 8 else 2

    @classmethod
    def find(cls, frame: VideoFrame) -> "Layout | None":
        """Return None for other formats, and for frames that are not upright."""
        bits = BITS.get(frame.format.name)
        if bits is None or count_turns(frame) != 0:
            return None
        return cls(find_matrix(frame), is_full_range(frame), find_siting(frame), bits)


class PlanarFrames(NamedTuple):
    """A window of a video's frames in a block, laid out as kernels.crop_resize takes them."""

    # The byte of the block at which each frame begins.
    offsets: list[int]
    window: Crop
    layout: Layout
    num_decoded: int = 0


def find_window(crops: Sequence[Crop], width: int, height: int) -> Crop:
    """Return the smallest part of a frame of whole chroma samples that holds all crops.

    A sample of chroma is two pixels wide and high, so the window's edges are even, or the frame's.
    Crops from x = 3 to 20 and from x = 11 to 31 in a frame 31 pixels wide are in the window from 2
    to 31.
    """
    left = width
    top = height
    right = 0
    bottom = 0
    for crop in crops:
        left = min(left, crop.x)
        top = min(top, crop.y)
        right = max(right, crop.x + crop.width)
        bottom = max(bottom, crop.y + crop.height)
    left -= left % 2
    top -= top % 2
    right = min(round_up(right, 2), width)
    bottom = min(round_up(bottom, 2), height)
    return Crop(left, top, right - left, bottom - top)


def is_worth_uploading(window: Crop, num_frames: int, num_images: int, size: FrameSize) -> bool:
    """Return whether a window of frames is not much larger than the images that are made of them.

    num_images: of all clips together, which may share frames. Samples are taken to have 8 bits.
    """
    # 4:2:0 has a byte and a half per pixel, RGB has three.
    planes_bytes = num_frames * window.width * window.height * 3 // 2
    clips_bytes = num_images * size.height * size.width * 3
    return planes_bytes <= MAX_GROWTH * clips_bytes


class _Target(NamedTuple):
    """Memory for a window of a video's frames."""

    # The byte of the block at which the first frame begins, and the bytes of each.
    start: int
    frame_bytes: int
    # A view of the memory for each of Y, U and V: of all frames, in rows of bytes.
    planes: list[UInt8[np.ndarray, "frames rows bytes"]]

    @classmethod
    def allocate(
        cls, num_frames: int, window: Crop, layout: Layout, allocate: Allocate
    ) -> "_Target | None":
        """Return None if there is not enough memory."""
        shapes = []
        for step in SUBSAMPLING:
            rows = round_up(window.height, step) // step
            columns = round_up(window.width, step) // step
            shapes.append((rows, columns * layout.sample_bytes))
        # Where each plane ends in its frame, which has the three one behind the other.
        ends = list(accumulate(rows * row_bytes for rows, row_bytes in shapes))
        frame_bytes = ends[-1]
        allocated = allocate(num_frames * frame_bytes)
        if allocated is None:
            return None
        start, memory = allocated
        parts = np.split(memory.reshape(num_frames, frame_bytes), ends[:-1], axis=1)
        planes = []
        for part, (rows, row_bytes) in zip(parts, shapes, strict=True):
            planes.append(part.reshape(num_frames, rows, row_bytes))
        return cls(start, frame_bytes, planes)


def copy_frames(
    frames: Iterable[tuple[int, VideoFrame]],
    numbers: Sequence[int],
    window: Crop,
    stored: tuple[int, int],
    allocate: Allocate,
) -> PlanarFrames | None:
    """Copy a window of the frames with these numbers, which ascend.

    `stored` are the width and height that the frames must have. Return None if they have others,
    are not upright 4:2:0, differ from each other, or if there is no room.
    """
    layout: Layout | None = None
    for index, (_, frame) in enumerate(frames):
        if layout is None:
            layout = Layout.find(frame)
            description = describe(frame)
            if layout is None or (frame.width, frame.height) != stored:
                return None
            allocated = _Target.allocate(len(numbers), window, layout, allocate)
            if allocated is None:
                return None
            target = allocated
        elif describe(frame) != description:
            # Some streams change size or colors midway.
            return None
        for plane, copies, step in zip(frame.planes, target.planes, SUBSAMPLING, strict=True):
            copy = copies[index]
            # A view of the window's rows in the decoder's memory, whose rows are longer. One array
            # a plane: slices of a view of the whole plane would take the GIL longer.
            first = window.y // step * plane.line_size + window.x // step * layout.sample_bytes
            strides = (plane.line_size, 1)
            copy[:] = np.ndarray(copy.shape, np.uint8, memoryview(plane), first, strides)
    assert layout is not None
    offsets = [target.start + index * target.frame_bytes for index in range(len(numbers))]
    return PlanarFrames(offsets, window, layout)
