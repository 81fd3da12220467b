"""Encode a source video into the files that are stored, and decode each again to verify it.

A video is decoded once, whatever is cut out of it: segments are encoded side by side. Times are
counted in ticks of its frame rate; a segment begins at its own first frame, whatever the stride.
Memory does not grow with a video's length.
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

# A fragment per GOP, each decodable behind the first bytes of the file alone (docs/shards.md). The
# trailer, a table of the fragments, would be of no use to a clip.
FRAGMENTED = "+frag_keyframe+empty_moov+default_base_moof+skip_trailer"
# Overlapping segments that are encoded at a time, some 20 MiB each; the others wait for another
# pass.
MAX_OPEN = 16
# 59.94 fps count as 60, and 23.976 as 24, of which 7.992 are stored for --fps 8.
FPS_TOLERANCE = Fraction("1.01")
# Ends messages about what only encoding can mend.
ENCODE = "leave out --encode copy"
# Frames before a segment that are decoded too: a deinterlacer looks at them.
NEIGHBORS = 2
# Damage to a frame also damages frames that are shown before it but were made from it. H.264 and
# HEVC hold back at most 16 frames for reordering.
MAX_REORDERED = 16
# The stem of each file (its path without extension) and the segment to store; None: all of the
# video.
Segments = Mapping[Path, Segment | None]


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
    # Seconds in the source at which the first frame is shown.
    start: float = 0.0


# What becomes of a segment.
Result = StoredVideo | VideoError


def staged_file(stem: Path, extension: str) -> Path:
    """Return the path of this process's file for a stem.

    A worker whose parent was killed may still write when the next run begins: each has its own.
    """
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
    ) -> None:
        """Open the file; `size` is (width, height). Without `fragment` it is an ordinary MP4."""
        self.path = path
        self.num_frames = 0
        codec = CODECS[settings.encode]
        # FFmpeg's fractions have 32 bits, and a rate that follows from times may need more.
        rate = rate.limit_denominator(100_000)
        # bitexact leaves the libraries' versions out of the container.
        container_options = {"fflags": "+bitexact"}
        if fragment:
            container_options["movflags"] = FRAGMENTED
        self.container = av.open(
            str(path.absolute()), "w", format=CONTAINER, options=container_options
        )
        encoder_options = codec.fill_options(settings.to_json())
        self.stream = cast(
            VideoStream,
            self.container.add_stream(codec.encoder, rate=rate, options=encoder_options),
        )
        context = self.stream.codec_context
        context.width, context.height = size
        context.pix_fmt = codec.pixel_format
        context.time_base = 1 / rate
        context.thread_count = 1
        context.colorspace = BT601
        context.color_range = codec.color_range
        open_encoder(context)

    def write(self, frame: VideoFrame) -> None:
        frame.pts = self.num_frames
        frame.time_base = self.stream.codec_context.time_base
        # The encoder decides on key frames, not the source.
        frame.pict_type = 0
        self.num_frames += 1
        self.container.mux(self.stream.encode(frame))

    def close(self) -> tuple[int, int]:
        """Finish the file, decode it, and return the width and height of its frames.

        Raise VideoError unless all frames that were written decode.
        """
        self.container.mux(self.stream.encode(None))
        self.container.close()
        with open_source(self.path) as (container, stream):
            width = stream.width
            height = stream.height
            _, times = check_frames(container, stream)
        if len(times) != self.num_frames:
            raise VideoError(f"{self.num_frames} frames were encoded, but {len(times)} decode")
        return width, height


class SegmentEncoder:
    """Encodes the frames of a segment, or of the whole video for None, into one file."""

    def __init__(
        self, stem: Path, segment: Segment | None, video: SourceVideo, settings: Settings
    ) -> None:
        """Raise VideoError if the segment is not in the video.

        `stem` is the path of the file to write, without extension.
        """
        self.stem = stem
        self.settings = settings
        self.stride = settings.frame_stride
        if settings.fps:
            exact_stride = video.rate / Fraction(settings.fps) * FPS_TOLERANCE
            self.stride = max(1, math.floor(exact_stride))
        self.rate = video.rate / self.stride
        # The next tick to store, and the one after the segment's last.
        self.tick, self.end = video.find_ticks(segment)
        # The tick to decode from.
        self.first = max(0, self.tick - NEIGHBORS)
        # Seconds in the source at which the first frame is shown.
        self.start = float(self.tick / video.rate)
        self.convert = FrameConverter(
            CODECS[settings.encode], settings.short_side, video.pixel_aspect
        )
        self._writer: VideoWriter | None = None

    def add(self, frame: VideoFrame | None, end: float) -> Result | None:
        """Store a frame that is shown until tick `end` once for every stored tick in that time.

        Without a frame the video is over. Return the result once the segment is complete.
        """
        try:
            shown_until = min(end, self.end)
            if frame is not None and self.tick < shown_until:
                self._store(self.convert(frame), shown_until)
            if self.end <= end:
                return self._finish()
        except VideoError as error:
            return error
        return None

    def _store(self, picture: VideoFrame, end: float) -> None:
        if self._writer is None:
            path = staged_file(self.stem, CONTAINER)
            size = (picture.width, picture.height)
            self._writer = VideoWriter(path, self.settings, self.rate, size)
        while self.tick < end:
            self._writer.write(picture)
            self.tick += self.stride

    def _finish(self) -> StoredVideo:
        if self._writer is None:
            raise VideoError("no frame is shown in its segment")
        width, height = self._writer.close()
        return StoredVideo(
            self._writer.path,
            CONTAINER,
            self.settings.encode,
            self._writer.num_frames,
            float(self.rate),
            self.stride,
            width,
            height,
            self.start,
        )


def encode_segments(
    source: Path,
    segments: Segments,
    settings: Settings,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Path, Result]]:
    """Store segments of a video; yield (stem, result) for each as soon as its file is whole.

    A copied video stays where it is. `progress` is called whenever some of the video has been
    decoded. Raise VideoError for what makes all segments unusable that were not yielded yet.
    """
    if not source.is_dir() and arrays.is_array(source):
        yield from _keep_array(source, segments)
        return
    if source.is_dir() and settings.encode == COPY:
        raise VideoError(
            "it is a folder of frames, which are not stored as they are: leave out --encode copy"
        )
    video = SourceVideo(source, settings.fps)
    if settings.encode == COPY:
        # make_shards refuses to copy segments, so the whole video is all there is to store.
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
        # The whole video is lost with any damage, so nothing of it need be held back.
        if video.is_reordered and None not in segments.values():
            frames = _hold_back(frames, MAX_REORDERED)
        yield from encode_pass(deinterlace(frames), waiting, video, progress)


def encode_pass(
    frames: Frames, waiting: list[SegmentEncoder], video: SourceVideo, progress: Callable[[], None]
) -> Iterator[tuple[Path, Result]]:
    """Encode segments from one pass over (tick, frame); yield each stem with its result.

    `waiting` is sorted with the first segment last, and what the next pass must encode remains in
    it. The pass stops when no segment needs the next frames, or none of those before the key frame
    that the next segment can be decoded from. Damage costs the segments that need frames behind it.

    Example: of segments at 0 to 10 s, 5 to 15 s and 600 to 610 s the pass encodes the first two,
    side by side, and stops at 15 s, if there is a key frame later than that at or before 600 s.
    """

    def find_key_tick(encoder: SegmentEncoder) -> int:
        return video.timing.find_seek_point(encoder.first).tick

    encoding: list[SegmentEncoder] = []
    postponed: list[SegmentEncoder] = []
    end: float = find_key_tick(waiting[-1])
    # At infinity without a frame, segments end that last as long as the video.
    end_of_video = [(math.inf, None)]
    try:
        for end, frame in chain(with_end_ticks(frames), end_of_video):
            while waiting and waiting[-1].first < end:
                encoder = waiting.pop()
                if len(encoding) < MAX_OPEN:
                    encoding.append(encoder)
                else:
                    postponed.append(encoder)
            for encoder in list(encoding):
                result = encoder.add(frame, end)
                if result is not None:
                    encoding.remove(encoder)
                    yield encoder.stem, result
            progress()
            if not encoding and not (waiting and find_key_tick(waiting[-1]) <= end):
                break
    except VideoError as error:
        # A segment whose key frame lies behind the damage can be decoded by another pass.
        lost = encoding + [encoder for encoder in waiting if find_key_tick(encoder) <= end]
        waiting[:] = [encoder for encoder in waiting if encoder not in lost]
        for encoder in lost:
            yield encoder.stem, error
    waiting += postponed


def _keep_array(source: Path, segments: Segments) -> Iterator[tuple[Path, Result]]:
    """Keep an array as it is, whatever the settings for videos are; refuse segments of it."""
    num_frames, height, width, channels = arrays.map_frames(source).shape
    array = StoredVideo(
        source,
        arrays.CONTAINER,
        arrays.codec_name(channels),
        num_frames,
        arrays.FPS,
        frame_stride=1,
        width=width,
        height=height,
    )
    for stem, segment in segments.items():
        if segment is None:
            yield stem, array
        else:
            yield stem, VideoError("segments are cut out of videos, not out of arrays")


def _hold_back(frames: Frames, count: int) -> Frames:
    """Pass on frames, but if they end in an error, not the last `count` before it."""
    held = deque(islice(frames, count))
    for frame in frames:
        held.append(frame)
        yield held.popleft()
    yield from held


def _copy(video: SourceVideo, progress: Callable[[], None]) -> StoredVideo:
    """Decode a video to see that it is intact, which takes a fifth of the time of encoding.

    Raise VideoError, also where clips of a copy would show something else than the video: only
    encoding could mend that.
    """
    with video.open() as (container, stream):
        first, times = check_frames(container, stream, progress)
        _require_ordered(video, times)
        flips = find_flips(first)
        # Each flip mirrors the picture; two of them make a rotation.
        if len(flips) in (1, 3):
            raise VideoError(f"it is to be shown mirrored, which copies are not: {ENCODE}")
        width, height = display_size(first, stream.sample_aspect_ratio, flips)
        # A name of a shard's file tells its format, so one that misleads is not kept.
        own = video.path.suffix.lower().removeprefix(".")
        usual = EXTENSIONS.get(container.format.name.split(",")[0], (own,))
        return StoredVideo(
            video.path,
            own if own in usual else usual[0],
            stream.codec_context.codec.canonical_name,
            len(times),
            float(video.rate),
            frame_stride=1,
            width=round(width),
            height=round(height),
        )


def _require_ordered(video: SourceVideo, times: list[int | None]) -> None:
    """Raise VideoError if frames decode in another order than the packets' times tell readers."""
    if video.timing.times is None or len(times) != len(video.timing.times):
        return
    known_times = [time for time in times if time is not None]
    is_ordered = all(earlier < later for earlier, later in pairwise(known_times))
    if len(known_times) < len(times) or not is_ordered:
        raise VideoError(f"its times do not tell in which order its frames are shown: {ENCODE}")


def check_frames(
    container: InputContainer, stream: VideoStream, progress: Callable[[], None] = lambda: None
) -> tuple[VideoFrame, list[int | None]]:
    """Decode all frames; return the first one and all times. `progress` is called after each.

    Raise VideoError as `read_frames` does, and where a copy would show something else than the
    video: its picture turns, changes its size or is interlaced.
    """
    # Errors show before the deblocking filter, which takes a fifth of the time.
    stream.codec_context.options |= {"skip_loop_filter": "all"}
    first: VideoFrame | None = None
    times: list[int | None] = []
    for frame in read_frames(container, stream):
        form = (frame.rotation, frame.width, frame.height)
        if first is None:
            first = frame
            first_form = form
        if form != first_form:
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
