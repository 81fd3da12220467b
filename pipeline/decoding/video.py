"""Exact frames of a video with PyAV: frame k is the k-th that decodes from the start, whatever container and codec say.

Going to a frame through the nearest keyframe relies on timestamps. They are checked against each other and against the
known number of frames; where anything does not fit (no timestamps, hidden frames, edit lists that lie), decoding starts
at the first frame and counts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import av
import av.error
import numpy as np
from av.bitstream import BitStreamFilterContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from jaxtyping import UInt8

from pipeline.decoding.containers import MAX_PIXELS, main_stream, open_video
from pipeline.decoding.video_error import VideoError
from pipeline.shards import arrays

EIGHT_BIT_420 = {"yuv420p", "yuvj420p"}
SPLITTERS = {"vp9": "vp9_superframe_split", "av1": "av1_frame_split"}  # FFmpeg's: a packet into its pictures


class Keyframe(NamedTuple):
    pts: int
    dts: int


class Index(NamedTuple):
    """Timestamps of all frames in the order of presentation, and of the keyframes."""

    pts: list[int]
    keyframes: list[Keyframe]

    def keyframe_before(self, number: int) -> int:
        """Place in `keyframes` of the last one that is shown no later than frame `number`; -1: there is none."""
        return bisect_right(self.keyframes, self.pts[number], key=lambda keyframe: keyframe.pts) - 1

    def first_of_group(self, number: int) -> int:
        """Frame from which on frame `number` can be decoded."""
        place = self.keyframe_before(number)
        return bisect_left(self.pts, self.keyframes[place].pts) if place >= 0 else 0


class Video:
    """An open video. Decodes in the calling thread; close it, or use it as a context manager."""

    def __init__(self, source: bytes | Path, num_frames: int | None = None) -> None:
        """`num_frames`, where known, guards the way through keyframes. Raises VideoError if this is no video."""
        self._source, self._num_frames = source, num_frames
        self.frames_decoded = 0
        self.has_index = False  # True once frames have been found through keyframes
        try:
            self._open()
        except (av.error.FFmpegError, ValueError) as error:
            raise VideoError(f"cannot be opened: {_reason(error)}") from error

    def _open(self) -> None:
        # Of fragmented MP4, FFmpeg decodes some frames to guess a rate, which nobody asks for: 7 ms instead of 2.7.
        self._container = open_video(self._source, fpsprobesize="0")
        stream = main_stream(self._container)
        if stream is None or stream.codec_context is None:
            self._container.close()
            raise VideoError("cannot be opened: it holds no video" + (" of a known codec" if stream else ""))
        if stream.width * stream.height > MAX_PIXELS:
            self._container.close()
            raise VideoError(f"cannot be opened: pictures of {stream.width}x{stream.height} pixels are too large")
        self._stream = stream
        self._stream.codec_context.thread_count = 1  # clips are decoded side by side, one a thread
        self._unfinished: Any = None

    def __enter__(self) -> "Video":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reading(None)
        self._container.close()

    def _reading(self, iterator: Any) -> Any:
        """The iterator over the container that is used from now on. PyAV keeps 300 bytes of one that is neither
        exhausted nor closed for ever: a MiB for 3,500 clips."""
        if self._unfinished is not None:
            self._unfinished.close()
        self._unfinished = iterator
        return iterator

    def frames(self, numbers: Sequence[int]) -> Iterator[tuple[int, VideoFrame]]:
        """The frames with these numbers, each once, in ascending order; raises VideoError if one does not decode."""
        wanted = sorted(set(numbers))
        if not wanted or wanted[0] < 0:
            raise ValueError(f"frame numbers must not be negative or none at all, got {list(numbers)}")
        given: set[int] = set()
        try:
            for way in (self._through_keyframes, self._from_the_start):
                for number, frame in way([number for number in wanted if number not in given]):
                    given.add(number)
                    yield number, frame
                if len(given) == len(wanted):
                    return
        except (av.error.FFmpegError, ValueError) as error:
            raise VideoError(_reason(error)) from error
        raise VideoError(f"frame {next(n for n in wanted if n not in given)} does not decode")

    def shows_every_picture(self) -> bool:
        """Whether each packet is one picture, is shown, and can be decoded from the keyframe before it, and there is no
        second video stream, nor a cover, to be taken for this one. To be asked before any frame is."""
        if len(self._container.streams.video) > 1:
            return False
        codec = self._stream.codec_context.codec.canonical_name
        splitter = BitStreamFilterContext(SPLITTERS[codec], self._stream) if codec in SPLITTERS else None
        last_keyframe = 0
        for packet in self._reading(self._container.demux(self._stream)):
            if packet.size == 0:
                continue
            if packet.pts is None or packet.pts < 0 or packet.is_discard:
                return False
            if packet.is_keyframe:
                last_keyframe = packet.pts
            elif codec == "hevc" and packet.pts < last_keyframe:
                return False
            if splitter is not None and len(splitter.filter(packet)) != 1:
                return False
        return True

    def _through_keyframes(self, numbers: list[int]) -> Iterator[tuple[int, VideoFrame]]:
        """What of `numbers` can surely be had by decoding from the nearest keyframes, and no further than needed."""
        index = self._read_index()
        if index is None or numbers[-1] >= len(index.pts):
            return
        self.has_index = True
        run: list[int] = []
        for number in numbers:
            # To go there costs nothing that can be measured, and a frame .3 ms.
            if run and index.first_of_group(number) > run[-1] + 1:
                yield from self._decode_run(index, run)
                run = []
            run.append(number)
        yield from self._decode_run(index, run)

    def _decode_run(self, index: Index, run: list[int]) -> Iterator[tuple[int, VideoFrame]]:
        nearest = index.keyframe_before(run[0])
        packets = self._packets_from(index.keyframes[nearest]) if nearest >= 0 else None
        if packets is None:
            return
        numbers = {index.pts[number]: number for number in run}
        to_send = len(numbers)
        decoder = self._stream.codec_context
        # Frames that nobody refers to and nobody asked for (most B-frames) are not decoded; dav1d is told once.
        unwanted: Literal["DEFAULT", "NONREF"] = "DEFAULT" if decoder.codec.name == "libdav1d" else "NONREF"
        for packet in packets:
            decoder.skip_frame = "DEFAULT" if packet.pts in numbers else unwanted
            to_send -= packet.pts in numbers
            # Once the last wanted packet is in, what the decoder holds back for reordering is drained.
            for frame in [*decoder.decode(packet), *(decoder.decode(None) if to_send == 0 else ())]:
                self.frames_decoded += 1
                if frame.is_corrupt:
                    return
                if frame.pts in numbers:
                    yield numbers[frame.pts], frame
            if to_send == 0:
                return

    def _packets_from(self, keyframe: Keyframe) -> Iterator[av.Packet] | None:
        """Packets from this keyframe or an earlier one on; None if the container does not go there."""
        for timestamp in keyframe:  # some containers seek by presentation, some by decoding time
            try:
                self._container.seek(timestamp, stream=self._stream)
            except av.error.FFmpegError:  # -1, which reads as EPERM: Matroska whose index names no keyframe
                continue
            packets = self._reading(self._container.demux(self._stream))
            first = next(packets, None)
            if first is not None and first.is_keyframe and first.pts is not None and first.pts <= keyframe.pts:
                return chain([first], packets)
        return None

    def _read_index(self) -> Index | None:
        """Timestamps of all packets; None if they do not tell which frame is which."""
        if guesses_times(self._stream):
            return None
        packets = [packet for packet in self._container.demux(self._stream) if packet.size]
        # Matroska stores no decoding times, and FFmpeg guesses none for the first packets.
        timed = [(p.pts, p.pts if p.dts is None else p.dts, p) for p in packets if p.pts is not None]
        shown = sorted(pts for pts, _, packet in timed if not packet.is_discard)
        fits = self._num_frames is None or len(shown) == self._num_frames
        if len(timed) < len(packets) or not fits or len(set(shown)) < len(shown):
            return None
        return Index(shown, sorted(Keyframe(pts, dts) for pts, dts, packet in timed if packet.is_keyframe))

    def _from_the_start(self, numbers: list[int]) -> Iterator[tuple[int, VideoFrame]]:
        self.close()
        self._open()
        wanted = set(numbers)
        for number, frame in enumerate(self._reading(self._container.decode(self._stream))):
            self.frames_decoded += 1
            if number in wanted:
                yield number, frame
            if number >= numbers[-1]:
                return


def is_plain(data: bytes, num_frames: int) -> bool:
    """Whether any decoder will number, turn and show the frames as this module does; NVDEC by way of DALI asks most.

    DALI takes the picture that NVDEC decodes n-th for that of the n-th packet. Fields, pictures that a packet holds and
    does not show (VP9, AV1), and pictures that are dropped after a seek (open groups in HEVC) would shift the others.
    """
    with Video(data, num_frames) as video:
        frame = next(frame for _, frame in video.frames([0]))
        upright_and_whole = frame.rotation == 0 and not frame.interlaced_frame
        halves_well = frame.width % 2 == frame.height % 2 == 0  # into 4:2:0's colour planes, which decoders round
        if not (video.has_index and upright_and_whole and halves_well and frame.format.name in EIGHT_BIT_420):
            return False
    try:
        with Video(data) as video:
            return video.shows_every_picture()
    except av.error.FFmpegError:  # what FFmpeg cannot take apart is nothing for DALI, and may well decode
        return False


def decode_frames(
    source: bytes | Path, numbers: Sequence[int], num_frames: int | None = None
) -> UInt8[np.ndarray, "T H W C"]:
    """The frames with these numbers, in the order given, as RGB, upright; `num_frames` of the video if it is known.
    Those of an array have its channels.

    Colours are what the file says they are (unlike in clips for training, where they are always read as BT.601).
    Raises VideoError if one of them does not decode.
    """
    if arrays.is_array(source):
        return arrays.read_array(source, numbers)
    decoded: dict[int, np.ndarray] = {}
    with Video(source, num_frames) as video:
        for number, frame in video.frames(numbers):
            decoded[number] = np.rot90(as_rgb(frame), turns(frame))
    return np.stack([decoded[number] for number in numbers])


def as_rgb(frame: VideoFrame) -> UInt8[np.ndarray, "H W 3"]:
    """A whole frame. FFmpeg's short cut to packed RGB reads some colours of few bits wrongly; planar has none."""
    if any(component.bits < 8 for component in frame.format.components):
        frame = frame.reformat(format="gbrp")
    return frame.to_ndarray(format="rgb24")


def guesses_times(stream: VideoStream) -> bool:
    """Whether the decoder finds out itself when frames are shown, and how many: in MPEG-4 with B-frames, a packet often
    holds two ("packed bitstream")."""
    return stream.codec_context.name == "mpeg4" and stream.codec_context.has_b_frames


def turns(frame: VideoFrame) -> int:
    """Quarter turns, counter-clockwise, that make a frame upright; angles between are left alone."""
    return frame.rotation % 360 // 90 if frame.rotation % 90 == 0 else 0


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
