"""One source video -> the files that are stored: decode, subsample, convert, encode, and decode again to verify.

A video is decoded once, whatever is cut out of it: segments are encoded side by side. Times are counted in ticks of its
frame rate; a segment begins at its own first frame, whatever the stride. Memory does not grow with a video's length.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple, cast

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from adamae.pipeline.decoding.containers import EXTENSIONS
from adamae.pipeline.shards import arrays
from adamae.pipeline.video_error import VideoError
from adamae.pipeline.videos.opening import open_source
from adamae.pipeline.videos.orientation import display_size, find_flips
from adamae.pipeline.videos.segment import Segment
from adamae.pipeline.videos.source_video import Frames, SourceVideo, read_frames, with_end_ticks
from adamae.shard_tools.codecs import BT601, CODECS, CONTAINER, open_encoder
from adamae.shard_tools.encoding.picture import FrameConverter, deinterlace
from adamae.shard_tools.settings import COPY, Settings

# A fragment per GOP, each decodable behind the first bytes of the file alone (pipeline/shards/gops.py). The trailer, a
# table of the fragments, would be of no use to a clip.
FRAGMENTED = "+frag_keyframe+empty_moov+default_base_moof+skip_trailer"
MAX_OPEN = 16  # segments that overlap are encoded at a time, some 20 MiB each; the others wait for another pass
FPS_TOLERANCE = Fraction("1.01")  # 59.94 fps are 60
ENCODE = "leave out --encode copy"
NEIGHBORS = 2  # frames before a segment that are decoded too: a deinterlacer looks at them
MAX_REORDERED = 16  # frames that are shown before one that they were made from: where it is damaged, they are too
Segments = Mapping[
    Path, Segment | None
]  # by where the file of each goes, without extension; None: all of the video


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


Result = StoredVideo | VideoError  # what becomes of a segment


def staged_file(stem: Path, extension: str) -> Path:
    """Name a file: a worker whose parent was killed may still be at it when the next run begins; each has its own."""
    return stem.with_name(f"{stem.name}-{os.getpid()}.{extension}")


class VideoWriter:
    """Writes frames of one size into one file at a constant rate, and decodes what was stored."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        rate: Fraction,
        size: tuple[int, int],
        fragment: bool = True,
    ):
        self.path, codec, rate = path, CODECS[settings.encode], rate.limit_denominator(100_000)
        # bitexact leaves the libraries' versions out of the container.
        options = {"fflags": "+bitexact"} | ({"movflags": FRAGMENTED} if fragment else {})
        self.container = av.open(str(path.absolute()), "w", format=CONTAINER, options=options)
        options = codec.fill_options(settings.to_json())
        self.stream = cast(
            VideoStream, self.container.add_stream(codec.encoder, rate=rate, options=options)
        )
        context = self.stream.codec_context
        context.width, context.height = size
        context.pix_fmt, context.time_base, context.thread_count = codec.pixel_format, 1 / rate, 1
        context.colorspace, context.color_range = BT601, codec.color_range
        open_encoder(context)
        self.num_frames = 0

    def write(self, frame: VideoFrame) -> None:
        frame.pts = self.num_frames
        frame.time_base = self.stream.codec_context.time_base
        frame.pict_type = 0  # the encoder decides on key frames, not the source
        self.num_frames += 1
        self.container.mux(self.stream.encode(frame))

    def close(self) -> tuple[int, int]:
        """Return width and height of what decodes. Raise VideoError unless it is all that was written."""
        self.container.mux(self.stream.encode(None))
        self.container.close()
        with open_source(self.path) as (container, stream):
            size = stream.width, stream.height
            num_frames = len(check_frames(container, stream)[1])
        if num_frames != self.num_frames:
            raise VideoError(f"{self.num_frames} frames were encoded, but {num_frames} decode")
        return size


