"""Read videos of any origin, frame by frame and on time, and refuse those that are not intact, with the reason.

Anything that does not decode cleanly makes the whole video unusable: training must never meet a picture that a decoder
had to guess.
"""

import mimetypes
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import dropwhile
from pathlib import Path
from typing import BinaryIO, NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from pipeline.decoding.containers import MAX_PIXELS, main_stream, open_video
from pipeline.decoding.video import times_tell_frames
from shard_tools.encoding.picture import Frames, UnusableError

MAX_GAP_S = 600.0  # a screen may stand still as long; longer, and MAX_JUMP usual gaps, the clock has jumped
MAX_JUMP = 100
MAX_DECLARED_FPS = 1000  # by a header alone
MAX_FPS = 60_000  # by the frames' times; broken ones count units of 1/90,000 s
NO_TIMESTAMPS = 0x80  # AVFMT_NOTIMESTAMPS
# Of a folder, as datasets of frames come: 00001.jpg, img_00001.jpg, …
PICTURE = re.compile(r"(.*?)(\d+)(\.(?:jpe?g|png|bmp|webp))", re.IGNORECASE)

KINDS = mimetypes.MimeTypes()  # of files by their names, the same on every machine
PICTURES = {".heic", ".heif", ".avif", ".jfif", ".mpo"}  # which KINDS does not know everywhere

Open = Callable[[], AbstractContextManager[tuple[InputContainer, VideoStream]]]
ENCODE = "leave out --encode copy"


