"""What decode workers leave to the GPU decoder: the bytes of videos, and what is where in them."""

import struct
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.shards.mp4 import Fragment, read_fragments

# The codec whose frames are pictures of their own: JPEGs.
MJPEG = "mjpeg"
# The box tfdt begins with four bytes, of which the first is its version: 1 if the time that follows
# has 64 bits.
TIME_OFFSET = 4
VERSION_OF_64_BITS = 1

# The first bytes of a JPEG, and the markers of its header (Rec. ITU-T T.81, B.1.1.3): tables of
# Huffman codes and of quantization, comments and application data; then the size of the picture, of
# a baseline JPEG; and last what begins its pixels.
START_OF_IMAGE = b"\xff\xd8"
TABLES_AND_COMMENTS = {0xC4, 0xDB, 0xFE, *range(0xE0, 0xF0)}
START_OF_FRAME = 0xC0
START_OF_SCAN = 0xDA

Bytes = UInt8[np.ndarray, " bytes"]


class GpuCodecs(NamedTuple):
    """Tells decode workers which videos of a batch they leave to the GPU decoder."""

    names: frozenset[str] = frozenset()
    # Both sides of a video must be multiples of it, unless it is MJPEG: see format.SIDE_STEP.
    side_step: int = 1

    def include(self, sample: Sample, video: VideoSlice) -> bool:
        """Return whether the GPU decoder takes a video."""
        sides_fit = sample.width % self.side_step == 0 and sample.height % self.side_step == 0
        is_supported = sample.codec in self.names and (sides_fit or sample.codec == MJPEG)
        # Decoders may not agree about videos that were not re-encoded for training, which have no
        # groups.
        return is_supported and video.in_groups


class EncodedVideo(NamedTuple):
    """A video in the block, and the clips that are cut from it."""

    # Where its bytes lie in the block.
    span: slice
    # The first byte of its groups; the header lies before it.
    header_bytes: int
    # Of each group, the byte at which the 64 bits of its start time lie, and its duration.
    times: list[tuple[int, int]]
    num_frames: int
    # The frames that clips show, ascending.
    numbers: tuple[int, ...]
    # A row for each clip.
    rows: list[PlanRow]

    @classmethod
    def find(cls, video: VideoSlice, rows: list[PlanRow]) -> "EncodedVideo | None":
        """Describe a video at the beginning of a block.

        Return None for one that cannot be joined with others.
        """
        fragments = _list_fragments(video)
        times = []
        for fragment in fragments:
            if (
                fragment.time is None
                or not fragment.duration
                or video.data[fragment.time] != VERSION_OF_64_BITS
            ):
                return None
            times.append((fragment.time + TIME_OFFSET, fragment.duration))
        if not fragments:
            return None
        span = slice(0, len(video.data))
        return cls(span, fragments[0].start, times, video.num_frames, video.numbers, rows)


class EncodedPictures(NamedTuple):
    """A video of JPEGs in the block, and the clips that are cut from it."""

    # Where its bytes lie in the block.
    span: slice
    # Of the video's bytes, those of each picture that clips show.
    pictures: list[slice]
    # A row for each clip.
    rows: list[PlanRow]

    @property
    def num_frames(self) -> int:
        return len(self.pictures)

    @classmethod
    def find(
        cls, video: VideoSlice, rows: list[PlanRow], sides: tuple[int, int]
    ) -> "EncodedPictures | None":
        """Describe a video at the beginning of a block, whose width and height are `sides`.

        Return None for one whose pictures are not found, or are no baseline JPEGs of this size.
        """
        packets: list[slice] = []
        for fragment in _list_fragments(video):
            packets += fragment.packets or ()
        if len(packets) != video.num_frames:
            return None
        pictures = [packets[number] for number in video.numbers]
        if not all(is_baseline_jpeg(video.data[picture], sides) for picture in pictures):
            return None
        return cls(slice(0, len(video.data)), pictures, rows)


Encoded = EncodedVideo | EncodedPictures


def is_baseline_jpeg(data: bytes, sides: tuple[int, int]) -> bool:
    """Return whether the header of a JPEG is whole, and says 8 bits, three colors and this size.

    A header that DALI 2.4 cannot parse, in a batch that it parses in several threads, ends the
    process with a segmentation fault.
    """
    if not data.startswith(START_OF_IMAGE):
        return False
    width, height = sides
    has_size = False
    start = len(START_OF_IMAGE)
    while start + 10 <= len(data):
        prefix, marker, num_bytes, *frame = struct.unpack_from(">BBHBHHB", data, start)
        if prefix != 0xFF:
            return False
        if marker == START_OF_SCAN:
            return has_size
        if marker == START_OF_FRAME:
            has_size = frame == [8, height, width, 3]
        elif marker not in TABLES_AND_COMMENTS:
            return False
        start += 2 + num_bytes
    return False


def _list_fragments(video: VideoSlice) -> list[Fragment]:
    """Return the fragments of an MP4; none if they are not whole, or hold other frames."""
    try:
        fragments = list(read_fragments(video.data))
    except (ValueError, struct.error):
        return []
    num_frames = sum(fragment.num_frames for fragment in fragments)
    return fragments if num_frames == video.num_frames else []
