"""Groups of pictures (GOPs) of fragmented MP4, and videos put together from a few of them.

Each fragment (pipeline/shards/mp4.py) of a stored MP4 is a closed GOP. So the bytes before the
first fragment, and any fragments after them, are a complete video: only the GOPs that hold a clip's
frames are read and decoded. The GOP table has a row for these first bytes, the header, and one for
every GOP; a GOP ends where the next one begins, the last one with the video. Of an array
(pipeline/shards/arrays.py), every frame is a GOP.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from adamae.pipeline.shards.arrays import Buffer
from adamae.pipeline.video_error import VideoError

GOP = np.dtype(
    [
        # The GOP's first frame in its video; 0 for the header.
        ("first_frame", "<u4"),
        # The GOP's first byte in its video.
        ("offset", "<u4"),
        ("checksum", "<u8"),
    ]
)
# Rows of GOP.
Rows = Shaped[np.ndarray, " rows"]


class VideoSlice(NamedTuple):
    """A complete video that was cut out of another one, for some of its frames."""

    data: bytes
    # Of the frames that it was cut out for, numbered as in `data`.
    numbers: tuple[int, ...]
    # In `data`.
    num_frames: int
    # Whether it was put together from GOPs; otherwise it is all of the other video.
    in_groups: bool = False


@dataclass(frozen=True)
class GopIndex:
    """The GOPs of one video of `size` bytes and `num_frames` frames."""

    rows: Rows
    size: int
    num_frames: int

    def slice_video(self, frames: Sequence[int], read: Callable[[int, int], bytes]) -> VideoSlice:
        """Cut out the GOPs that hold these frames; `read(offset, size)` returns bytes of the video.

        Raise VideoError if the rows are broken, or the bytes are not those that they were made of.

        For example, of GOPs of 8 frames, the frames 17 to 30 need the third and fourth, of 16
        frames. There they are numbered from 1 to 14.
        """
        offsets, first_frames = self._find_starts()
        if not 0 <= min(frames) <= max(frames) < self.num_frames:
            raise VideoError(
                f"frames {min(frames)} to {max(frames)} are wanted of {self.num_frames}"
            )
        # Row 0 is the header, so GOPs count from 1.
        row_of_frame = np.searchsorted(first_frames[1:-1], frames, side="right")
        # A set, as np.unique takes .4 ms for so few.
        rows = np.array(sorted({0, *row_of_frame.tolist()}))
        run_starts = np.flatnonzero(np.diff(rows) > 1) + 1
        runs = np.split(rows, run_starts)
        data = b"".join(self._read(run, offsets, read) for run in runs)
        num_frames = np.diff(first_frames)[rows]
        starts_in_slice = np.cumsum(num_frames) - num_frames
        index_in_gop = np.asarray(frames) - first_frames[row_of_frame]
        index_in_slice = np.searchsorted(rows, row_of_frame)
        numbers = starts_in_slice[index_in_slice] + index_in_gop
        return VideoSlice(data, tuple(numbers.tolist()), int(num_frames.sum()), in_groups=True)

    def _find_starts(self) -> tuple[Int[np.ndarray, " starts"], Int[np.ndarray, " starts"]]:
        """Return the first byte and the first frame of each row, and the ends of the last one."""
        offsets = np.append(self.rows["offset"].astype(np.int64), self.size)
        first_frames = np.append(self.rows["first_frame"].astype(np.int64), self.num_frames)
        if len(self.rows) < 2 or not _are_consistent(offsets, first_frames):
            raise VideoError("its rows of the group table are broken")
        return offsets, first_frames

    def _read(
        self, run: np.ndarray, offsets: np.ndarray, read: Callable[[int, int], bytes]
    ) -> bytes:
        """Read consecutive rows at once, and compare each with its checksum."""
        start = int(offsets[run[0]])
        end = int(offsets[run[-1] + 1])
        data = read(start, end - start)
        if len(data) < end - start:
            raise VideoError(
                f"the shard ends after {len(data)} of {end - start} bytes of the video's groups"
            )
        view = memoryview(data)
        for row in run.tolist():
            content = view[offsets[row] - start : offsets[row + 1] - start]
            first_frame = int(self.rows["first_frame"][row])
            if checksum(first_frame, content) != self.rows["checksum"][row]:
                raise VideoError(
                    f"group {row} has changed since the shard was made (its checksum differs)"
                )
        return data


def _are_consistent(offsets: np.ndarray, first_frames: np.ndarray) -> bool:
    """Return whether the rows are a header without frames, and GOPs with bytes and frames."""
    if offsets[0] != 0 or first_frames[0] != 0:
        return False
    num_bytes = np.diff(offsets)
    num_frames = np.diff(first_frames)
    return bool(num_bytes.min() > 0 and num_frames[0] == 0 and num_frames[1:].min() > 0)


def checksum(first_frame: int, data: Buffer) -> int:
    """Return the first 8 bytes, little endian, of the SHA-256 of a row's first frame and bytes.

    The frame number is hashed as 32 bits, little endian.
    """
    digest = hashlib.sha256(struct.pack("<I", first_frame))
    digest.update(data)
    return int.from_bytes(digest.digest()[:8], "little")