class SegmentEncoder:
    """Encodes what is shown in a segment, None: in all of the video, into one file."""

    def __init__(
        self, stem: Path, segment: Segment | None, video: SourceVideo, settings: Settings
    ) -> None:
        """Raise VideoError if the segment is not in the video. `stem`: the file, without extension."""
        self.stem, self.settings, self.stride = stem, settings, settings.frame_stride
        if settings.fps:
            self.stride = max(1, math.floor(video.rate / Fraction(settings.fps) * FPS_TOLERANCE))
        self.rate = video.rate / self.stride
        # The next tick to store.
        self.tick, self.end = video.find_ticks(segment)
        # The tick to decode from.
        self.first = max(0, self.tick - NEIGHBORS)
        # Of its first frame in the source, seconds.
        self.start = float(self.tick / video.rate)
        self.convert = FrameConverter(
            CODECS[settings.encode], settings.short_side, video.pixel_aspect
        )
        self._writer: VideoWriter | None = None

    def add(self, frame: VideoFrame | None, end: float) -> Result | None:
        """Store a frame shown until tick `end`, if any, as often as it is wanted; return the result once whole."""
        try:
            if frame is not None and self.tick < min(end, self.end):
                self._store(self.convert(frame), min(end, self.end))
            return self._finish() if self.end <= end else None
        except VideoError as error:
            return error

    def _store(self, picture: VideoFrame, end: float) -> None:
        if self._writer is None:
            path, size = staged_file(self.stem, CONTAINER), (picture.width, picture.height)
            self._writer = VideoWriter(path, self.settings, self.rate, size)
        while self.tick < end:
            self._writer.write(picture)
            self.tick += self.stride

    def _finish(self) -> StoredVideo:
        if (writer := self._writer) is None:
            raise VideoError("no frame is shown in its segment")
        size, facts = (
            writer.close(),
            (self.settings.encode, writer.num_frames, float(self.rate), self.stride),
        )
        return StoredVideo(writer.path, CONTAINER, *facts, *size, self.start)


def encode_segments(
    source: Path,
    segments: Segments,
    settings: Settings,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Path, Result]]:
    """Store segments of a video; yield each as soon as its file is whole, or the reason why there is none.

    A copied video stays where it is. `progress` is called whenever some of it has been decoded. Raise VideoError at
    what makes all segments unusable that were not yielded yet.
    """
    if not source.is_dir() and arrays.is_array(source):
        array = _keep_array(source)
        refusal = VideoError("segments are cut out of videos, not out of arrays")
        yield from ((stem, refusal if segment else array) for stem, segment in segments.items())
        return
    if source.is_dir() and settings.encode == COPY:
        raise VideoError(
            "it is a folder of frames, which are not stored as they are: leave out --encode copy"
        )
    video = SourceVideo(source, settings.fps)
    if settings.encode == COPY:
        yield next(iter(segments)), _copy(video, progress)
        return
    waiting = []
    for stem, segment in segments.items():
        try:
            waiting.append(SegmentEncoder(stem, segment, video, settings))
        except VideoError as error:
            yield stem, error
    while waiting:
        waiting.sort(key=lambda encoder: encoder.first, reverse=True)
        frames = video.decode(waiting[-1].first)
        if video.is_reordered and None not in segments.values():
            frames = _hold_back(frames, MAX_REORDERED)
        yield from encode_pass(deinterlace(frames), waiting, video, progress)


