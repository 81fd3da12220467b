"""Frames of the groups of pictures that a clip needs, from their packets straight into a decoder, without a container.

FFmpeg's demuxer costs 1 to 3 ms a clip of 16 frames of 448x256, since it decodes the first of them to learn what our
shards' boxes say; only .4 ms of MPEG-4 and MJPEG, which are left to it. Keeping decoders from clip to clip would save
nothing measurable (4.17 ms a clip of H.264 with and without, of one thread; 4.4 to 4.7 of eight).
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import av
import av.error
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from pipeline.decoding.containers import MAX_PIXELS
from pipeline.decoding.video import Video, reduce_unwanted
from pipeline.shards.gops import VideoSlice, read_boxes, read_fragments

# Boxes of ISO/IEC 14496-12 and -15 with others in them, and the bytes of each before these.
NESTED = {b"trak": 8, b"mdia": 8, b"minf": 8, b"stbl": 8, b"stsd": 16, b"avc1": 86, b"hvc1": 86, b"hev1": 86}
NESTED |= {b"av01": 86, b"vp09": 86}
IDENTITY = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)  # the matrix of an upright picture
MATRIX_AT = {b"mvhd": 36, b"tkhd": 40}  # in version 0 of these boxes, behind their header
CODECS = {b"avcC": "h264", b"hvcC": "hevc", b"av1C": "libdav1d", b"vpcC": "vp9"}
# What may stand in the header of a video that one track's packets and a codec's parameters describe wholly.
EXPECTED = {*NESTED, *MATRIX_AT, *CODECS, b"mdhd", b"hdlr", b"vmhd", b"dinf", b"stts", b"stsc", b"stsz"}
EXPECTED |= {b"stco", b"pasp", b"btrt", b"mvex", b"udta"}


class Stream(NamedTuple):
    """What a decoder is told before the first packet."""

    decoder: str
    extradata: bytes


class SliceDecoder:
    """Decodes the wanted frames of a slice in the calling thread: from its packets or, where this fails, as Video."""

    def __init__(self, video: VideoSlice) -> None:
        self._video = video
        self.frames_decoded = 0

    def frames(self) -> Iterator[tuple[int, VideoFrame]]:
        """Yield the wanted frames in ascending order; if that fails on the way, all of them again.

        Raise VideoError if one cannot be decoded.
        """
        wanted = sorted(set(self._video.numbers))
        if self._video.in_groups:
            # Whatever is wrong, Video finds it too and says what it is.
            with suppress(av.error.FFmpegError, ValueError, IndexError, struct.error):
                yield from self._decode_packets(wanted)
                return
        with Video(self._video.data, self._video.num_frames) as video:
            yield from video.frames(wanted)
            self.frames_decoded += video.frames_decoded

    def _decode_packets(self, numbers: Sequence[int]) -> Iterator[tuple[int, VideoFrame]]:
        """Yield frames. Raise ValueError if one is corrupt or missing, or packets do not tell which is which."""
        data, wanted = memoryview(self._video.data), set(numbers)
        fragments = list(read_fragments(data))
        if sum(fragment.num_frames for fragment in fragments) != self._video.num_frames:
            raise ValueError("other frames than the group table says")
        decoder = open_decoder(read_stream(data))
        first = 0
        for fragment in fragments:
            if fragment.packets is None:
                raise ValueError("frames may be shown in another order")
            in_group = [number - first for number in numbers if 0 <= number - first < fragment.num_frames]
            needed = fragment.packets[: max(in_group, default=-1) + 1]
            for place, packet in enumerate(needed):
                reduce_unwanted(decoder, place in in_group)
                sent = av.Packet(packet.stop - packet.start)  # with the padding that decoders read beyond the data
                sent.update(bytes(data[packet]))
                sent.pts = first + place
                yield from self._select(decoder.decode(sent), wanted)
            first += fragment.num_frames
            if len(needed) < fragment.num_frames:
                yield from self._select(decoder.decode(None), wanted)
                decoder.flush_buffers()
        yield from self._select(decoder.decode(None), wanted)
        if wanted:
            raise ValueError("not every packet is a frame")

    def _select(self, frames: Sequence[VideoFrame], wanted: set[int]) -> Iterator[tuple[int, VideoFrame]]:
        for frame in frames:
            self.frames_decoded += 1
            if frame.is_corrupt:
                raise ValueError("a frame is corrupt")
            if frame.pts in wanted:
                wanted.remove(frame.pts)
                yield frame.pts, frame


def open_decoder(stream: Stream) -> VideoCodecContext:
    decoder = av.CodecContext.create(stream.decoder, "r")
    assert isinstance(decoder, VideoCodecContext)
    if stream.extradata:
        decoder.extradata = stream.extradata
    decoder.thread_count = 1  # clips are decoded in parallel, one per thread
    decoder.options = {"max_pixels": str(MAX_PIXELS)}
    return decoder


def read_stream(data: memoryview) -> Stream:
    """Read the header of an MP4. Raise ValueError or struct.error if it says more than a decoder can be told: several
    tracks, an edit list, a rotation, colors."""
    found: dict[bytes, memoryview] = {}
    (moov,) = [(start + 8, end) for kind, start, end in read_boxes(data, 0, len(data)) if kind == b"moov"]
    nested = [moov]
    while nested:
        for kind, start, end in read_boxes(data, *nested.pop()):
            if kind in found or kind not in EXPECTED:
                raise ValueError("several tracks or an unusual box")
            found[kind] = data[start + 8 : end]
            if kind in NESTED:
                nested.append((start + NESTED[kind], end))
    if any(found[kind][0] or found[kind][at : at + 36] != IDENTITY for kind, at in MATRIX_AT.items() if kind in found):
        raise ValueError("not upright")
    (config,) = found.keys() & CODECS.keys()
    return Stream(CODECS[config], b"" if config == b"vpcC" else bytes(found[config]))
