"""Read videos of any origin, frame by frame and on time, and refuse those that are not intact, with the reason.

Anything that does not decode cleanly makes the whole video unusable: training must never meet a picture that a decoder
had to guess.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import BinaryIO

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from pipeline.decoding.containers import EXTENSIONS, MAX_PIXELS, main_stream, open_video
from pipeline.decoding.containers import VIDEO_EXTENSIONS as VIDEO_EXTENSIONS
from shard_tools.encoding.picture import UnusableError

# In H.264 and HEVC a third zero byte in a row would be a start code, so encoders never write one. Where a download left
# a hole, FFmpeg often invents a picture and says nothing. (Zeros that end in a 1 may be padding before a start code.)
NEVER_ZEROS = {"h264", "hevc"}
HOLE = re.compile(32 * rb"\0" + rb"\0*[^\0\1]")  # written out it is searched 30 times as fast as \0{32,}

MAX_GAP_S = 10.0  # a longer gap between two frames is a broken clock, not a still picture
MAX_FPS = 1000
NO_TIMESTAMPS = 0x80  # AVFMT_NOTIMESTAMPS


def choose_extension(path: Path, container: InputContainer) -> str:
    """Return the extension for a copy of `path`: its own if that fits what the file is, else the usual one."""
    own = path.suffix.lower().removeprefix(".")
    names = EXTENSIONS.get(container.format.name.split(",")[0], (own,))
    return own if own in names else names[0]


@contextmanager
def open_source(path: Path, **options: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open the video stream of a file for decoding on one thread; raise UnusableError if there is none.

    `options` are FFmpeg's for the demuxer.
    """
    if path.stat().st_size == 0:
        raise UnusableError("the file is empty")
    try:
        container = open_video(path, **options)
    except av.error.FFmpegError as error:
        raise UnusableError(_explain_open_error(path, error)) from error
    with container:
        if _is_cut_off(path):
            raise UnusableError("the file is cut off: it is shorter than it says itself")
        stream = main_stream(container)
        if stream is None:
            raise UnusableError("it holds no video" + (", only sound" if container.streams.audio else ""))
        if stream.codec_context is None:
            raise UnusableError("its video codec is not known")
        if stream.width * stream.height > MAX_PIXELS:
            raise UnusableError(f"its pictures of {stream.width}x{stream.height} pixels are beyond any real video's")
        stream.codec_context.thread_count = 1  # the worker processes are the parallelism
        yield container, stream


