"""Encode segments of a video side by side, while it is decoded once.

Times are counted in ticks of the source's frame rate. Every segment begins at its own first frame, whatever the stride.
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
NEIGHBORS = 2  # frames before a segment that are decoded too: a deinterlacer looks at them
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


Result = StoredVideo | UnusableError  # what becomes of a segment


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


class SegmentEncoder:
    """Encodes what is shown in a segment, None: in all of the video, into one file."""

    def __init__(
        self, stem: Path, segment: Segment | None, timing: Timing, settings: Settings, pixel_aspect: Fraction | None
    ) -> None:
        """Raise UnusableError if the segment is not in the video. `stem`: the file, without extension."""
        self.stem, self.settings, self.source_rate = stem, settings, timing.rate
        self.stride = settings.frame_stride
        if settings.fps:
            self.stride = max(1, math.floor(timing.rate / Fraction(settings.fps) * FPS_TOLERANCE))
        self.wanted, self.end = find_ticks(segment, timing) if segment else (0, math.inf)  # the next tick to store
        self.first = max(0, self.wanted - NEIGHBORS)  # tick to decode from
        self.start = float(self.wanted / timing.rate)
        self.convert = FrameConverter(CODECS[settings.encode], settings.short_side, pixel_aspect)
        self._writer: VideoWriter | None = None

    def add(self, frame: VideoFrame, end: int) -> Result | None:
        """Store a frame that is shown until tick `end` as often as it is wanted; return the result once it is whole."""
        try:
            if self.wanted < min(end, self.end):
                self._store(self.convert(frame), min(end, self.end))
        except UnusableError as error:
            return error
        return self.finish() if self.end <= end else None

    def _store(self, picture: VideoFrame, end: float) -> None:
        if self._writer is None:
            path = self.stem.with_name(f"{self.stem.name}.{CONTAINER}")
            size = picture.width, picture.height
            self._writer = VideoWriter(path, self.settings, self.source_rate / self.stride, size)
        while self.wanted < end:
            self._writer.write(picture)
            self.wanted += self.stride

    def finish(self) -> Result:
        """Return what is stored: no other frame comes."""
        if self._writer is None:
            return UnusableError("no frame is shown in its segment")
        try:
            size = self._writer.close()
        except UnusableError as error:
            return error
        codec, fps = self.settings.encode, float(self.source_rate / self.stride)
        path, num_frames = self._writer.path, self._writer.num_frames
        return StoredVideo(path, CONTAINER, codec, num_frames, fps, self.stride, *size, self.start)


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


def encode_segments(
    frames: Iterator[tuple[int, VideoFrame]],
    waiting: list[SegmentEncoder],
    timing: Timing,
    progress: Callable[[], None],
) -> Iterator[tuple[Path, Result]]:
    """Encode what is `waiting`, last first, from `frames` as (tick, frame); stop when no other frame is wanted, or none
    before another key frame. Yield each stem with its result.

    What another pass must encode is left in `waiting`. Damage costs the segments that need frames behind it.
    """
    encoding: list[SegmentEncoder] = []
    postponed: list[SegmentEncoder] = []
    end = timing.find_seek_point(waiting[-1].first).tick  # where the frames begin
    try:
        for end, frame in show_frames(frames):
            while waiting and waiting[-1].first < end:
                (encoding if len(encoding) < MAX_OPEN else postponed).append(waiting.pop())
            for encoder in list(encoding):
                if result := encoder.add(frame, end):
                    encoding.remove(encoder)
                    yield encoder.stem, result
            progress()
            if not encoding and not (waiting and timing.find_seek_point(waiting[-1].first).tick <= end):
                break
        else:
            yield from ((encoder.stem, encoder.finish()) for encoder in [*encoding, *reversed(waiting)])
            waiting.clear()
    except UnusableError as error:
        behind = [encoder for encoder in waiting if timing.find_seek_point(encoder.first).tick > end]
        yield from ((encoder.stem, error) for encoder in [*encoding, *waiting] if encoder not in behind)
        waiting[:] = behind
    waiting += postponed
