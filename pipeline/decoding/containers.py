"""The only place where videos are opened for reading: allowed demuxers and protocols, the largest frame, and which of
several video streams is used.

A file that claims to be a video may be a playlist of other files or describe a network stream, and FFmpeg goes by its
content, not its name. A few bytes may expand to a frame of gigabytes.
"""

import io
from pathlib import Path
from typing import Any, BinaryIO

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

from pipeline.shards.arrays import CONTAINER

# FFmpeg's demuxers and the extensions of their files, the usual one first.
EXTENSIONS = {
    "mov": ("mp4", "mov", "m4v", "3gp"),
    "matroska": ("mkv", "webm"),
    "avi": ("avi",),
    "mpegts": ("ts", "mts", "m2ts"),
    "mpeg": ("mpg", "mpeg", "vob"),
    "mpegvideo": ("mpg", "mpeg", "m1v", "m2v"),
    "asf": ("wmv", "asf"),
    "flv": ("flv",),
    "ogg": ("ogv", "ogg"),
    "gif": ("gif",),
}
VIDEO_EXTENSIONS = frozenset((CONTAINER, *(extension for names in EXTENSIONS.values() for extension in names)))
# Accepted too, whatever the extension.
UNUSUAL = ("h264", "hevc", "m4v", "mjpeg", "ivf", "obu", "dv", "mxf", "nut", "yuv4mpegpipe")
DEMUXERS = ",".join([*EXTENSIONS, *UNUSUAL])  # none of them opens other files

MAX_PIXELS = 8192 * 4352  # of a frame at level 6.2, the highest of H.264 and HEVC, and the highest of AV1

# Tags need not be UTF-8: PyAV before 19 raises at them unless told otherwise.
ANY_TAGS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}


def open_video(source: bytes | BinaryIO | Path, **options: str) -> InputContainer:
    """Open a file or the content of one; `options` are those of FFmpeg's demuxer.

    Raise av.error.FFmpegError, an ArgumentError if the format is not allowed.
    """
    limits = {
        "format_whitelist": DEMUXERS,
        "protocol_whitelist": "file" if isinstance(source, Path) else "none",
        "max_pixels": str(MAX_PIXELS),  # FFmpeg decodes a little to probe the streams
    }
    if isinstance(source, Path):
        file: str | BinaryIO = str(source.absolute())
    else:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
    return av.open(file, mode="r", options=limits | options, **ANY_TAGS)


def main_stream(container: InputContainer) -> VideoStream | None:
    """Return the video stream that players show: no cover image; a default stream before others, then the longest, then
    the first. Its decoder fails at frames of more than MAX_PIXELS."""
    streams = [stream for stream in container.streams.video if Disposition.attached_pic not in stream.disposition]
    main = max(streams, key=_rank, default=None)
    if main is not None and main.codec_context is not None:
        main.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
    return main


def _rank(stream: VideoStream) -> tuple[bool, float]:
    seconds = float((stream.duration or 0) * (stream.time_base or 0))
    return Disposition.default in stream.disposition, seconds
