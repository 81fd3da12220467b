"""One source video -> the files that are stored: decode, cut, subsample, convert, encode, and decode again to verify.

A video is decoded once, whatever is cut out of it. Memory does not grow with its length.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from pipeline.decoding.video import UPRIGHT, count_turns
from pipeline.shards import arrays
from pipeline.video_error import VideoError
from shard_tools.encoding.cuts import Cut, Damage, Part, Result, StoredVideo, encode_parts
from shard_tools.encoding.frames import open_frames, require_one_size
from shard_tools.encoding.picture import Pose, UnusableError, deinterlace
from shard_tools.encoding.source import (
    ENCODE,
    Timing,
    assign_ticks,
    check_frames,
    choose_extension,
    open_source,
    read_frames,
    read_timing,
    require_complete,
)
from shard_tools.settings import COPY, Settings

MAX_REORDERED = 16  # frames that are shown before one that they were made from: where it is damaged, they are too
Open = Callable[[], AbstractContextManager[tuple[InputContainer, VideoStream]]]


def store_video(source: Path, stem: Path, settings: Settings) -> list[StoredVideo]:
    """Store all of a video in one file, or several with `clip_seconds`. Raise UnusableError."""
    ((_, files, problem),) = store_cuts(source, [Cut(stem)], settings)
    if problem:
        raise problem
    return files


def store_cuts(
    source: Path, cuts: Sequence[Cut], settings: Settings, progress: Callable[[float], None] | None = None
) -> Iterator[Result]:
    """Store parts of a video; yield each as soon as its files are whole, or the reason why there are none.

    A copied video stays where it is. `progress` is told which share has been decoded. Raise UnusableError at what makes
    all parts unusable that were not yielded yet.
    """
    before = source.stat()
    for result in _make_results(source, cuts, settings, progress or (lambda share: None)):
        after = source.stat()
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):  # an unfinished download, say
            raise UnusableError("it was changed while it was read")
        yield result


def _make_results(
    source: Path, cuts: Sequence[Cut], settings: Settings, progress: Callable[[float], None]
) -> Iterator[Result]:
    if not source.is_dir() and arrays.is_array(source):  # kept as it is, whatever the settings say of videos
        try:
            num_frames, height, width, channels = arrays.map_frames(source).shape
        except VideoError as error:
            raise UnusableError(str(error)) from error
        codec = arrays.codec_name(channels)
        kept = StoredVideo(source, arrays.CONTAINER, codec, num_frames, arrays.FPS, 1, width, height)
        for cut in cuts:
            problem = UnusableError("segments are cut out of videos, not out of arrays") if cut.segment else None
            yield Result(cut, [] if problem else [kept], problem)
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
        try:
            if not source.is_dir():
                require_complete(source, container, stream, timing.num_packets)
        except UnusableError as error:
            if not settings.salvage:
                raise
            timing = replace(timing, missing=error)
    if settings.encode == COPY:
        yield Result(cuts[0], [_copy(source, timing, progress)])
    else:
        yield from _transcode(open_here, cuts, settings, timing, progress)


def _transcode(
    open_here: Open, cuts: Sequence[Cut], settings: Settings, timing: Timing, progress: Callable[[float], None]
) -> Iterator[Result]:
    num_ticks = timing.tick(None, timing.num_packets - 1) + 1
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
        start, damage = timing.find_seek_point(waiting[-1].first), list[Damage]()
        with open_here() as (container, stream):
            decoded = read_frames(container, stream, start)
            if container.format.name == "image2":
                decoded = require_one_size(decoded)
            keeps_parts = settings.salvage or settings.clip_seconds or cuts[0].segment
            num_held = MAX_REORDERED if keeps_parts and stream.codec_context.has_b_frames else 0
            intact = _stop_before_damage(decoded, num_held, start.number, timing, damage)
            frames = deinterlace(assign_ticks(intact, timing, start.number))
            yield from encode_parts(frames, waiting, timing, start, damage, lambda tick: progress(tick / num_ticks))


def _stop_before_damage(
    frames: Iterator[VideoFrame], num_held: int, number: int, timing: Timing, damage: list[Damage]
) -> Iterator[VideoFrame]:
    """Yield frames from `number` on up to `num_held` before the first that is not intact; put that into `damage`."""
    held: deque[VideoFrame] = deque()
    try:
        for frame in frames:
            number += 1
            held.append(frame)
            if len(held) > num_held:
                yield held.popleft()
        yield from held
    except UnusableError as error:
        damage.append(Damage(error, timing.tick(None, number)))


def _copy(source: Path, timing: Timing, progress: Callable[[float], None]) -> StoredVideo:
    """Decode `source` to see that it is intact, which takes a fifth of the time of encoding. Raise UnusableError too
    where clips would show other pictures than those that are meant: a copy has no place for what only its encoding
    could mend."""
    with open_source(source) as (container, stream):
        checked = check_frames(container, stream, lambda count: progress(count / timing.num_packets))
        first, num_frames = checked.first, checked.num_frames
        if timing.times is not None and not checked.is_ordered and num_frames == len(timing.times):
            raise UnusableError(f"its times do not tell in which order its frames are shown: {ENCODE}")
        pose = Pose.read(first, stream.sample_aspect_ratio)
        if list(pose.turn) != UPRIGHT[count_turns(first)]:
            raise UnusableError(f"it is to be shown mirrored, which copies are not: {ENCODE}")
        size, codec = map(round, pose.display_size(first.width, first.height)), stream.codec_context.codec
        extension = choose_extension(source, container)
        return StoredVideo(source, extension, codec.canonical_name, num_frames, float(timing.rate), 1, *size)