def encode_pass(
    frames: Frames, waiting: list[SegmentEncoder], video: SourceVideo, progress: Callable[[], None]
) -> Iterator[tuple[Path, Result]]:
    """Encode what is `waiting`, last first, from `frames` as (tick, frame); yield each stem with its result.

    Stop when no other frame is wanted, or none before another key frame: what the next pass must encode is left in
    `waiting`. Damage costs the segments that need frames behind it.
    """

    def begin(encoder: SegmentEncoder) -> int:
        return video.timing.find_seek_point(encoder.first).tick

    encoding: list[SegmentEncoder] = []
    postponed: list[SegmentEncoder] = []
    end: float = begin(waiting[-1])
    try:
        for end, frame in chain(with_end_ticks(frames), [(math.inf, None)]):
            while waiting and waiting[-1].first < end:
                encoder = waiting.pop()
                if len(encoding) < MAX_OPEN:
                    encoding.append(encoder)
                else:
                    postponed.append(encoder)
            for encoder in list(encoding):
                if result := encoder.add(frame, end):
                    encoding.remove(encoder)
                    yield encoder.stem, result
            progress()
            if not encoding and not (waiting and begin(waiting[-1]) <= end):
                break
    except VideoError as error:
        lost = [*encoding, *(encoder for encoder in waiting if begin(encoder) <= end)]
        waiting[:] = [encoder for encoder in waiting if encoder not in lost]
        yield from ((encoder.stem, error) for encoder in lost)
    waiting += postponed


def _keep_array(source: Path) -> StoredVideo:
    """Keep an array as it is, whatever the settings say of videos."""
    num_frames, height, width, channels = arrays.map_frames(source).shape
    return StoredVideo(
        source,
        arrays.CONTAINER,
        arrays.codec_name(channels),
        num_frames,
        arrays.FPS,
        1,
        width,
        height,
    )


def _hold_back(frames: Frames, count: int) -> Frames:
    """Pass on frames; where they end in an error, not the last `count` before it."""
    held = deque(islice(frames, count))
    for frame in frames:
        held.append(frame)
        yield held.popleft()
    yield from held


def _copy(video: SourceVideo, progress: Callable[[], None]) -> StoredVideo:
    """Decode a video to see that it is intact, which takes a fifth of the time of encoding.

    Raise VideoError too where clips would show other pictures than those that are meant; only encoding could mend it.
    """
    with video.open() as (container, stream):
        first, times = check_frames(container, stream, progress)
        is_ordered = None not in times and all(
            earlier < later  # type: ignore[operator]
            for earlier, later in pairwise(times)
        )
        if (
            video.timing.times is not None
            and not is_ordered
            and len(times) == len(video.timing.times)
        ):
            raise VideoError(f"its times do not tell in which order its frames are shown: {ENCODE}")
        flips, codec = find_flips(first), stream.codec_context.codec
        if len(flips) % 2:
            raise VideoError(f"it is to be shown mirrored, which copies are not: {ENCODE}")
        size = map(round, display_size(first, stream.sample_aspect_ratio, flips))
        own = video.path.suffix.lower().removeprefix(".")
        usual = EXTENSIONS.get(container.format.name.split(",")[0], (own,))
        extension = own if own in usual else usual[0]
        return StoredVideo(
            video.path, extension, codec.canonical_name, len(times), float(video.rate), 1, *size
        )


def check_frames(
    container: InputContainer, stream: VideoStream, progress: Callable[[], None] = lambda: None
) -> tuple[VideoFrame, list[int | None]]:
    """Decode all frames; return the first one and all times. `progress` is called after each.

    Raise VideoError as `read_frames` does, and where a copy would show something else than what is meant: its
    picture turns, changes its size or is interlaced.
    """
    # Errors show before the deblocking filter, which takes a fifth of the time.
    stream.codec_context.options |= {"skip_loop_filter": "all"}
    first: VideoFrame | None = None
    times: list[int | None] = []
    for frame in read_frames(container, stream):
        if first is None:
            first = frame
            first_form = (frame.rotation, frame.width, frame.height)
        if (frame.rotation, frame.width, frame.height) != first_form:
            raise VideoError(
                "its picture turns or changes size in the middle, which copies cannot show"
            )
        if frame.interlaced_frame:
            raise VideoError(f"it is interlaced, which copies stay: {ENCODE}")
        times.append(frame.pts)
        progress()
    # read_frames raises where there is none.
    assert first is not None
    return first, times
