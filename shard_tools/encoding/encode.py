"""One source video -> the files that are stored: decode, cut, subsample, convert, encode, and decode again to verify.

A video is decoded once, whatever is cut out of it. Memory does not grow with its length.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from av.container import InputContainer
from av.video.stream import VideoStream

from pipeline.decoding.video import UPRIGHT, count_turns
from pipeline.shards import arrays
from pipeline.video_error import VideoError
from shard_tools.encoding.cuts import Cut, Part, Result, StoredVideo, encode_parts
from shard_tools.encoding.frames import open_frames, require_one_size
from shard_tools.encoding.picture import Pose, UnusableError, deinterlace
from shard_tools.encoding.source import (
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

Open = Callable[[], AbstractContextManager[tuple[InputContainer, VideoStream]]]
ENCODE = "leave out --encode copy"
SAMPLED_FRACTION = 0.25  # of a copied video's frames, where only a sample of them is decoded


def store_video(source: Path, stem: Path, settings: Settings) -> list[StoredVideo]:
    """Store all of a video in one file, or several with `clip_seconds`. Raise UnusableError."""
    ((_, result),) = store_cuts(source, [Cut(stem)], settings)
    if isinstance(result, UnusableError):
        raise result
    return result


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
            yield cut, UnusableError("segments are cut out of videos, not out of arrays") if cut.segment else [kept]
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
        require_complete(source, container, stream, timing.num_packets)
    if settings.encode == COPY:
        yield cuts[0], [_copy(source, timing, settings.check != "full")]
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
            yield cut, error
    waiting.sort(key=lambda part: part.first, reverse=True)
    while waiting:
        with open_here() as (container, stream):
            decoded = read_frames(container, stream)
            if container.format.name == "image2":
                decoded = require_one_size(decoded)
            frames = deinterlace(assign_ticks(decoded, timing))
            yield from encode_parts(frames, waiting, lambda tick: progress(tick / num_ticks))


def _copy(source: Path, timing: Timing, sample_only: bool) -> StoredVideo:
    """Decode `source` to see that it is intact: all of it, or the first frames of every group of pictures.

    Decoding everything takes a fifth of the time of encoding. A sample, SAMPLED_FRACTION of the frames with all key
    frames, speaks for the others only if as many as expected come out. Raise UnusableError too where clips would show
    other pictures than those that are meant: a copy has no place for what only its encoding could mend.
    """
    run = max(2, round(SAMPLED_FRACTION * timing.num_packets / len(timing.gops))) if sample_only else math.inf
    with open_source(source) as (container, stream):
        try:
            checked = check_frames(container, stream, run)
            as_expected = checked.num_frames == sum(min(size, run) for size in timing.gops) and checked.is_ordered
        except UnusableError:
            if not sample_only:
                raise
            as_expected = False
        if sample_only and (not as_expected or timing.times is None or timing.hides_frames):
            # Two pictures in a packet, or hidden ones, as where a video was trimmed without being encoded again. Only
            # decoding everything tells how many there are.
            return _copy(source, timing, sample_only=False)
        first, num_frames = checked.first, timing.num_packets if sample_only else checked.num_frames
        if timing.times is not None and not checked.is_ordered and num_frames == len(timing.times):
            raise UnusableError(f"its times do not tell in which order its frames are shown: {ENCODE}")
        pose = Pose.read(first, stream.sample_aspect_ratio)
        if list(pose.turn) != UPRIGHT[count_turns(first)]:
            raise UnusableError(f"it is to be shown mirrored, which copies are not: {ENCODE}")
        size, codec = map(round, pose.display_size(first.width, first.height)), stream.codec_context.codec
        extension = choose_extension(source, container)
        return StoredVideo(source, extension, codec.canonical_name, num_frames, float(timing.rate), 1, *size)
