"""Videos that are arrays of numbers: depth, thermal, multispectral data, which no codec takes.

They are NumPy's .npy files, uint8 [T, H, W, C], stored as they are. Each frame is a GOP of its own
(pipeline/shards/gops.py), so that a clip reads and checks its own frames alone; each channel is
scaled by itself.
"""

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from numpy.lib import format as npy

from adamae.common.errors import InputError
from adamae.pipeline.video_error import VideoError

CONTAINER = "npy"
MAGIC = b"\x93NUMPY"
# NumPy evaluates longer headers only if it is told to trust the file.
MAX_HEADER_BYTES = 10_000
MAX_CHANNELS = 12
# As many pixels as a video's picture may have.
MAX_FRAME_BYTES = 8192 * 4352 * MAX_CHANNELS
# An array does not tell its frame rate.
FPS = 25.0
Buffer = bytes | memoryview
Source = Buffer | Path


class Shape(NamedTuple):
    """What an array's header says."""

    # The first byte of the first frame.
    start: int
    num_frames: int
    height: int
    width: int
    channels: int

    @property
    def frame_bytes(self) -> int:
        """The number of bytes of a frame."""
        return self.height * self.width * self.channels


def is_array(source: Source) -> bool:
    """Return whether a file begins like an .npy file; a folder of pictures does not."""
    if isinstance(source, Path):
        if source.is_dir():
            return False
        with source.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    return bytes(source[: len(MAGIC)]) == MAGIC


def read_shape(data: Buffer) -> Shape:
    """Read the header at the beginning of `data`; raise VideoError if the array is no video."""
    file = io.BytesIO(bytes(data[: MAX_HEADER_BYTES + 16]))
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        read_header = readers[npy.read_magic(file)]
        shape, by_column, dtype = read_header(file, max_header_size=MAX_HEADER_BYTES)
    # NumPy's parser raises a dozen kinds of exceptions for damaged headers.
    except Exception as error:
        raise VideoError("it has no header of a NumPy array that can be read") from error
    if dtype != np.uint8 or len(shape) != 4 or by_column:
        order = ", its first axis the fastest" if by_column else ""
        raise VideoError(
            f"it is {dtype} of shape {shape}{order}: videos are uint8 of frames, height, width,"
            " channels"
        )
    parsed = Shape(file.tell(), *shape)
    is_too_large = parsed.channels > MAX_CHANNELS or parsed.frame_bytes > MAX_FRAME_BYTES
    if min(shape) < 1 or is_too_large:
        raise VideoError(
            f"its shape is {shape}: give at least a frame and a pixel, and 1 to {MAX_CHANNELS}"
            " channels"
        )
    return parsed


def map_frames(source: Source, num_frames: int | None = None) -> UInt8[np.ndarray, "T H W C"]:
    """Return all frames of a file, or of a slice of one that holds `num_frames`, without a copy.

    Raise VideoError if there are more or fewer bytes than these take.
    """
    data = np.memmap(source, np.uint8, "r").data if isinstance(source, Path) else source
    shape = read_shape(data)
    if num_frames is None:
        num_frames = shape.num_frames
    if len(data) != shape.start + num_frames * shape.frame_bytes:
        num_stored = (len(data) - shape.start) / shape.frame_bytes
        raise VideoError(
            f"the file is cut off or damaged: it holds {num_stored:.5g} of its {num_frames} frames"
        )
    frames = np.frombuffer(data, np.uint8, offset=shape.start)
    return frames.reshape(num_frames, shape.height, shape.width, shape.channels)


def read_array(
    source: Source, numbers: Sequence[int], num_frames: int | None = None
) -> UInt8[np.ndarray, "T H W C"]:
    """Copy the frames with these numbers, in this order; raise VideoError if one does not exist."""
    frames = map_frames(source, num_frames)
    if max(numbers) >= len(frames):
        raise VideoError(f"frame {max(numbers)} is wanted, and there are {len(frames)}")
    return frames[list(numbers)]


def codec_name(channels: int) -> str:
    """Return the codec of arrays in the tables of a dataset."""
    return f"uint8x{channels}"


def count_channels(codecs: Iterable[str]) -> int:
    """Return the channels of clips of videos with these codecs: 3 unless they are arrays.

    Raise InputError if they differ.
    """
    channels = {_count_channels(codec) for codec in codecs} or {3}
    *others, last = sorted(channels)
    if others:
        raise InputError(
            f"data.shards holds clips of {', '.join(map(str, others))} and {last} channels, which"
            " no model takes together: name datasets of one kind"
        )
    return last


def _count_channels(codec: str) -> int:
    array = re.fullmatch("uint8x([1-9]|1[0-2])", codec)
    return int(array[1]) if array else 3


def to_rgb(frames: UInt8[np.ndarray, "... C"]) -> UInt8[np.ndarray, "... 3"]:
    """Return the first three channels as red, green and blue; of fewer, the first one as gray."""
    if frames.shape[-1] >= 3:
        return frames[..., :3]
    return np.repeat(frames[..., :1], 3, axis=-1)
