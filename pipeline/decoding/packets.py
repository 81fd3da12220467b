"""The groups of pictures that a clip needs as packets, which go straight into a decoder.

This leaves out FFmpeg's demuxer, which costs 1 to 3 ms a clip of 16 frames of 448x256, since it
decodes the first of them to learn what our shards' boxes say. Keeping decoders from clip to clip
would save nothing measurable (4.17 ms a clip of H.264 with and without, of one thread; 4.4 to 4.7
of eight).
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import av
from av.video.codeccontext import VideoCodecContext

from adamae.pipeline.decoding.containers import MAX_PIXELS, main_stream, open_video
from adamae.pipeline.shards.mp4 import read_fragments

# The matrix of an upright picture, which an MP4 has twice: for the movie and for its track.
IDENTITY = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
NUM_MATRICES = 2
# Boxes of what a decoder cannot learn from packets: an edit list, which hides frames, and colors.
UNSUPPORTED_BOXES = (b"edts", b"colr")


class Index(NamedTuple):
    """The packets of a video, and which of them hold which frames."""

    # In the order in which they are stored.
    packets: list[av.Packet]
    # The timestamps of the frames, in the order in which they are shown: frame k is shown at
    # pts[k].
    pts: Sequence[int]
    # Timestamp and index of the packet, ascending.
    keyframes: list[tuple[int, int]]

    def find_keyframe(self, number: int) -> int | None:
        """Return the index of the packet from which frame `number` can be decoded.

        It is the last keyframe that is shown no later than the frame; None if there is none.
        """
        num_earlier = bisect_right(self.keyframes, self.pts[number], key=itemgetter(0))
        if num_earlier == 0:
            return None
        _, packet_index = self.keyframes[num_earlier - 1]
        return packet_index


def index_slice(data: bytes, num_frames: int | None) -> tuple[VideoCodecContext, Index]:
    """Return a decoder for a slice of groups of pictures, and its packets.

    The packets' timestamps are frame numbers. Raise ValueError, IndexError, struct.error or
    FFmpegError if packets do not tell which frame is which.
    """
    fragments = list(read_fragments(data))
    if sum(fragment.num_frames for fragment in fragments) != num_frames:
        raise ValueError("other frames than the group table says")
    decoder = _make_decoder(data[: fragments[0].start])
    packets: list[av.Packet] = []
    keyframes: list[tuple[int, int]] = []
    for fragment in fragments:
        if fragment.packets is None:
            raise ValueError("frames may be shown in another order")
        keyframes.append((len(packets), len(packets)))
        for position in fragment.packets:
            # FFmpeg allocates the packet with the padding that decoders read beyond the data.
            # Without it, some intact MPEG-4 was called corrupt.
            packet = av.Packet(position.stop - position.start)
            packet.update(data[position])
            packet.pts = len(packets)
            packets.append(packet)
    return decoder, Index(packets, range(len(packets)), keyframes)


def _make_decoder(header: bytes) -> VideoCodecContext:
    """Open a decoder for the packets that follow the header of an MP4; see read_header."""
    name, extradata = read_header(header)
    decoder = av.CodecContext.create(name, "r")
    assert isinstance(decoder, VideoCodecContext)
    if extradata:
        decoder.extradata = extradata
    # Clips are decoded in parallel, each worker on one core.
    decoder.thread_count = 1
    decoder.options = {"max_pixels": str(MAX_PIXELS)}
    return decoder


# Videos of one size, encoded alike, have the same header; opening it takes .2 ms.
@lru_cache(maxsize=256)
def read_header(header: bytes) -> tuple[str, bytes | None]:
    """Return the decoder and its extradata for an MP4 that begins with these bytes.

    `header` ends where the first fragment begins. Raise ValueError or FFmpegError if it says more
    than a decoder can be told: several tracks, an edit list, a rotation, colors.
    """
    if header.count(IDENTITY) != NUM_MATRICES:
        raise ValueError("not upright")
    if any(box in header for box in UNSUPPORTED_BOXES):
        raise ValueError("with an unusual box")
    with open_video(header) as container:
        stream = main_stream(container)
        if stream is None or len(container.streams) > 1:
            raise ValueError("several tracks or none")
        return stream.codec_context.codec.name, stream.codec_context.extradata
