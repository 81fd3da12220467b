"""Frames of the groups of pictures that a clip needs, from their packets straight into a decoder, without a container.

FFmpeg's demuxer costs 1 to 3 ms a clip of 16 frames of 448x256, since it decodes the first of them to learn what our
shards' boxes say. Keeping decoders from clip to clip would save nothing measurable (4.17 ms a clip of H.264 with and
without, of one thread; 4.4 to 4.7 of eight).
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

import av
import av.error
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from pipeline.decoding.containers import MAX_PIXELS, main_stream, open_video
from pipeline.decoding.video import Video, reduce_unwanted
from pipeline.shards.gops import VideoSlice, read_fragments

IDENTITY = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)  # the matrix of an upright picture
NUM_MATRICES = 2  # of a movie and of its track
UNTOLD = (b"edts", b"colr")  # boxes of what no packet says: hidden frames, other colors


class SliceDecoder:
    """Decodes the wanted frames of a slice: from its packets or, where this fails, as Video."""

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
        name, extradata = read_header(bytes(data[: fragments[0].start]))
        decoder = av.CodecContext.create(name, "r")
        assert isinstance(decoder, VideoCodecContext)
        if extradata:
            decoder.extradata = extradata
        decoder.thread_count = 1  # clips are decoded in parallel, one per thread
        decoder.options = {"max_pixels": str(MAX_PIXELS)}
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


@lru_cache(maxsize=256)  # videos of one size, encoded alike, have the same header; opening it takes .2 ms
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
