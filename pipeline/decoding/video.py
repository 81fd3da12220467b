"""Exact frames of a video with PyAV: frame k is the k-th that decodes from the start, whatever container and codec say.

Decoding from the nearest keyframe relies on timestamps. They are checked against each other and against the known
number of frames; where anything does not fit (no timestamps, hidden frames, wrong edit lists), frames are counted from
the start.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import groupby, pairwise
from pathlib import Path

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.plane import VideoPlane
from av.video.reformatter import Interpolation
from av.video.stream import VideoStream
from jaxtyping import UInt8

from adamae.pipeline.decoding.containers import open_stream
from adamae.pipeline.decoding.packets import Index, index_slice
from adamae.pipeline.video_error import VideoError

MAX_BYTES = 2**32  # of a file whose packets are all kept in memory
# Without these, FFmpeg's colors are 1.4 gray levels too dark, and up to 50 off; .95 ms instead of .13 at 640×360.
EXACT = Interpolation.BILINEAR | Interpolation.ACCURATE_RND
EXACT_COLORS = EXACT | Interpolation.FULL_CHR_H_INT
# Filters that turn a frame upright, by the number of counter-clockwise quarter turns.
UPRIGHT: tuple[list[tuple[str, str]], ...] = (
    [],
    [("transpose", "cclock")],
    [("hflip", ""), ("vflip", "")],
    [("transpose", "clock")],
)


class Video:
    """Gives frames of a video, decoded in the calling thread."""

    def __init__(
        self, source: bytes | Path, num_frames: int | None = None, in_groups: bool = False
    ) -> None:
        """num_frames: where known, a check on the timestamps; in_groups: see VideoSlice."""
        self._source, self._num_frames, self._in_groups = source, num_frames, in_groups
        self.frames_decoded = 0

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, VideoFrame]]:
        """Yield the frames with these numbers, each once, in ascending order. Raise VideoError if one is corrupt, or
        this is not a video."""
        wanted = sorted(set(numbers))
        if not wanted or wanted[0] < 0:
            raise ValueError(
                f"frame numbers must not be negative or none at all, got {list(numbers)}"
            )
        given: set[int] = set()
        try:
            for decode in (
                self._decode_slice,
                self._decode_from_keyframes,
                self._decode_from_start,
            ):
                for number, frame in decode([number for number in wanted if number not in given]):
                    given.add(number)
                    yield number, frame
                if len(given) == len(wanted):
                    return
        except (av.error.FFmpegError, ValueError) as error:
            raise VideoError(_explain(error)) from error
        raise VideoError(f"frame {next(n for n in wanted if n not in given)} does not decode")

    def _decode_slice(self, numbers: list[int]) -> Iterator[tuple[int, VideoFrame]]:
        """Yield frames of groups of pictures without their container."""
        if self._in_groups and isinstance(self._source, bytes):
            # Whatever is wrong, the container's reader finds it too and says what it is.
            with suppress(av.error.FFmpegError, ValueError, IndexError, struct.error):
                yield from self._decode_groups(
                    *index_slice(self._source, self._num_frames), numbers
                )

    def _decode_from_keyframes(self, numbers: list[int]) -> Iterator[tuple[int, VideoFrame]]:
        """Yield those frames that can be found reliably from the nearest keyframes, decoding no more than needed."""
        with self._open() as (container, stream):
            index = self._read_index(container, stream)
            if index is not None and numbers[-1] < len(index.pts):
                yield from self._decode_groups(stream.codec_context, index, numbers)

    def _decode_from_start(self, numbers: list[int]) -> Iterator[tuple[int, VideoFrame]]:
        wanted = set(numbers)
        # PyAV leaks 300 bytes of a decoder that is neither exhausted nor closed: 1 MiB per 3,500 clips.
        with self._open() as (container, stream), closing(container.decode(stream)) as frames:  # type: ignore[type-var]
            for number, frame in enumerate(frames):
                self.frames_decoded += 1
                if number in wanted:
                    yield number, frame
                if number >= numbers[-1]:
                    return

    @contextmanager
    def _open(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        try:
            # In fragmented MP4, FFmpeg would decode frames to guess the frame rate: 7 ms instead of 2.7.
            container, stream = open_stream(self._source, fpsprobesize="0")
        except (av.error.FFmpegError, ValueError, VideoError) as error:
            raise VideoError(f"cannot be opened: {_explain(error)}") from error
        with container:
            yield container, stream

    def _read_index(self, container: InputContainer, stream: VideoStream) -> Index | None:
        """Read all packets; None if their timestamps do not identify the frames, or they do not go into memory."""
        if isinstance(self._source, Path) and self._source.stat().st_size > MAX_BYTES:
            return None
        packets = [packet for packet in container.demux(stream) if packet.size]
        shown = sorted(
            packet.pts for packet in packets if packet.pts is not None and not packet.is_discard
        )
        fits = self._num_frames is None or len(shown) == self._num_frames
        changes = any(packet.has_sidedata("new_extradata") for packet in packets[1:])
        if changes or not fits or not times_tell_frames(stream, [packet.pts for packet in packets]):
            return None
        keyframes = sorted(
            (packet.pts or 0, place) for place, packet in enumerate(packets) if packet.is_keyframe
        )
        return Index(packets, shown, keyframes)

    def _decode_groups(
        self, decoder: VideoCodecContext, index: Index, numbers: list[int]
    ) -> Iterator[tuple[int, VideoFrame]]:
        """Yield frames from the nearest keyframes; of a group, none behind a corrupt one."""
        for first, group in groupby(
            numbers, index.find_keyframe
        ):  # a jump costs nothing measurable, a frame .3 ms
            if first is not None:
                yield from self._decode_group(
                    decoder, index.packets[first:], {index.pts[n]: n for n in group}
                )

    def _decode_group(
        self, decoder: VideoCodecContext, packets: list[av.Packet], numbers: dict[int, int]
    ) -> Iterator[tuple[int, VideoFrame]]:
        """numbers: of the wanted frames, by their timestamps."""
        to_send = len(numbers)
        decoder.flush_buffers()
        for packet in packets:
            reduce_unwanted(decoder, packet.pts in numbers)
            to_send -= packet.pts in numbers
            # After the last wanted packet, drain what the decoder holds back for reordering.
            for frame in [*decoder.decode(packet), *(decoder.decode(None) if to_send == 0 else ())]:
                self.frames_decoded += 1
                if frame.is_corrupt:
                    return
                if frame.pts in numbers:
                    yield numbers[frame.pts], frame
            if to_send == 0:
                return


def reduce_unwanted(decoder: VideoCodecContext, is_wanted: bool) -> None:
    """Have a decoder skip the next frame if it is not wanted and no other refers to it, as to most B-frames."""
    if decoder.codec.name != "libdav1d":  # which takes this setting only once
        decoder.skip_frame = "DEFAULT" if is_wanted else "NONREF"


def as_rgb(frame: VideoFrame) -> UInt8[np.ndarray, "H W 3"]:
    """Convert a whole frame, by way of planar RGB below 8 bits, where FFmpeg's path to packed RGB has wrong colors."""
    if any(component.bits < 8 for component in frame.format.components):
        frame = frame.reformat(format="gbrp")
    return frame.to_ndarray(format="rgb24", interpolation=EXACT_COLORS)


def view_plane(plane: VideoPlane, shape: tuple[int, ...]) -> UInt8[np.ndarray, "rows bytes"]:
    """Return the first rows and columns of a plane of bytes, in place."""
    return np.ndarray(shape, np.uint8, memoryview(plane), 0, (plane.line_size, 1))


def times_tell_frames(stream: VideoStream, times: Sequence[int | None]) -> bool:
    """Return whether packets with these times, in the order in which they are stored, become frames with the same.

    Where frames are stored in another order than they are shown, ascending times are those of decoding: AVI and some
    writers of MP4 and Matroska know no others. In MPEG-4, a packet often holds two frames ("packed bitstream").
    """
    if None in times or len(set(times)) < len(times):
        return False
    decoder = stream.codec_context
    is_ascending = len(times) > 1 and all(earlier < later for earlier, later in pairwise(times))  # type: ignore[operator]
    return not decoder.has_b_frames or (decoder.name != "mpeg4" and not is_ascending)


def count_turns(frame: VideoFrame) -> int:
    """Return how many counter-clockwise quarter turns make a frame upright; other angles are ignored."""
    return frame.rotation % 360 // 90 if frame.rotation % 90 == 0 else 0


def _explain(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
