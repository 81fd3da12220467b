"""Cut a stream of frames: what several parts of a video want of it is encoded side by side, while it is decoded once.

Times are counted in ticks of the source's frame rate. Every part begins at its own first frame, whatever the stride.
"""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, cast

import av
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from shard_tools.encoding.codecs import CODECS, CONTAINER, open_encoder
from shard_tools.encoding.picture import BT601, FULL, LIMITED, FrameConverter, UnusableError
from shard_tools.encoding.source import Timing, check_frames, open_source, show_frames
from shard_tools.inputs.item import Segment
from shard_tools.settings import Settings

# A fragment per GOP, each decodable behind the first bytes of the file alone (pipeline/shards/gops.py). The trailer, a
# table of the fragments, would be of no use to a clip.
FRAGMENTED = "+frag_keyframe+empty_moov+default_base_moof+skip_trailer"
MAX_OPEN = 16  # segments that overlap are encoded at a time, some 20 MiB each; the others wait for another pass
MAX_EXCESS_S = 0.5  # of a segment beyond the video's end: annotations round
FPS_TOLERANCE = Fraction("1.01")  # 59.94 fps are 60
NEIGHBORS = 2  # frames before a cut that are decoded too: a deinterlacer looks at them
EARLY_FRAMES = 0.05  # by so much a frame may be shown before a segment's start: times are rounded to milliseconds


class StoredVideo(NamedTuple):
    """One file to put into a shard; all but the path are fields of its Sample."""

    path: Path
    container: str
    codec: str
    num_frames: int
    fps: float
    frame_stride: int
    width: int
    height: int
    start: float = 0.0  # of its first frame in the source, seconds


class Cut(NamedTuple):
    """A part of a video that is to be stored in files `stem`-<number>: a segment, or else a piece of clip_seconds."""

    stem: Path
    segment: Segment | None = None
    piece: int = 0
    is_last: bool = True  # of the pieces: it stands for all that follows


class Result(NamedTuple):
    """The files of a cut, or why there are none."""

    cut: Cut
    files: list[StoredVideo]
    problem: UnusableError | None = None


class VideoWriter:
    """Writes frames of one size into one file at a constant rate, and decodes what was stored."""

    def __init__(self, path: Path, settings: Settings, rate: Fraction, size: tuple[int, int]):
        self.path, codec, rate = path, CODECS[settings.encode], rate.limit_denominator(100_000)
        # bitexact leaves the libraries' versions out of the container.
        options = {"fflags": "+bitexact", "movflags": FRAGMENTED}
        self.container = av.open(str(path.absolute()), "w", format=CONTAINER, options=options)
        encoder_options = codec.fill_options(settings.gop, settings.quality, settings.preset, settings.tune)
        self.stream = cast(VideoStream, self.container.add_stream(codec.encoder, rate=rate, options=encoder_options))
        context = self.stream.codec_context
        context.width, context.height = size
        context.pix_fmt = codec.pixel_format
        context.time_base = 1 / rate
        context.thread_count = 1
        context.colorspace = BT601
        context.color_range = FULL if codec.full_range else LIMITED
        open_encoder(context)
        self.num_frames = 0

    def write(self, frame: VideoFrame) -> None:
        frame.pts = self.num_frames
        frame.time_base = self.stream.codec_context.time_base
        frame.pict_type = 0  # the encoder decides on key frames, not the source
        self.num_frames += 1
        self.container.mux(self.stream.encode(frame))

    def close(self) -> tuple[int, int]:
        """Return width and height of what decodes. Raise UnusableError unless it is all that was written."""
        self.container.mux(self.stream.encode(None))
        self.container.close()
        with open_source(self.path) as (container, stream):
            size = stream.width, stream.height
            num_frames = len(check_frames(container, stream)[1])
        if num_frames != self.num_frames:
            raise UnusableError(f"{self.num_frames} frames were encoded, but {num_frames} decode")
        return size