@contextmanager
def open_source(path: Path, fps: float | None = None, **options: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open the video stream of a file, or a folder of pictures with `fps` of them a second, for decoding on one thread;
    raise UnusableError if there is none. `options` are those of FFmpeg's demuxer."""
    found = path
    if path.is_dir():
        found, options = _describe_frames(path, fps)
    elif path.stat().st_size == 0:
        raise UnusableError("the file is empty")
    try:
        container = open_video(found, **options)
    except av.error.FFmpegError as error:
        raise UnusableError(_explain_open_error(path, error)) from error
    with container:
        stream = main_stream(container)
        if stream is None:
            raise UnusableError("it holds no video" + (", only sound" if container.streams.audio else ""))
        if stream.codec_context is None:
            raise UnusableError("its video codec is not known")
        if stream.width * stream.height > MAX_PIXELS:
            raise UnusableError(f"its pictures of {stream.width}x{stream.height} pixels are beyond any real video's")
        stream.codec_context.thread_count = 1  # the worker processes are the parallelism
        yield container, stream


def list_frames(folder: Path) -> list[Path]:
    """Return the pictures of a folder by number. Raise UnusableError if one is missing, or their names differ."""
    found = [match for name in os.listdir(folder) if (match := PICTURE.fullmatch(name))]
    if not found:
        raise UnusableError("it is a folder without numbered pictures")
    kinds = sorted({(match[1], match[3]) for match in found})
    if len(kinds) > 1:
        raise UnusableError(f"its frames are named in several ways: {' and '.join(map('…'.join, kinds[:2]))}")
    found.sort(key=lambda match: int(match[2]))
    for number, match in enumerate(found, int(found[0][2])):
        if int(match[2]) != number:
            raise UnusableError(f"its frames have a hole or repeat a number: {match[0]} comes in place of {number}")
    return [folder / match[0] for match in found]


def _describe_frames(folder: Path, fps: float | None) -> tuple[Path, dict[str, str]]:
    """Return the pattern of a folder's pictures, and what FFmpeg must be told of it."""
    if fps is None:
        raise UnusableError("it is a folder of frames, which does not say their rate: give --fps")
    match = PICTURE.fullmatch(list_frames(folder)[0].name)
    assert match is not None
    prefix, number, extension = match.groups()
    digits = f"%0{len(number)}d" if number.startswith("0") else "%d"
    pattern = Path(f"{folder.absolute()}/{prefix}".replace("%", "%%") + digits + extension)
    return pattern, {"format_whitelist": "image2", "framerate": f"{fps:g}", "start_number": str(int(number))}


def may_be_video(path: Path, content: BinaryIO | None = None) -> bool:
    """Whether a file without a video's extension holds one. Those whose name says another kind are not opened.

    `content` is that of a file in an archive.
    """
    kind, _ = KINDS.guess_type(path.name)
    if path.suffix.lower() in PICTURES or (kind and not kind.startswith("video/")):
        return False
    try:
        with open_video(content or path) as container:
            return container.format.name != "mjpeg" and main_stream(container) is not None  # no photo
    except (av.error.FFmpegError, OSError):
        return False


def _is_cut_off_matroska(path: Path) -> bool:
    """Whether a Matroska file names a size that goes beyond its end: FFmpeg reads it as if complete."""
    with path.open("rb") as file:
        head = file.read(128)
    at = head.find(b"\x18\x53\x80\x67") + 4  # of a segment's size
    if not head.startswith(b"\x1a\x45\xdf\xa3") or at < 4:
        return False
    # The number of leading zero bits says how long the size is; all ones mean that it was not known.
    length = 9 - head[at].bit_length()
    unknown = (1 << 7 * length) - 1
    size = int.from_bytes(head[at : at + length]) & unknown
    return size != unknown and at + length + size > path.stat().st_size


def _explain_open_error(path: Path, error: av.error.FFmpegError) -> str:
    if path.is_dir():
        return f"its first frame cannot be read ({error.strerror})"
    with path.open("rb") as file:
        head = file.read(4096)
    if not head.strip(b"\0"):
        return "the file starts with nothing but zeros: it was probably never completely written"
    if head[4:8] == b"ftyp":
        return "the file is cut off or damaged: moov atom not found"
    if all(byte in b"\t\n\r\f" or 32 <= byte < 127 for byte in head):
        return "it is a text file, not a video"
    if isinstance(error, av.error.ArgumentError):
        return "it is a still image, sound, or of another kind that is not supported"
    return "it is in no video format that FFmpeg knows, or its beginning is missing"


class SeekPoint(NamedTuple):
    """A key frame from which a video can be decoded, with its number and tick."""

    number: int
    tick: int
    pts: int
    dts: int


START = SeekPoint(0, 0, 0, 0)


def read_frames(container: InputContainer, stream: VideoStream, start: SeekPoint = START) -> Iterator[VideoFrame]:
    """Yield the frames in display order, from `start` on; raise UnusableError at the first that is not intact."""
    count = start.number
    try:
        packets = container.demux(stream)
        if start != START:
            container.seek(start.dts, stream=stream)
            packets = dropwhile(lambda packet: packet.pts != start.pts, packets)  # it may lead to an earlier one
        for packet in packets:
            if packet.is_corrupt:
                raise UnusableError(f"the file is cut off or damaged after frame {count}")
            for frame in packet.decode():
                if start != START and count == start.number and frame.pts != start.pts:
                    if frame.pts is not None and frame.pts < start.pts:  # it needs what was before the key frame
                        continue
                    raise UnusableError(f"it cannot be decoded from frame {count} on")
                if frame.is_corrupt:
                    raise UnusableError(f"frame {count} is damaged")
                yield frame
                count += 1
    except av.error.FFmpegError as error:
        raise UnusableError(f"frame {count} cannot be decoded ({error.strerror})") from error
    if count == start.number:
        raise UnusableError("it holds no frame that can be decoded")


def check_frames(
    container: InputContainer, stream: VideoStream, progress: Callable[[], None] = lambda: None
) -> tuple[VideoFrame, list[int | None]]:
    """Decode all frames; return the first one and all times. `progress` is called after each.

    Raise UnusableError as `read_frames` does, and where a copy would show something else than what is meant: its
    picture turns, changes its size or is interlaced.
    """
    # Errors show before the deblocking filter, which takes a fifth of the time.
    stream.codec_context.options |= {"skip_loop_filter": "all"}
    first, form, times = None, None, list[int | None]()
    for frame in read_frames(container, stream):
        first = first or frame
        form = form or (frame.rotation, frame.width, frame.height)
        if (frame.rotation, frame.width, frame.height) != form:
            raise UnusableError("its picture turns or changes size in the middle, which copies cannot show")
        if frame.interlaced_frame:
            raise UnusableError(f"it is interlaced, which copies stay: {ENCODE}")
        times.append(frame.pts)
        progress()
    assert first is not None  # read_frames raises where there is none
    return first, times


def require_complete(path: Path, container: InputContainer, stream: VideoStream, num_packets: int) -> None:
    """Raise UnusableError if an MP4 or Matroska file, of which `num_packets` were read, lacks what it promises."""
    num_bytes, num_promised = path.stat().st_size, stream.frames
    is_mp4 = container.format.name.startswith("mov")
    reaches_beyond = is_mp4 and any(entry.pos + entry.size > num_bytes for entry in stream.index_entries)
    if reaches_beyond or _is_cut_off_matroska(path):
        raise UnusableError("the file is cut off: it is shorter than it says itself")
    if is_mp4 and num_packets < num_promised:
        # Those that an edit list hides (a video trimmed on a phone) count too.
        with open_source(path, ignore_editlist="1") as (container, stream):
            num_packets = sum(1 for packet in container.demux(stream) if packet.size)
        if num_packets < num_promised:
            found = f"only {num_packets} of its {num_promised} frames can be reached"
            raise UnusableError(f"the file is cut off or damaged: {found}")


@dataclass(frozen=True, slots=True)
class Timing:
    """`rate` in frames per second. Without `ticks` frames are evenly spaced and are simply counted."""

    rate: Fraction
    num_packets: int
    # Of the frames' times in the stream's units, ascending; None: they only tell when the n-th frame is shown.
    times: Sequence[int] | None
    ticks: Sequence[int] | None = None  # of the frames, from 0 at `rate`
    seek_points: list[SeekPoint] = field(default_factory=lambda: [START])  # ascending

    def find_seek_point(self, tick: int) -> SeekPoint:
        """Return the last one that is shown at `tick` or before."""
        return self.seek_points[max(0, bisect_right(self.seek_points, tick, key=lambda point: point.tick) - 1)]

    def tick(self, time: int | None, count: int) -> int:
        """Return the tick of frame number `count`, shown at `time`."""
        if self.ticks is None:
            return count
        index = count if self.times is None or time is None else bisect_left(self.times, time)
        return self.ticks[min(index, len(self.ticks) - 1)]


def read_timing(container: InputContainer, stream: VideoStream) -> Timing:
    """Read all packets of `stream` without decoding them; leave `container` at its end.

    A video whose frames all fall on their own tick of a constant rate has a constant frame rate, however its container
    rounds. The others keep their clock: a tick without a frame repeats the last one. A clock that runs backwards is
    ignored; where it jumps, it is taken to continue.
    """
    packets = [(it.pts, it.dts, it.is_keyframe, it.is_discard) for it in container.demux(stream) if it.size]
    shown = [(pts, dts, is_key) for pts, dts, is_key, is_discard in packets if not is_discard]
    times = sorted((dts if pts is None else pts) or 0 for pts, dts, _ in shown)
    known = times if times_tell_frames(stream, [pts for pts, *_ in shown]) else None
    if container.format.flags & NO_TIMESTAMPS:  # those that FFmpeg makes up for a bare stream mean nothing
        return Timing(_first_plausible(stream.guessed_rate), len(packets), known)
    decoded = [dts for _, dts, *_ in packets if dts is not None]
    is_usable = decoded == sorted(decoded) and all(pts is not None or dts is not None for pts, dts, *_ in packets)
    rate, ticks = _first_plausible(stream.average_rate, stream.guessed_rate), None
    if is_usable and len(times) > 1 and stream.time_base is not None:
        rate, ticks = _fit_clock(times, stream.time_base, rate)
    timing = Timing(rate, len(packets), known, ticks)
    keys = sorted((pts, pts if dts is None else dts) for pts, dts, is_key in shown if is_key and pts is not None)
    if is_usable and known and keys and keys[0][0] == known[0]:
        for pts, dts in keys[1:]:
            number = bisect_left(known, pts)
            timing.seek_points.append(SeekPoint(number, timing.tick(None, number), pts, dts))
    return timing


def _fit_clock(times: list[int], unit: Fraction, declared: Fraction) -> tuple[Fraction, list[int] | None]:
    """Return the rate of frames shown at `times`, ascending, and their ticks, None if every frame has its own."""
    gaps = np.diff(times) * float(unit)
    if gaps.mean() <= 1 / MAX_FPS:
        return declared, None
    # With frames missing, or a still picture, the usual gap is the true one; rounding to milliseconds evens out.
    middle = np.median(gaps)
    typical = gaps[abs(gaps - middle) <= middle / 2]
    usual = typical.mean() if typical.sum() > 0 else gaps.mean()
    gaps[gaps > max(MAX_GAP_S, MAX_JUMP * usual)] = usual
    clock = np.append(0, np.cumsum(gaps))
    for rate in (declared, _round_rate(1 / gaps.mean(), declared)):
        if (np.rint(clock * float(rate)) == np.arange(len(times))).all():
            return rate, None
    rate = _round_rate(1 / usual, declared, float(unit) / max(typical.sum(), usual))
    return rate, np.rint(clock * float(rate)).astype(int).tolist()


def _first_plausible(*rates: Fraction | None) -> Fraction:
    return next((rate for rate in rates if rate and 0 < rate <= MAX_DECLARED_FPS), Fraction(25))


def _round_rate(rate: float, declared: Fraction, error: float = 0) -> Fraction:
    """Return the declared rate or a usual one if it is within 0.1 % or the relative `error`; else `rate` itself."""
    for candidate in (declared, Fraction(round(rate)), Fraction(round(rate * 1.001) * 1000, 1001)):
        if abs(rate / float(candidate or 1) - 1) < max(1e-3, error):
            return candidate
    return Fraction(rate).limit_denominator(1000)


def seek_frames(open_here: Open, timing: Timing, first: int) -> Frames:
    """Yield (tick, frame) from a key frame at or before tick `first` on; from the start if none can be decoded.

    Ticks count from 0, also where a decoder had to wait for a key frame, and never decrease.
    """
    start = timing.find_seek_point(first)
    offset = last = 0
    number: int | None = None
    try:
        with open_here() as (container, stream):
            for number, frame in enumerate(read_frames(container, stream, start), start.number):
                tick = timing.tick(frame.pts, number)
                offset = offset if number else tick
                last = max(last, tick - offset)
                yield last, frame
            return
    except UnusableError:
        if start == START or number is not None:
            raise
    del timing.seek_points[1:]  # none is tried again
    yield from seek_frames(open_here, timing, 0)


def show_frames(frames: Frames) -> Frames:
    """Turn (tick, frame) into (end, frame): the frame is shown until tick `end`, which has a frame of its own."""
    tick, shown = 0, None
    for tick, frame in frames:
        if shown is not None:
            yield tick, shown
        shown = frame
    if shown is not None:
        yield tick + 1, shown


def subsample(frames: Frames, stride: int | Fraction, first: int = 0) -> Iterator[VideoFrame]:
    """Yield the frame shown at ticks first, first + stride, …: a tick without a frame of its own repeats the last."""
    wanted: int | Fraction = first
    for end, frame in show_frames(frames):
        while wanted < end:
            yield frame
            wanted += stride
