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
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from pipeline.shards.arrays import Buffer
from pipeline.video_error import VideoError

GOP = np.dtype(
    [
        ("first_frame", "<u4"),  # of the group in its video; 0 for the bytes before the first group
        ("offset", "<u4"),  # in the video
        ("checksum", "<u8"),  # see `checksum`
    ]
)
Rows = Shaped[np.ndarray, " rows"]  # of GOP

# From ISO/IEC 14496-12, 8.8: a flag of a frame, and the optional fields of boxes with the bits that announce them.
NOT_A_KEY_FRAME = 0x10000
DEFAULT_DURATION, DEFAULT_SIZE, DEFAULT_FLAGS = 0x8, 0x10, 0x20
TFHD = {0x1: "Q", 0x2: "I", DEFAULT_DURATION: "I", DEFAULT_SIZE: "I", DEFAULT_FLAGS: "I"}
DATA_OFFSET, FIRST_FLAGS = 0x1, 0x4
TRUN = {DATA_OFFSET: "i", FIRST_FLAGS: "I"}
DURATION, SIZE, FLAGS, COMPOSITION_OFFSET = 0x100, 0x200, 0x400, 0x800
OF_EACH_FRAME = (DURATION, SIZE, FLAGS, COMPOSITION_OFFSET)  # in trun, behind its other fields


class VideoSlice(NamedTuple):
    """A video of its own that holds what is wanted of another one."""

    data: bytes
    numbers: tuple[int, ...]  # of the wanted frames in it
    num_frames: int  # that it holds
    in_groups: bool = False  # whether it consists of rows of the group table


class Fragment(NamedTuple):
    """A group of pictures in a fragmented MP4."""

    start: int
    num_frames: int
    packets: tuple[slice, ...] | None  # one a frame, as shown; None if they are shown in another order or not found
    duration: int  # in the time scale of the video; 0: not told
    time: int | None  # where in the file the time is told at which it begins (tfdt)


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
            raise VideoError(f"frames {min(wanted)} to {max(wanted)} are wanted of {self.num_frames}")
        group_of = np.searchsorted(firsts[1:-1], wanted, side="right")  # 0: the bytes before the first one
        chosen = np.array(sorted({0, *group_of.tolist()}))  # so few: np.unique takes .4 ms
        data = b"".join(
            self._read(run, offsets, read) for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
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


def read_fragments(data: Buffer) -> Iterator[Fragment]:
    """Yield the fragments of an MP4; raise ValueError or struct.error if one does not begin with a key frame or is not
    whole."""
    boxes = [*read_boxes(data, 0, len(data))]
    first = next((place for place, (kind, _, _) in enumerate(boxes) if kind == b"moof"), len(boxes))
    if b"moov" not in (kind for kind, _, _ in boxes[:first]) or len(boxes[first:]) % 2:
        raise ValueError("no fragments")
    for (moof, start, end), (mdat, _, mdat_end) in zip(boxes[first::2], boxes[first + 1 :: 2], strict=True):
        if (moof, mdat) != (b"moof", b"mdat"):
            raise ValueError("not only fragments")
        # The header of moof is 8 bytes long: FFmpeg needs no 64-bit size for it.
        (track,) = [inner for inner in read_boxes(data, start + 8, end) if inner[0] == b"traf"]
        yield _read_track(data, start, track[1] + 8, track[2], mdat_end)


def _read_track(data: Buffer, moof: int, start: int, end: int, mdat_end: int) -> Fragment:
    """Read a track's part of a fragment."""
    places = [(kind, place + 8) for kind, place, _ in read_boxes(data, start, end)]
    (header,) = [place for kind, place in places if kind == b"tfhd"]
    (run,) = [place for kind, place in places if kind == b"trun"]  # FFmpeg writes one a fragment
    header_bits, _track = struct.unpack_from(">II", data, header)
    defaults, _ = _read_fields(data, header + 8, header_bits, TFHD)
    bits, count = struct.unpack_from(">II", data, run)
    fields, place = _read_fields(data, run + 8, bits, TRUN)
    columns = [bit for bit in OF_EACH_FRAME if bits & bit]
    first = moof + fields.get(DATA_OFFSET, 0)
    if not 0 < count <= mdat_end - first:
        raise ValueError("a fragment without frames, or with fewer bytes than frames")
    table = np.frombuffer(data, ">u4", count * len(columns), place).reshape(count, len(columns)).T.tolist()
    frames = dict(zip(columns, table, strict=True))
    flags = frames[FLAGS][0] if FLAGS in frames else defaults.get(DEFAULT_FLAGS, NOT_A_KEY_FRAME)
    if fields.get(FIRST_FLAGS, flags) & NOT_A_KEY_FRAME:
        raise ValueError("a fragment does not begin with a key frame")
    sizes = frames.get(SIZE, [defaults.get(DEFAULT_SIZE, 0)] * count)
    ends = [*accumulate(sizes, initial=first)]
    fits = ends[-1] == mdat_end and min(sizes) > 0 and COMPOSITION_OFFSET not in frames
    packets = tuple(slice(*pair) for pair in pairwise(ends)) if fits else None
    duration = sum(frames.get(DURATION, [defaults.get(DEFAULT_DURATION, 0)] * count))
    return Fragment(moof, count, packets, duration, next((place for kind, place in places if kind == b"tfdt"), None))


def _read_fields(data: Buffer, place: int, bits: int, layout: dict[int, str]) -> tuple[dict[int, int], int]:
    """Return those fields of `layout` that `bits` announce, by their bits, and where they end."""
    fields = [bit for bit in layout if bits & bit]
    form = struct.Struct(">" + "".join(layout[bit] for bit in fields))
    return dict(zip(fields, form.unpack_from(data, place), strict=True)), place + form.size


def read_boxes(data: Buffer, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, end) of the boxes between two places; raise ValueError where they do not fill them."""
    while start < end:
        size, kind = struct.unpack_from(">I4s", data, start)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start + 8)
        if size < 8 or start + size > end:
            raise ValueError("a box is not whole")
        yield kind, start, start + size
        start += size
