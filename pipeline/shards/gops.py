"""Groups of pictures of fragmented MP4, and videos put together of a few of them.

Each fragment (boxes `moof` and `mdat`) of a stored MP4 is a group of pictures that needs no other. So the bytes before
the first fragment, and any fragments after them, are a whole video: what a clip needs is read and decoded, not what
lies before it. The group table has a row for these first bytes and one for every group; a group ends where the next one
begins, the last one with the video. Of arrays (pipeline/shards/arrays.py) every frame is a group.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from pipeline.shards.arrays import is_array, map_frames, read_shape
from pipeline.video_error import VideoError

GOP = np.dtype(
    [
        ("first_frame", "<u4"),  # of the group in its video; 0 for the bytes before the first group
        ("offset", "<u4"),  # in the video
        ("checksum", "<u8"),  # see `checksum`
    ]
)
Rows = Shaped[np.ndarray, " rows"]  # of GOP
Buffer = bytes | memoryview

NOT_A_KEY_FRAME = 0x10000  # sample_is_non_sync_sample among the flags of ISO/IEC 14496-12, 8.8.3.1
# What stands in tfhd before the default flags, by the bit that says so, in bytes (8.8.7).
BEFORE_DEFAULT_FLAGS = {0x1: 8, 0x2: 4, 0x8: 4, 0x10: 4}


class VideoSlice(NamedTuple):
    """A video of its own that holds what is wanted of another one."""

    data: bytes
    numbers: tuple[int, ...]  # of the wanted frames in it
    num_frames: int  # that it holds


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
        offsets, firsts = self._checked()
        if not 0 <= min(wanted) <= max(wanted) < self.num_frames:
            raise VideoError(f"frames {min(wanted)} to {max(wanted)} are wanted of {self.num_frames}")
        group_of = np.searchsorted(firsts[1:-1], wanted, side="right")  # 0: the bytes before the first one
        chosen = np.array(sorted({0, *group_of.tolist()}))  # so few: np.unique takes .4 ms
        data = b"".join(
            self._read(run, offsets, read) for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
        )
        frames = np.diff(firsts)[chosen]
        before = np.cumsum(frames) - frames  # frames of the chosen groups before each
        numbers = np.asarray(wanted) - firsts[group_of] + before[np.searchsorted(chosen, group_of)]
        return VideoSlice(data, tuple(numbers.tolist()), int(frames.sum()))

    def _checked(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where each row begins, in bytes and in frames, and the last one ends."""
        offsets = np.append(self.rows["offset"].astype(np.int64), self.size)
        firsts = np.append(self.rows["first_frame"].astype(np.int64), self.num_frames)
        fits = len(self.rows) > 1 and offsets[0] == 0 and firsts[0] == firsts[1] == 0
        if not fits or (np.diff(offsets) <= 0).any() or (np.diff(firsts[1:]) <= 0).any():
            raise VideoError("its rows of the group table are broken")
        return offsets, firsts

    def _read(self, run: np.ndarray, offsets: np.ndarray, read: Callable[[int, int], bytes]) -> bytes:
        """Read and check groups that follow each other."""
        start, end = int(offsets[run[0]]), int(offsets[run[-1] + 1])
        data = read(start, end - start)
        if len(data) < end - start:
            raise VideoError(f"the shard ends after {len(data)} of {end - start} bytes of the video's groups")
        view = memoryview(data)
        for number in run.tolist():
            group = view[offsets[number] - start : offsets[number + 1] - start]
            if checksum(int(self.rows["first_frame"][number]), group) != self.rows["checksum"][number]:
                raise VideoError(f"group {number} has changed since the shard was made (its checksum differs)")
        return data


def checksum(first_frame: int, data: Buffer) -> int:
    """First 8 bytes of the SHA-256 of a group's number of its first frame (32 bits, little endian) and its bytes."""
    digest = hashlib.sha256(struct.pack("<I", first_frame))
    digest.update(data)
    return int.from_bytes(digest.digest()[:8], "little")


def index_gops(data: Buffer, num_frames: int) -> Rows:
    """Make the rows of a video, none if it is not fragmented MP4, or its fragments need each other to be decoded."""
    try:
        if is_array(data):
            shape = read_shape(data)
            starts = [(shape.start + number * shape.frame_bytes, 1) for number in range(len(map_frames(data)))]
        else:
            starts = list(_fragments(data))
    except (struct.error, ValueError, VideoError):
        return np.empty(0, GOP)
    if not starts or sum(frames for _, frames in starts) != num_frames or len(data) >= 2**32:
        return np.empty(0, GOP)
    offsets = [0, *(offset for offset, _ in starts), len(data)]
    firsts = np.cumsum([0, 0, *(frames for _, frames in starts[:-1])]).tolist()
    rows = [
        (first, start, checksum(first, data[start:end]))
        for first, start, end in zip(firsts, offsets[:-1], offsets[1:], strict=True)
    ]
    return np.array(rows, GOP)


def _fragments(data: Buffer) -> Iterator[tuple[int, int]]:
    """(offset, frames) of every fragment; raises ValueError if one does not begin with a key frame or is not whole."""
    kinds = [*_boxes(data, 0, len(data))]
    first = next((place for place, (kind, _, _) in enumerate(kinds) if kind == b"moof"), len(kinds))
    if b"moov" not in (kind for kind, _, _ in kinds[:first]) or len(kinds[first:]) % 2:
        raise ValueError("no fragments")
    for (moof, start, end), (mdat, _, _) in zip(kinds[first::2], kinds[first + 1 :: 2], strict=True):
        if (moof, mdat) != (b"moof", b"mdat"):
            raise ValueError("not only fragments")
        # The header of moof is 8 bytes long: FFmpeg needs no 64-bit size for it.
        (track,) = [inner for inner in _boxes(data, start + 8, end) if inner[0] == b"traf"]
        yield start, _frames(data, track[1] + 8, track[2])


def _frames(data: Buffer, start: int, end: int) -> int:
    """Frames of a track's part of a fragment."""
    places = [(kind, place + 8) for kind, place, _ in _boxes(data, start, end)]
    (header,) = [place for kind, place in places if kind == b"tfhd"]
    (run,) = [place for kind, place in places if kind == b"trun"]  # FFmpeg writes one a fragment
    (bits,) = struct.unpack_from(">I", data, header)
    flags = NOT_A_KEY_FRAME
    if bits & 0x20:
        skipped = sum(size for bit, size in BEFORE_DEFAULT_FLAGS.items() if bits & bit)
        (flags,) = struct.unpack_from(">I", data, header + 8 + skipped)
    bits, count = struct.unpack_from(">II", data, run)
    place = run + 8 + (4 if bits & 0x1 else 0)
    if bits & 0x4:  # flags of the first frame alone
        (flags,) = struct.unpack_from(">I", data, place)
    elif bits & 0x400:  # of every frame, behind its duration and size
        (flags,) = struct.unpack_from(">I", data, place + (4 if bits & 0x100 else 0) + (4 if bits & 0x200 else 0))
    if flags & NOT_A_KEY_FRAME or not count:
        raise ValueError("a fragment does not begin with a key frame")
    return count


def _boxes(data: Buffer, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of the boxes between two places; raises ValueError where they do not fill them."""
    while start < end:
        size, kind = struct.unpack_from(">I4s", data, start)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start + 8)
        if size < 8 or start + size > end:
            raise ValueError("a box is not whole")
        yield kind, start, start + size
        start += size
