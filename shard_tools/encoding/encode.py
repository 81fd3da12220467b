"""One source video -> the files that are stored: decode, cut, subsample, convert, encode, and decode again to verify.

A video is decoded once, whatever is cut out of it. Memory does not grow with its length.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

from av.video.frame import VideoFrame

from pipeline.decoding.containers import EXTENSIONS
from pipeline.decoding.video import UPRIGHT, count_turns
from pipeline.shards import arrays
from pipeline.video_error import VideoError
from shard_tools.encoding.cuts import Cut, Part, Result, StoredVideo, encode_parts
from shard_tools.encoding.frames import open_frames, require_one_size
from shard_tools.encoding.picture import Pose, UnusableError, deinterlace
from shard_tools.encoding.source import (
    ENCODE,
    START,
    Open,
    Timing,
    assign_ticks,
    check_frames,
    open_source,
    read_frames,
    read_timing,
    require_complete,
)
from shard_tools.settings import COPY, Settings

MAX_REORDERED = 16  # frames that are shown before one that they were made from: where it is damaged, they are too


def store_video(source: Path, stem: Path, settings: Settings) -> list[StoredVideo]:
    """Store all of a video in one file, or several with `clip_seconds`. Raise UnusableError."""
    ((_, files, problem),) = store_cuts(source, [Cut(stem)], settings)
    if problem:
        raise problem
    return files


def store_cuts(
    source: Path, cuts: Sequence[Cut], settings: Settings, progress: Callable[[], None] = lambda: None
) -> Iterator[Result]:
    """Store parts of a video; yield each as soon as its files are whole, or the reason why there are none.

    A copied video stays where it is. `progress` is called whenever some of it has been decoded. Raise UnusableError at
    what makes all parts unusable that were not yielded yet.
    """
    before = source.stat()
    for result in _store_parts(source, cuts, settings, progress):
        after = source.stat()
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):  # an unfinished download, say
            raise UnusableError("it was changed while it was read")
        yield result


def _store_parts(
    source: Path, cuts: Sequence[Cut], settings: Settings, progress: Callable[[], None]
) -> Iterator[Result]:
    if not source.is_dir() and arrays.is_array(source):
        yield from _keep_array(source, cuts)
        return
    if source.is_dir() and settings.encode == COPY:
        raise UnusableError("it is a folder of frames, which are not stored as they are: leave out --encode copy")
    open_here = partial(open_frames, source, settings.fps) if source.is_dir() else partial(open_source, source)
    with open_here() as (container, stream):
        timing = read_timing(container, stream)
        if not timing.num_packets:
            raise UnusableError("it holds no frame")
        if container.format.name == "mjpeg" and timing.num_packets == 1:
            raise UnusableError("it is a still image")
        if not source.is_dir():
            require_complete(source, container, stream, timing.num_packets)
    if settings.encode == COPY:
        yield Result(cuts[0], [_copy(source, timing, progress)])
    else:
        yield from _transcode(open_here, cuts, settings, timing, progress)


def _keep_array(source: Path, cuts: Sequence[Cut]) -> Iterator[Result]:
    """Keep an array as it is, whatever the settings say of videos."""
    try:
        num_frames, height, width, channels = arrays.map_frames(source).shape
    except VideoError as error:
        raise UnusableError(str(error)) from error
    kept = StoredVideo(source, arrays.CONTAINER, arrays.codec_name(channels), num_frames, arrays.FPS, 1, width, height)
    for cut in cuts:
        problem = UnusableError("segments are cut out of videos, not out of arrays") if cut.segment else None
        yield Result(cut, [] if problem else [kept], problem)


def _transcode(
    open_here: Open, cuts: Sequence[Cut], settings: Settings, timing: Timing, progress: Callable[[], None]
) -> Iterator[Result]:
    with open_here() as (_, stream):
        pixel_aspect = stream.sample_aspect_ratio
    waiting: list[Part] = []
    for cut in cuts:
        try:
            waiting.append(Part(cut, timing, settings, pixel_aspect))
        except UnusableError as error:
            yield Result(cut, [], error)
    while waiting:
        waiting.sort(key=lambda part: part.first, reverse=True)
        start = timing.find_seek_point(waiting[-1].first)
        with open_here() as (container, stream):
            frames = read_frames(container, stream, start)
            try:
                frames = chain([next(frames)], frames)
            except UnusableError:
                if start == START:
                    raise
                del timing.seek_points[1:]  # they do not lead anywhere: all is decoded from the start
                continue
            if container.format.name == "image2":
                frames = require_one_size(frames)
            if stream.codec_context.has_b_frames and (settings.clip_seconds or cuts[0].segment):
                frames = _hold_back(frames, MAX_REORDERED)
            yield from encode_parts(deinterlace(assign_ticks(frames, timing, start.number)), waiting, timing, progress)


def _hold_back(frames: Iterator[VideoFrame], count: int) -> Iterator[VideoFrame]:
    """Pass on frames; where they end in an error, not the last `count` before it."""
    held: deque[VideoFrame] = deque()
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
        if list(pose.turn) != UPRIGHT[count_turns(first)]:
            raise UnusableError(f"it is to be shown mirrored, which copies are not: {ENCODE}")
        size, codec = map(round, pose.display_size(first.width, first.height)), stream.codec_context.codec
        own = source.suffix.lower().removeprefix(".")
        usual = EXTENSIONS.get(container.format.name.split(",")[0], (own,))
        extension = own if own in usual else usual[0]
        return StoredVideo(source, extension, codec.canonical_name, len(times), float(timing.rate), 1, *size)