class Part:
    """Encodes what is shown in a cut, from tick `first` on and before `end`."""

    def __init__(self, cut: Cut, timing: Timing, settings: Settings, pixel_aspect: Fraction | None) -> None:
        self.cut, self.settings = cut, settings
        self.stride, self.source_rate = settings.frame_stride, timing.rate
        if settings.fps:
            self.stride = max(1, math.floor(timing.rate / Fraction(settings.fps) * FPS_TOLERANCE))
        self.max_frames = math.inf  # of a file
        if settings.clip_seconds and cut.segment is None:
            self.max_frames = max(1, round(settings.clip_seconds * timing.rate / self.stride))
        if cut.segment:
            self.wanted, self.end = find_ticks(cut.segment, timing)
        else:
            ticks = self.max_frames * self.stride
            self.wanted = cut.piece * int(ticks) if cut.piece else 0
            self.end = math.inf if cut.is_last else self.wanted + ticks
        self.convert = FrameConverter(CODECS[settings.encode], settings.short_side, pixel_aspect)
        self.first = max(0, self.wanted - NEIGHBORS)  # tick to decode from; `wanted` is the next one to store
        self.files: list[StoredVideo] = []
        self._writer: VideoWriter | None = None

    def add(self, frame: VideoFrame, end: int) -> Result | None:
        """Store a frame that is shown until tick `end` as often as it is wanted; return the result once it is whole."""
        try:
            self._encode(frame, end)
        except UnusableError as error:
            return Result(self.cut, [], error)
        return self.finish() if self.end <= end else None

    def finish(self) -> Result:
        """Return what is stored: no other frame comes."""
        try:
            self._end_file()
        except UnusableError as error:
            return Result(self.cut, [], error)
        is_empty = self.cut.segment and not self.files
        return Result(self.cut, self.files, UnusableError("no frame is shown in its segment") if is_empty else None)

    def _encode(self, frame: VideoFrame, end: int) -> None:
        picture = None
        while self.wanted < min(end, self.end):
            picture = picture or self.convert(frame)
            if self._writer is None:
                self._start = float(self.wanted / self.source_rate)
                path = self.cut.stem.with_name(f"{self.cut.stem.name}-{len(self.files):04d}.{CONTAINER}")
                size = picture.width, picture.height
                self._writer = VideoWriter(path, self.settings, self.source_rate / self.stride, size)
            self._writer.write(picture)
            self.wanted += self.stride
            if self._writer.num_frames == self.max_frames:
                self._end_file()

    def _end_file(self) -> None:
        """Finish the open file, if one is. Raise UnusableError if it does not decode."""
        if (writer := self._writer) is not None:
            size, fps, codec = writer.close(), float(self.source_rate / self.stride), self.settings.encode
            self.files.append(
                StoredVideo(writer.path, CONTAINER, codec, writer.num_frames, fps, self.stride, *size, self._start)
            )
            self._writer = None


def find_ticks(segment: Segment, timing: Timing) -> tuple[int, float]:
    """Return the first tick of a segment and the one after its last. Raise UnusableError if it is not in the video."""
    num_frames = timing.num_packets
    num_ticks = timing.tick(None, num_frames - 1) + 1
    unit = 1 if segment.in_frames else timing.rate
    length = num_frames if segment.in_frames else num_ticks
    first, end = (
        value if value == math.inf else math.ceil(Fraction(repr(value)) * unit - Fraction(EARLY_FRAMES))
        for value in (float(segment.start), float(segment.end))
    )
    has = f"{num_frames} frames" if segment.in_frames else f"{float(num_ticks / timing.rate):.6g} seconds"
    if first >= length:
        raise UnusableError(f"its segment starts at {segment.start:g}, and the video has {has}")
    if end != math.inf and end > length + MAX_EXCESS_S * timing.rate:
        raise UnusableError(f"its segment ends at {segment.end:g}, and the video has {has}")
    if segment.in_frames:
        first, end = timing.tick(None, int(first)), timing.tick(None, int(end)) if end < num_frames else math.inf
    if first >= end:
        raise UnusableError(f"its segment from {segment.start:g} to {segment.end:g} is shorter than a frame")
    return int(first), end


def encode_parts(
    frames: Iterator[tuple[int, VideoFrame]], waiting: list[Part], timing: Timing, progress: Callable[[], None]
) -> Iterator[Result]:
    """Encode what is `waiting`, last part first, from `frames` as (tick, frame); stop when no other frame is wanted, or
    none before another key frame.

    What another pass must encode is left in `waiting`. Damage costs the parts that need frames behind it.
    """
    encoding: list[Part] = []
    postponed: list[Part] = []
    end = timing.find_seek_point(waiting[-1].first).tick  # where the frames begin
    try:
        for end, frame in show_frames(frames):
            while waiting and waiting[-1].first < end:
                (encoding if len(encoding) < MAX_OPEN else postponed).append(waiting.pop())
            for part in list(encoding):
                if result := part.add(frame, end):
                    encoding.remove(part)
                    yield result
            progress()
            if not encoding and not (waiting and timing.find_seek_point(waiting[-1].first).tick <= end):
                break
        else:
            yield from (part.finish() for part in [*encoding, *reversed(waiting)])
            waiting.clear()
    except UnusableError as error:
        behind = [part for part in waiting if timing.find_seek_point(part.first).tick > end]
        yield from (Result(part.cut, [], error) for part in [*encoding, *waiting] if part not in behind)
        waiting[:] = behind
    waiting += postponed
