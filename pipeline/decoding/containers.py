"""The one door through which videos are opened for reading: what FFmpeg may take them for and open on their behalf, how
large a picture it may make, and which of several video streams is meant.

What calls itself a video may be a playlist of other files, or a note on where to listen in the network, and FFmpeg goes
by what is in it, not by its name. A few bytes may stand for a picture of gigabytes.
"""

import io
from pathlib import Path
from typing import Any, BinaryIO

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

from pipeline.shards.arrays import CONTAINER

# FFmpeg's names for the demuxers, and the extensions under which their files are known, the usual one first.
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
# Taken too, whatever the file is called.
UNUSUAL = ("h264", "hevc", "m4v", "mjpeg", "ivf", "obu", "dv", "mxf", "nut", "yuv4mpegpipe")
DEMUXERS = ",".join([*EXTENSIONS, *UNUSUAL])  # each reads the one file that it is given

MAX_PIXELS = 8192 * 4352  # of a picture at level 6.2, the highest of H.264 and HEVC, and the highest of AV1

# Tags need not be UTF-8. PyAV raises at them unless told otherwise, from 19 on it replaces what it cannot read itself.
ANY_TAGS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}


def open_video(source: bytes | BinaryIO | Path, **options: str) -> InputContainer:
    """Open a file, or what is in one; `options` are FFmpeg's for the demuxer. Raises av.error.FFmpegError, which is an
    ArgumentError where it is of a kind that is not taken."""
    limits = {
        "format_whitelist": DEMUXERS,
        "protocol_whitelist": "file" if isinstance(source, Path) else "none",
        "max_pixels": str(MAX_PIXELS),  # FFmpeg decodes a little to find out what there is
    }
    if isinstance(source, Path):
        file: str | BinaryIO = str(source.absolute())
    else:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
    return av.open(file, mode="r", options=limits | options, **ANY_TAGS)


def main_stream(container: InputContainer) -> VideoStream | None:
    """The video stream that players show: no cover, of the others one that is marked as default, of these the longest,
    and of these the first. Pictures of more than MAX_PIXELS are errors of its decoder."""
    streams = [stream for stream in container.streams.video if Disposition.attached_pic not in stream.disposition]
    main = max(streams, key=_rank, default=None)
    if main is not None and main.codec_context is not None:
        main.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
    return main


def _rank(stream: VideoStream) -> tuple[bool, float]:
    seconds = float((stream.duration or 0) * (stream.time_base or 0))
    return Disposition.default in stream.disposition, seconds
