"""Groups of pictures of fragmented MP4, and videos put together of a few of them.

Each fragment (pipeline/shards/mp4.py) of a stored MP4 is a group of pictures that needs no other. So the bytes before
the first fragment, and any fragments after them, are a whole video: what a clip needs is read and decoded, not what
lies before it. The group table has a row for these first bytes and one for every group; a group ends where the next one
begins, the last one with the video. Of arrays (pipeline/shards/arrays.py) every frame is a group.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from adamae.pipeline.shards.arrays import Buffer
from adamae.pipeline.video_error import VideoError

GOP = np.dtype(
    [
        ("first_frame", "<u4"),  # of the group in its video; 0 for the bytes before the first group
        ("offset", "<u4"),  # in the video
        ("checksum", "<u8"),  # see `checksum`
    ]
)
Rows = Shaped[np.ndarray, " rows"]  # of GOP


class VideoSlice(NamedTuple):
    """A video of its own that holds what is wanted of another one."""

    data: bytes
    numbers: tuple[int, ...]  # of the wanted frames in it
    num_frames: int  # that it holds
    in_groups: bool = False  # whether it consists of rows of the group table


@dataclass(frozen=True)
class GopIndex:
    """The groups of one video of `size` bytes and `num_frames` frames."""

    rows: Rows
    size: int
    num_frames: int

    def slice_video(self, wanted: Sequence[int], read: Callable[[int, int], bytes]) -> VideoSlice:
        """Cut out the groups that hold the frames `wanted`; `read(offset, size)` gives bytes of the video.

        Raises VideoError if the table is broken, or the bytes are not those that it was made of.
        """
        offsets, firsts = self._find_starts()
        if not 0 <= min(wanted) <= max(wanted) < self.num_frames:
            raise VideoError(
                f"frames {min(wanted)} to {max(wanted)} are wanted of {self.num_frames}"
            )
        group_of = np.searchsorted(
            firsts[1:-1], wanted, side="right"
        )  # 0: the bytes before the first one
        chosen = np.array(sorted({0, *group_of.tolist()}))  # so few: np.unique takes .4 ms
        data = b"".join(
            self._read(run, offsets, read)
            for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
        )
        frames = np.diff(firsts)[chosen]
        before = np.cumsum(frames) - frames  # frames of the chosen groups before each
        numbers = np.asarray(wanted) - firsts[group_of] + before[np.searchsorted(chosen, group_of)]
        return VideoSlice(data, tuple(numbers.tolist()), int(frames.sum()), in_groups=True)

    def _find_starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where each row begins, in bytes and in frames, and the last one ends."""
        offsets = np.append(self.rows["offset"].astype(np.int64), self.size)
        firsts = np.append(self.rows["first_frame"].astype(np.int64), self.num_frames)
        fits = len(self.rows) > 1 and offsets[0] == 0 and firsts[0] == firsts[1] == 0
        if not fits or (np.diff(offsets) <= 0).any() or (np.diff(firsts[1:]) <= 0).any():
            raise VideoError("its rows of the group table are broken")
        return offsets, firsts

    def _read(
        self, run: np.ndarray, offsets: np.ndarray, read: Callable[[int, int], bytes]
    ) -> bytes:
        """Read and check groups that follow each other."""
        start, end = int(offsets[run[0]]), int(offsets[run[-1] + 1])
        data = read(start, end - start)
        if len(data) < end - start:
            raise VideoError(
                f"the shard ends after {len(data)} of {end - start} bytes of the video's groups"
            )
        view = memoryview(data)
        for number in run.tolist():
            group = view[offsets[number] - start : offsets[number + 1] - start]
            if (
                checksum(int(self.rows["first_frame"][number]), group)
                != self.rows["checksum"][number]
            ):
                raise VideoError(
                    f"group {number} has changed since the shard was made (its checksum differs)"
                )
        return data


def checksum(first_frame: int, data: Buffer) -> int:
    """First 8 bytes of the SHA-256 of a group's number of its first frame (32 bits, little endian) and its bytes."""
    digest = hashlib.sha256(struct.pack("<I", first_frame))
    digest.update(data)
    return int.from_bytes(digest.digest()[:8], "little")
