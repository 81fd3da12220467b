"""Videos that are arrays of numbers, for what no video codec takes: depth, heat, many bands of light.

They are NumPy's .npy files, uint8 [T, H, W, C], stored as they came. Each frame is a group of its own
(pipeline/shards/gops.py), so a clip reads and checks its own frames alone; each channel is scaled by itself.
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
MOST_HEADER_BYTES = 10_000  # that NumPy parses without being told that it may
MOST_CHANNELS = 12
MOST_FRAME_BYTES = 8192 * 4352 * MOST_CHANNELS  # as many pixels as a video's picture may have
FPS = 25.0  # taken for granted: an array does not say
Buffer = bytes | memoryview
Source = Buffer | Path


class Shape(NamedTuple):
    """What an array's header says."""

    start: int  # byte at which the first frame begins
    num_frames: int
    height: int
    width: int
    channels: int

    @property
    def frame_bytes(self) -> int:
        return self.height * self.width * self.channels


def is_array(source: Source) -> bool:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    return bytes(source[: len(MAGIC)]) == MAGIC


def read_shape(data: Buffer) -> Shape:
    """The header at the beginning of `data`. Raises VideoError if it is none of an array that can be a video."""
    file = io.BytesIO(bytes(data[: MOST_HEADER_BYTES + 16]))
    try:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, by_column, dtype = read(file, max_header_size=MOST_HEADER_BYTES)
    except Exception as error:  # NumPy's parser of damaged headers raises a dozen kinds
        raise VideoError("it has no header of a NumPy array that can be read") from error
    if dtype != np.uint8 or len(shape) != 4 or by_column:
        order = ", its first axis the fastest" if by_column else ""
        raise VideoError(
            f"it is {dtype} of shape {shape}{order}: videos are uint8 of frames, height, width, channels"
        )
    found = Shape(file.tell(), *shape)
    if min(shape) < 1 or found.channels > MOST_CHANNELS or found.frame_bytes > MOST_FRAME_BYTES:
        raise VideoError(
            f"its shape is {shape}: give at least a frame and a pixel, and 1 to {MOST_CHANNELS} channels"
        )
    return found


def map_frames(source: Source, num_frames: int | None = None) -> UInt8[np.ndarray, "T H W C"]:
    """All frames of a file, or of a cut of one that holds `num_frames` of them; a view of the bytes.

    Raises VideoError if there are more or fewer bytes than these take.
    """
    data = np.memmap(source, np.uint8, "r").data if isinstance(source, Path) else source
    shape = read_shape(data)
    count = shape.num_frames if num_frames is None else num_frames
    if len(data) != shape.start + count * shape.frame_bytes:
        found = (len(data) - shape.start) / shape.frame_bytes
        raise VideoError(
            f"the file is cut off or damaged: it holds {found:.5g} of its {count} frames"
        )
    return np.frombuffer(data, np.uint8, offset=shape.start).reshape(count, *shape[2:])


def read_array(
    source: Source, numbers: Sequence[int], num_frames: int | None = None
) -> UInt8[np.ndarray, "T H W C"]:
    """The frames with these numbers, in the order given. Raises VideoError if there are none such."""
    frames = map_frames(source, num_frames)
    if max(numbers) >= len(frames):
        raise VideoError(f"frame {max(numbers)} is wanted, and there are {len(frames)}")
    return frames[list(numbers)]


def codec_name(channels: int) -> str:
    """What the tables of a dataset call an array's codec."""
    return f"uint8x{channels}"


def count_channels(codecs: Iterable[str]) -> int:
    """Channels of the clips of videos with these codecs: 3 of all but arrays. Raises InputError if they differ."""
    arrays = [re.fullmatch("uint8x([1-9]|1[0-2])", codec) for codec in codecs]
    found = sorted({int(array[1]) if array else 3 for array in arrays}) or [3]
    if len(found) > 1:
        raise InputError(
            f"data.shards holds clips of {', '.join(map(str, found[:-1]))} and {found[-1]} channels, which no"
            " model takes together: name datasets of one kind"
        )
    return found[0]


def to_rgb(frames: UInt8[np.ndarray, "... C"]) -> UInt8[np.ndarray, "... 3"]:
    """For people: the first three channels as red, green and blue; of fewer, the first as gray."""
    return frames[..., :3] if frames.shape[-1] >= 3 else np.repeat(frames[..., :1], 3, axis=-1)