def _is_cut_off(path: Path) -> bool:
    """Whether an MP4, Matroska or AVI file names a size that goes beyond its end: FFmpeg reads some as if complete."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(128)
        if head[4:8] in (b"ftyp", b"moov", b"mdat"):
            return _has_cut_box(file, num_bytes)
    if head.startswith(b"RIFF"):
        return 8 + int.from_bytes(head[4:8], "little") > num_bytes
    segment = head.find(b"\x18\x53\x80\x67")
    if not head.startswith(b"\x1a\x45\xdf\xa3") or segment < 0:
        return False
    # The number of leading zero bits says how long the size is; all ones mean that it was not known.
    length = 9 - head[segment + 4].bit_length()
    unknown = (1 << 7 * length) - 1
    size = int.from_bytes(head[segment + 4 : segment + 4 + length]) & unknown
    return size != unknown and segment + 4 + length + size > num_bytes


def _has_cut_box(file: BinaryIO, num_bytes: int) -> bool:
    """Whether a box of an MP4 file that matters goes beyond its end: a fragmented one simply ends earlier then."""
    start, kind = 0, b""
    while start + 8 <= num_bytes:
        file.seek(start)
        header = file.read(16)
        length, kind = int.from_bytes(header[:4]), header[4:8]
        if length == 1:
            length = int.from_bytes(header[8:])
        if length < 8:  # 0: to the end of the file
            return False
        start += length
    return start > num_bytes and kind in (b"moov", b"moof", b"mdat")  # not if it is rubbish behind the last one


def _explain_open_error(path: Path, error: av.error.FFmpegError) -> str:
    with path.open("rb") as file:
        head = file.read(4096)
    if not head.strip(b"\0"):
        return "the file starts with nothing but zeros: it was probably never completely written"
    if head[4:8] == b"ftyp":
        return "the file is cut off or damaged: moov atom not found"
    if all(byte in b"\t\n\r\f" or 32 <= byte < 127 for byte in head):
        return "it is a text file, not a video"
    if isinstance(error, av.error.ArgumentError):
        return f"it is a still image, sound, or of another kind that is not supported: give {', '.join(EXTENSIONS)}"
    return "it is in no video format that FFmpeg knows, or its beginning is missing"


def read_frames(container: InputContainer, stream: VideoStream, run: float = math.inf) -> Iterator[VideoFrame]:
    """Yield the frames in display order; raise UnusableError at the first that is not intact.

    With `run`, only that many packets of every group of pictures are decoded; the others are still inspected.
    """
    count = 0
    left = run
    decoder = stream.codec_context
    never_zeros = decoder.codec.canonical_name in NEVER_ZEROS
    try:
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise UnusableError(f"the file is cut off or damaged after frame {count}")
            if never_zeros and packet.size and HOLE.search(packet):
                raise UnusableError(f"the file has a hole, filled with zeros, after frame {count}")
            left = run if packet.is_keyframe else left - 1
            decoder.skip_frame = "DEFAULT" if left > 0 else "NONKEY"
            for frame in packet.decode():
                if frame.is_corrupt:
                    raise UnusableError(f"frame {count} is damaged")
                yield frame
                count += 1
    except av.error.FFmpegError as error:
        raise UnusableError(f"frame {count} cannot be decoded ({error.strerror})") from error
    if not count:
        raise UnusableError("it holds no frame that can be decoded")


def check_frames(container: InputContainer, stream: VideoStream, run: float = math.inf) -> tuple[VideoFrame, int]:
    """Decode all frames; return the first and their number. `run` and errors as in `read_frames`."""
    # Errors show before the deblocking filter, which takes a fifth of the time.
    stream.codec_context.options |= {"skip_loop_filter": "all"}
    frames = read_frames(container, stream, run)
    first = next(frames)
    return first, 1 + sum(1 for _ in frames)


def require_complete(path: Path, num_packets: int, num_promised: int) -> None:
    """Raise UnusableError if an MP4 file holds fewer packets than its moov atom promises."""
    if num_packets < num_promised:
        # Those that an edit list hides (a video trimmed on a phone) count too.
        with open_source(path, ignore_editlist="1") as (container, stream):
            num_packets = sum(1 for packet in container.demux(stream) if packet.size)
    if num_packets < num_promised:
        found = f"only {num_packets} of its {num_promised} frames can be reached"
        raise UnusableError(f"the file is cut off or damaged: {found}")


@dataclass(frozen=True, slots=True)
class Timing:
    """`rate` in frames per second. Without `origin` frames are evenly spaced and are simply counted."""

    rate: Fraction
    gops: list[int]  # packets from each key frame to the next
    origin: Fraction | None = None  # time of the first frame, in seconds

    @property
    def num_packets(self) -> int:
        return sum(self.gops)

    def tick(self, time: Fraction | None, count: int) -> int:
        """Return the tick, counted from 0 at `rate`, of frame number `count`, shown at `time`."""
        if self.origin is None or time is None:
            return count
        return round((time - self.origin) * self.rate)


def read_timing(container: InputContainer, stream: VideoStream) -> Timing:
    """Read all packets of `stream` without decoding them; leave `container` at its end.

    A video whose frames all fall on their own tick of a constant rate has a constant frame rate, however its container
    rounds. The others keep their clock: a tick without a frame repeats the last one. A clock that runs backwards or
    jumps is ignored.
    """
    times: list[int] = []
    gops: list[int] = []
    is_usable = True
    last_decode_time = None
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if packet.is_keyframe or not gops:
            gops.append(0)
        gops[-1] += 1
        if packet.dts is None:
            is_usable = is_usable and packet.pts is not None and last_decode_time is None
        else:
            is_usable = is_usable and (last_decode_time is None or packet.dts >= last_decode_time)
        last_decode_time = packet.dts
        if not packet.is_discard:
            times.append((packet.dts if packet.pts is None else packet.pts) or 0)
    if container.format.flags & NO_TIMESTAMPS:  # those that FFmpeg makes up for a bare stream mean nothing
        return Timing(_first_plausible(stream.guessed_rate), gops)
    declared = _first_plausible(stream.average_rate, stream.guessed_rate)
    if not is_usable or len(times) < 2 or stream.time_base is None:
        return Timing(declared, gops)
    times.sort()
    unit = float(stream.time_base)
    gaps = [(later - earlier) * unit for earlier, later in pairwise(times)]
    mean, middle = sum(gaps) / len(gaps), median(gaps)
    if mean <= 1 / MAX_FPS or max(gaps) > MAX_GAP_S:
        return Timing(declared, gops)
    origin = times[0] * stream.time_base
    for rate in (declared, _round_rate(1 / mean, declared)):
        clock = Timing(rate, gops, origin)
        if all(clock.tick(time * stream.time_base, 0) == count for count, time in enumerate(times)):
            return Timing(rate, gops)
    # With a few frames missing, the usual gap is the true one; with gaps of all sizes, only their mean makes sense.
    usual = middle if mean / 1.5 < middle else mean
    return Timing(_round_rate(1 / usual, declared), gops, origin)


def _first_plausible(*rates: Fraction | None) -> Fraction:
    return next((rate for rate in rates if rate and 0 < rate <= MAX_FPS), Fraction(25))


def _round_rate(rate: float, declared: Fraction) -> Fraction:
    """Return the declared rate or a usual one if it is within 0.1 %; else `rate` as a fraction."""
    for candidate in (declared, Fraction(round(rate)), Fraction(round(rate * 1.001) * 1000, 1001)):
        if abs(rate / float(candidate or 1) - 1) < 1e-3:
            return candidate
    return Fraction(rate).limit_denominator(1000)


def assign_ticks(frames: Iterator[VideoFrame], timing: Timing) -> Iterator[tuple[int, VideoFrame]]:
    """Yield (tick, frame); ticks never decrease."""
    last = 0
    for count, frame in enumerate(frames):
        time = None if frame.pts is None or frame.time_base is None else frame.pts * frame.time_base
        last = max(last, timing.tick(time, count))
        yield last, frame


def show_frames(frames: Iterator[tuple[int, VideoFrame]]) -> Iterator[tuple[int, VideoFrame]]:
    """Turn (tick, frame) into (end, frame): the frame is shown until tick `end`, which has a frame of its own."""
    tick, shown = 0, None
    for tick, frame in frames:
        if shown is not None:
            yield tick, shown
        shown = frame
    if shown is not None:
        yield tick + 1, shown


def subsample(frames: Iterator[tuple[int, VideoFrame]], stride: int | Fraction) -> Iterator[VideoFrame]:
    """Yield the frame shown at ticks 0, stride, 2 stride, …: a tick without a frame of its own repeats the last one."""
    wanted: int | Fraction = 0
    for end, frame in show_frames(frames):
        while wanted < end:
            yield frame
            wanted += stride
