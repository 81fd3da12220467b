"""One source video -> the files that are stored: decode, subsample, convert, encode, and decode again to verify.

A video is decoded once, whatever is cut out of it. Memory does not grow with its length.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from pipeline.decoding.containers import EXTENSIONS
from pipeline.shards import arrays
from pipeline.video_error import VideoError
from shard_tools.encoding.cuts import Result, SegmentEncoder, StoredVideo, encode_segments
from shard_tools.encoding.frames import open_frames
from shard_tools.encoding.picture import Pose, UnusableError, deinterlace
from shard_tools.encoding.source import (
    ENCODE,
    Timing,
    check_frames,
    open_source,
    read_timing,
    require_complete,
    seek_frames,
)
from shard_tools.inputs.item import Segment
from shard_tools.settings import COPY, Settings

MAX_REORDERED = 16  # frames that are shown before one that they were made from: where it is damaged, they are too
Segments = Mapping[Path, Segment | None]  # by where the file of each goes, without extension; None: all of the video
T = TypeVar("T")


def store_video(source: Path, stem: Path, settings: Settings) -> StoredVideo:
    """Store all of a video. Raise UnusableError."""
    ((_, result),) = store_segments(source, {stem: None}, settings)
    if isinstance(result, UnusableError):
        raise result
    return result


def store_segments(
    source: Path, segments: Segments, settings: Settings, progress: Callable[[], None] = lambda: None
) -> Iterator[tuple[Path, Result]]:
    """Store segments of a video; yield each as soon as its file is whole, or the reason why there is none.

    A copied video stays where it is. `progress` is called whenever some of it has been decoded. Raise UnusableError at
    what makes all segments unusable that were not yielded yet.
    """
    before = source.stat()
    for result in _store_segments(source, segments, settings, progress):
        after = source.stat()
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):  # an unfinished download, say
            raise UnusableError("it was changed while it was read")
        yield result


def _store_segments(
    source: Path, segments: Segments, settings: Settings, progress: Callable[[], None]
) -> Iterator[tuple[Path, Result]]:
    if not source.is_dir() and arrays.is_array(source):
        array = _keep_array(source)
        refusal = UnusableError("segments are cut out of videos, not out of arrays")
        yield from ((stem, refusal if segment else array) for stem, segment in segments.items())
        return
    if source.is_dir() and settings.encode == COPY:
        raise UnusableError("it is a folder of frames, which are not stored as they are: leave out --encode copy")
    open_here = partial(open_frames, source, settings.fps) if source.is_dir() else partial(open_source, source)
    with open_here() as (container, stream):
        timing, pixel_aspect = read_timing(container, stream), stream.sample_aspect_ratio
        is_reordered = bool(stream.codec_context.has_b_frames)
        if not timing.num_packets:
            raise UnusableError("it holds no frame")
        if container.format.name == "mjpeg" and timing.num_packets == 1:
            raise UnusableError("it is a still image")
        if not source.is_dir():
            require_complete(source, container, stream, timing.num_packets)
    if settings.encode == COPY:
        yield next(iter(segments)), _copy(source, timing, progress)
        return
    waiting = []
    for stem, segment in segments.items():
        try:
            waiting.append(SegmentEncoder(stem, segment, timing, settings, pixel_aspect))
        except UnusableError as error:
            yield stem, error
    while waiting:
        waiting.sort(key=lambda encoder: encoder.first, reverse=True)
        frames = seek_frames(open_here, timing, waiting[-1].first)
        if is_reordered and None not in segments.values():
            frames = _hold_back(frames, MAX_REORDERED)
        yield from encode_segments(deinterlace(frames), waiting, timing, progress)


def _keep_array(source: Path) -> StoredVideo:
    """Keep an array as it is, whatever the settings say of videos."""
    try:
        num_frames, height, width, channels = arrays.map_frames(source).shape
    except VideoError as error:
        raise UnusableError(str(error)) from error
    return StoredVideo(source, arrays.CONTAINER, arrays.codec_name(channels), num_frames, arrays.FPS, 1, width, height)


def _hold_back(frames: Iterator[T], count: int) -> Iterator[T]:
    """Pass on frames; where they end in an error, not the last `count` before it."""
    held: deque[T] = deque()
    for frame in frames:
        held.append(frame)
        if len(held) > count:
            yield held.popleft()
    yield from held


def _copy(source: Path, timing: Timing, progress: Callable[[], None]) -> StoredVideo:
    """Decode `source` to see that it is intact, which takes a fifth of the time of encoding. Raise UnusableError too
    where clips would show other pictures than those that are meant: a copy has no place for what only its encoding
    could mend."""
    with open_source(source) as (container, stream):
        first, times = check_frames(container, stream, progress)
        is_ordered = None not in times and all(earlier < later for earlier, later in pairwise(times))  # type: ignore
        if timing.times is not None and not is_ordered and len(times) == len(timing.times):
            raise UnusableError(f"its times do not tell in which order its frames are shown: {ENCODE}")
        pose = Pose.read(first, stream.sample_aspect_ratio)
        if pose.is_mirrored:
            raise UnusableError(f"it is to be shown mirrored, which copies are not: {ENCODE}")
        size, codec = map(round, pose.display_size(first.width, first.height)), stream.codec_context.codec
        own = source.suffix.lower().removeprefix(".")
        usual = EXTENSIONS.get(container.format.name.split(",")[0], (own,))
        extension = own if own in usual else usual[0]
        return StoredVideo(source, extension, codec.canonical_name, len(times), float(timing.rate), 1, *size)
