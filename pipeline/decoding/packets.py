"""The groups of pictures that a clip needs as packets, which go straight into a decoder, without a container.

FFmpeg's demuxer costs 1 to 3 ms a clip of 16 frames of 448x256, since it decodes the first of them to learn what our
shards' boxes say. Keeping decoders from clip to clip would save nothing measurable (4.17 ms a clip of H.264 with and
without, of one thread; 4.4 to 4.7 of eight).
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

IDENTITY = struct.pack(
    ">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30
)  # the matrix of an upright picture
NUM_MATRICES = 2  # of a movie and of its track
UNTOLD = (b"edts", b"colr")  # boxes of what no packet says: hidden frames, other colors


class Index(NamedTuple):
    """All packets as they are stored, the timestamps of the frames in presentation order, and the keyframes."""

    packets: list[av.Packet]
    pts: Sequence[int]
    keyframes: list[tuple[int, int]]  # timestamp, index of the packet

    def find_keyframe(self, number: int) -> int | None:
        """Return the packet of the last keyframe presented no later than frame `number`, None if there is none."""
        earlier = bisect_right(self.keyframes, self.pts[number], key=itemgetter(0))
        return self.keyframes[earlier - 1][1] if earlier else None


def index_slice(data: bytes, num_frames: int | None) -> tuple[VideoCodecContext, Index]:
    """Return a decoder for a slice of groups of pictures and their packets, whose timestamps are frame numbers.

    Raise ValueError, IndexError, struct.error or FFmpegError if packets do not tell which frame is which.
    """
    packets, keyframes, fragments = list[av.Packet](), [], list(read_fragments(data))
    if sum(fragment.num_frames for fragment in fragments) != num_frames:
        raise ValueError("other frames than the group table says")
    name, extradata = read_header(data[: fragments[0].start])
    decoder = av.CodecContext.create(name, "r")
    assert isinstance(decoder, VideoCodecContext)
    if extradata:
        decoder.extradata = extradata
    decoder.thread_count = 1  # clips are decoded in parallel, one per thread
    decoder.options = {"max_pixels": str(MAX_PIXELS)}
    for fragment in fragments:
        if fragment.packets is None:
            raise ValueError("frames may be shown in another order")
        keyframes.append((len(packets), len(packets)))
        for place in fragment.packets:
            packet = av.Packet(
                place.stop - place.start
            )  # with the padding that decoders read beyond the data
            packet.update(data[place])
            packet.pts = len(packets)
            packets.append(packet)
    return decoder, Index(packets, range(len(packets)), keyframes)


@lru_cache(
    maxsize=256
)  # videos of one size, encoded alike, have the same header; opening it takes .2 ms
def read_header(header: bytes) -> tuple[str, bytes | None]:
    """Return the decoder and its extradata for an MP4 that begins with these bytes, up to its first fragment.

    Raise ValueError or FFmpegError if it says more than a decoder can be told: several tracks, an edit list, a
    rotation, colors.
    """
    if header.count(IDENTITY) != NUM_MATRICES or any(box in header for box in UNTOLD):
        raise ValueError("not upright, or with an unusual box")
    with open_video(header) as container:
        stream = main_stream(container)
        if stream is None or len(container.streams) > 1:
            raise ValueError("several tracks or none")
        return stream.codec_context.codec.name, stream.codec_context.extradata
