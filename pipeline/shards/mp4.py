"""The boxes of fragmented MP4 that tell where its groups of pictures lie.

A fragment is a box `moof`, which describes frames, and a box `mdat` with their bytes (ISO/IEC
14496-12, 8.8). FFmpeg writes one track and one run of frames (`trun`) a fragment; other files are
refused.
"""

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from adamae.pipeline.shards.arrays import Buffer

# From ISO/IEC 14496-12, 8.8: a flag of a frame, and the optional fields of boxes, as the bits that
# announce them.
NOT_A_KEY_FRAME = 0x10000
DEFAULT_DURATION = 0x8
DEFAULT_SIZE = 0x10
DEFAULT_FLAGS = 0x20
TFHD = {0x1: "Q", 0x2: "I", DEFAULT_DURATION: "I", DEFAULT_SIZE: "I", DEFAULT_FLAGS: "I"}
DATA_OFFSET = 0x1
FIRST_FLAGS = 0x4
TRUN = {DATA_OFFSET: "i", FIRST_FLAGS: "I"}
DURATION = 0x100
SIZE = 0x200
FLAGS = 0x400
COMPOSITION_OFFSET = 0x800
# The fields of each frame in trun, behind the fields of the whole run.
OF_EACH_FRAME = (DURATION, SIZE, FLAGS, COMPOSITION_OFFSET)
# A box begins with its size and its kind, of 32 bits each. FFmpeg writes no box with a 64-bit size
# inside of moof.
HEADER_BYTES = 8


class Fragment(NamedTuple):
    """A group of pictures in a fragmented MP4; offsets are bytes of the file."""

    start: int
    num_frames: int
    # The bytes of each frame, in the order of presentation. None if frames are shown in another
    # order than they are stored in, or their sizes do not add up.
    packets: tuple[slice, ...] | None
    # In the time scale of the video; 0 if the boxes do not tell it.
    duration: int
    # Where the content of the box tfdt begins, which tells the fragment's time: a version of four
    # bytes, then the time.
    time: int | None


class Box(NamedTuple):
    """A box of an MP4, from its header to its last byte; offsets are bytes of the file."""

    kind: bytes
    start: int
    end: int


def read_fragments(data: Buffer) -> Iterator[Fragment]:
    """Yield the fragments of an MP4.

    Raise ValueError or struct.error if one does not begin with a key frame or is not whole.
    """
    boxes = list(read_boxes(data, 0, len(data)))
    kinds = [box.kind for box in boxes]
    num_header_boxes = len(boxes)
    if b"moof" in kinds:
        num_header_boxes = kinds.index(b"moof")
    moofs = boxes[num_header_boxes::2]
    mdats = boxes[num_header_boxes + 1 :: 2]
    if b"moov" not in kinds[:num_header_boxes] or len(moofs) != len(mdats):
        raise ValueError("no fragments")
    for moof, mdat in zip(moofs, mdats, strict=True):
        if moof.kind != b"moof" or mdat.kind != b"mdat":
            raise ValueError("not only fragments")
        children = read_boxes(data, moof.start + HEADER_BYTES, moof.end)
        (track,) = [box for box in children if box.kind == b"traf"]
        yield _read_track(data, moof, track, mdat.end)


def _read_track(data: Buffer, moof: Box, track: Box, mdat_end: int) -> Fragment:
    """Read a track's part of a fragment."""
    boxes = list(read_boxes(data, track.start + HEADER_BYTES, track.end))
    (header,) = _find_contents(boxes, b"tfhd")
    (run,) = _find_contents(boxes, b"trun")
    times = _find_contents(boxes, b"tfdt")
    # Both boxes begin with 8 bits of version and 24 bits that announce fields.
    header_bits, _track = struct.unpack_from(">II", data, header)
    defaults, _ = _read_fields(data, header + 8, header_bits, TFHD)
    run_bits, num_frames = struct.unpack_from(">II", data, run)
    fields, table_start = _read_fields(data, run + 8, run_bits, TRUN)
    first_byte = moof.start + fields.get(DATA_OFFSET, 0)
    # Checked before the table of frames is read, whose length a broken file may claim.
    if not 0 < num_frames <= mdat_end - first_byte:
        raise ValueError("a fragment without frames, or with fewer bytes than frames")
    columns = [bit for bit in OF_EACH_FRAME if run_bits & bit]
    table = np.frombuffer(data, ">u4", num_frames * len(columns), table_start)
    values = table.reshape(num_frames, len(columns)).T.tolist()
    frames = dict(zip(columns, values, strict=True))

    first_flags = defaults.get(DEFAULT_FLAGS, NOT_A_KEY_FRAME)
    if FLAGS in frames:
        first_flags = frames[FLAGS][0]
    first_flags = fields.get(FIRST_FLAGS, first_flags)
    if first_flags & NOT_A_KEY_FRAME:
        raise ValueError("a fragment does not begin with a key frame")

    sizes = frames.get(SIZE, [defaults.get(DEFAULT_SIZE, 0)] * num_frames)
    ends = list(accumulate(sizes, initial=first_byte))
    packets = None
    if ends[-1] == mdat_end and min(sizes) > 0 and COMPOSITION_OFFSET not in frames:
        packets = tuple(slice(start, end) for start, end in pairwise(ends))
    durations = frames.get(DURATION, [defaults.get(DEFAULT_DURATION, 0)] * num_frames)
    time = times[0] if times else None
    return Fragment(moof.start, num_frames, packets, sum(durations), time)


def _find_contents(boxes: list[Box], kind: bytes) -> list[int]:
    """Return where the contents of the boxes of a kind begin."""
    return [box.start + HEADER_BYTES for box in boxes if box.kind == kind]


def _read_fields(
    data: Buffer, start: int, bits: int, layout: dict[int, str]
) -> tuple[dict[int, int], int]:
    """Return the fields of `layout` that `bits` announce, by their bits, and the offset behind."""
    fields = [bit for bit in layout if bits & bit]
    types = [layout[bit] for bit in fields]
    form = struct.Struct(">" + "".join(types))
    values = form.unpack_from(data, start)
    return dict(zip(fields, values, strict=True)), start + form.size


def read_boxes(data: Buffer, start: int, end: int) -> Iterator[Box]:
    """Yield the boxes between two offsets; raise ValueError if they do not fill all of it."""
    while start < end:
        size, kind = struct.unpack_from(">I4s", data, start)
        # A box above 4 GiB, such as a long mdat, has a size of 64 bits behind its kind.
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start + HEADER_BYTES)
        if size < HEADER_BYTES or start + size > end:
            raise ValueError("a box is not whole")
        yield Box(kind, start, start + size)
        start += size
