"""One source video -> the files that are stored: decode, subsample, convert, encode, and decode again to verify.

Memory does not grow with a video's length.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple, cast

import av
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from pipeline.decoding.video import count_turns
from pipeline.decoding.video_source import UPRIGHT
from pipeline.shards import arrays
from pipeline.video_error import VideoError
from shard_tools.encoding.codecs import CODECS, CONTAINER, Codec, open_encoder
from shard_tools.encoding.picture import BT601, FULL, LIMITED, FrameConverter, Pose, UnusableError, deinterlace
from shard_tools.encoding.source import (
    Timing,
    assign_ticks,
    check_frames,
    choose_extension,
    open_source,
    read_frames,
    read_timing,
    require_complete,
    subsample,
)
from shard_tools.settings import COPY, Settings

# A fragment per GOP, each decodable behind the first bytes of the file alone (pipeline/shards/gops.py). The trailer, a
# table of the fragments, would be of no use to a clip.
FRAGMENTED = "+frag_keyframe+empty_moov+default_base_moof+skip_trailer"
ENCODE = "leave out --encode copy"
SAMPLED_FRACTION = 0.25  # of a copied video's frames, where only a sample of them is decoded


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


class VideoWriter:
    """Writes frames of one size into one file at a constant rate."""

    def __init__(self, path: Path, codec: Codec, settings: Settings, rate: Fraction, size: tuple[int, int]):
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

    def close(self) -> None:
        self.container.mux(self.stream.encode(None))
        self.container.close()


def store_video(source: Path, stem: Path, settings: Settings) -> list[StoredVideo]:
    """Make the files that are stored of `source`: one, or several with `max_seconds`. Raise UnusableError.

    They lie at `stem`-<piece>.<container>, except a copied video, which stays where it is.
    """
    before = source.stat()
    if arrays.is_array(source):  # kept as it is, whatever the settings say of videos
        try:
            num_frames, height, width, channels = arrays.map_frames(source).shape
        except VideoError as error:
            raise UnusableError(str(error)) from error
        codec = arrays.codec_name(channels)
        stored = [StoredVideo(source, arrays.CONTAINER, codec, num_frames, arrays.FPS, 1, width, height)]
    else:
        with open_source(source) as (container, stream):
            timing = read_timing(container, stream)
            if not timing.num_packets:
                raise UnusableError("it holds no frame")
            if container.format.name == "mjpeg" and timing.num_packets == 1:
                raise UnusableError("it is a still image")
            require_complete(source, container, stream, timing.num_packets)
        if settings.encode == COPY:
            stored = [_copy(source, timing, settings.check != "full")]
        else:
            stored = list(_transcode(source, stem, settings, timing))
    after = source.stat()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):  # an unfinished download, say
        raise UnusableError("it was changed while it was read")
    return stored


def _transcode(source: Path, stem: Path, settings: Settings, timing: Timing) -> Iterator[StoredVideo]:
    """Encode every n-th frame, and decode what was stored: the number of frames is the one that comes out again."""
    codec = CODECS[settings.encode]
    stride = max(1, round(timing.rate / Fraction(settings.fps))) if settings.fps else settings.frame_stride
    rate = (timing.rate / stride).limit_denominator(100_000)
    max_frames = max(1, round(settings.max_seconds * rate)) if settings.max_seconds else None
    with open_source(source) as (container, stream):
        convert = FrameConverter(codec, settings.short_side, stream.sample_aspect_ratio)
        frames = deinterlace(assign_ticks(read_frames(container, stream), timing))
        pictures = map(convert, subsample(frames, stride))
        for number in count():
            piece = islice(pictures, max_frames)
            first = next(piece, None)
            if first is None:
                return
            path = stem.with_name(f"{stem.name}-{number:04d}.{CONTAINER}")
            writer = VideoWriter(path, codec, settings, rate, (first.width, first.height))
            for picture in chain([first], piece):
                writer.write(picture)
            writer.close()
            with open_source(path) as (written, stored):
                size = stored.width, stored.height
                num_frames = check_frames(written, stored).num_frames
            if num_frames != writer.num_frames:
                raise UnusableError(f"{writer.num_frames} frames were encoded, but {num_frames} decode")
            fps = float(timing.rate / stride)
            yield StoredVideo(path, CONTAINER, settings.encode, num_frames, fps, stride, *size)


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
