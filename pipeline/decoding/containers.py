"""The only place where videos are opened for reading.

It decides on the demuxers and protocols that are allowed, the largest frame, and which of several
video streams is used.

A file that claims to be a video may be a playlist of other files or describe a network stream, and
FFmpeg goes by its content, not its name. A few bytes may expand to a frame of gigabytes.
"""

import io
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

from adamae.pipeline.shards.arrays import CONTAINER
from adamae.pipeline.video_error import VideoError

# Demuxers of FFmpeg that are named like the extension of their files.
NAMED_LIKE_FILES = ("avi", "cine", "flv", "gif", "m4v", "ivf", "obu", "dv", "mxf", "nut")
# The allowed demuxers and the extensions of their files, the usual one first.
EXTENSIONS = {
    "mov": ("mp4", "mov", "m4v", "3gp"),
    "matroska": ("mkv", "webm"),
    "mpegts": ("ts", "mts", "m2ts"),
    "mpeg": ("mpg", "mpeg", "vob"),
    "mpegvideo": ("mpg", "mpeg", "m1v", "m2v"),
    "asf": ("wmv", "asf"),
    "ogg": ("ogv", "ogg"),
    "h264": ("h264", "264"),
    "hevc": ("hevc", "265"),
    "mjpeg": ("mjpeg", "mjpg"),
    "yuv4mpegpipe": ("y4m",),
    # Of Dahua's surveillance cameras.
    "dhav": ("dav",),
    **{name: (name,) for name in NAMED_LIKE_FILES},
}
# None of them opens other files, as those of playlists do.
DEMUXERS = ",".join(EXTENSIONS)
# Other names of the same formats, and videos that no demuxer above reads, which are refused with a
# reason.
OTHER_EXTENSIONS = (
    "3g2",
    "360",
    "avc",
    "av1",
    "braw",
    "bik",
    "divx",
    "dvr-ms",
    "evo",
    "f4v",
    "h265",
    "insv",
    "lrv",
    "m2p",
    "m2t",
    "m4s",
    "mk3d",
    "mod",
    "mp4v",
    "mpe",
    "mpv",
    "ogm",
    "qt",
    "r3d",
    "rm",
    "rmvb",
    "swf",
    "tod",
    "trp",
    "vp8",
    "vp9",
    "wtv",
    "xvid",
)
VIDEO_EXTENSIONS = frozenset(
    {CONTAINER, *OTHER_EXTENSIONS, *chain.from_iterable(EXTENSIONS.values())}
)

# Of a frame at level 7.2, the highest of HEVC and AV1.
MAX_PIXELS = 16384 * 8704

# The first bytes of a picture.
JPEG = b"\xff\xd8\xff"

# Tags need not be UTF-8: PyAV before 19 raises at them unless told otherwise.
ANY_TAGS: dict[str, Any] = {}
if int(av.__version__.split(".")[0]) < 19:
    ANY_TAGS["metadata_errors"] = "replace"


def open_video(source: bytes | BinaryIO | Path, **options: str) -> InputContainer:
    """Open a file or the content of one; `options` are those of FFmpeg's demuxer.

    Raise av.error.FFmpegError, an ArgumentError if the format is not allowed.
    """
    if isinstance(source, Path):
        # FFmpeg would take a relative path with a colon for a URL.
        source = source.absolute()
    limits = {
        "format_whitelist": DEMUXERS,
        "protocol_whitelist": "file" if isinstance(source, Path) else "none",
        # FFmpeg decodes a little to probe the streams.
        "max_pixels": str(MAX_PIXELS),
    }
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        return av.open(file, mode="r", options=limits | options, **ANY_TAGS)
    except av.error.ArgumentError:
        # FFmpeg takes JPEGs in a row for one picture, unless their file has a video's name.
        with file.open("rb") if isinstance(file, Path) else nullcontext(file) as opened:
            opened.seek(0)
            if opened.read(len(JPEG)) != JPEG:
                raise
            opened.seek(0)
        return av.open(file, mode="r", format="mjpeg", options=limits | options, **ANY_TAGS)


def main_stream(container: InputContainer) -> VideoStream | None:
    """Return the video stream that players show.

    That is no cover image; a default stream before others, then the longest, then the first. Its
    decoder fails at frames of more than MAX_PIXELS.
    """

    def rank(stream: VideoStream) -> tuple[bool, float]:
        seconds = float((stream.duration or 0) * (stream.time_base or 0))
        return Disposition.default in stream.disposition, seconds

    streams = [
        stream
        for stream in container.streams.video
        if Disposition.attached_pic not in stream.disposition
    ]
    main = max(streams, key=rank, default=None)
    if main is not None and main.codec_context is not None:
        main.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
    return main


def open_stream(source: bytes | Path, **options: str) -> tuple[InputContainer, VideoStream]:
    """Open a video and its main stream, to be decoded on one thread.

    The caller closes the container. Raise av.error.FFmpegError as open_video does, and VideoError
    if it holds no video of a known codec, or its frames are too large.
    """
    container = open_video(source, **options)
    try:
        stream = main_stream(container)
        if stream is None:
            only_sound = ", only sound" if container.streams.audio else ""
            raise VideoError(f"it holds no video{only_sound}")
        if stream.codec_context is None:
            raise VideoError("its video codec is not known")
        if stream.width * stream.height > MAX_PIXELS:
            raise VideoError(
                f"its pictures of {stream.width}x{stream.height} pixels are beyond any real video's"
            )
    except VideoError:
        container.close()
        raise
    # Videos are decoded in parallel, each in a thread or process of its own.
    stream.codec_context.thread_count = 1
    return container, stream
