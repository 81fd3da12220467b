"""Open videos of any origin, and refuse those that are not whole, with the reason."""

import mimetypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import av
from av.container import InputContainer
from av.video.stream import VideoStream

from adamae.pipeline.decoding.containers import main_stream, open_stream, open_video
from adamae.pipeline.video_error import VideoError

# A picture of a folder, as datasets of frames come: 00001.jpg, img_00001.jpg, …
PICTURE = re.compile(r"(.*?)(\d+)(\.(?:jpe?g|png|bmp|webp))", re.IGNORECASE)

# Kinds of files by their names, the same on every machine.
KINDS = mimetypes.MimeTypes()
# How texts begin that lie in a video's place, and what they are.
TEXTS = {
    b"version https://git-lfs": "it is a Git LFS pointer, not the video: run `git lfs pull`",
    b"<?xml": "it is XML, often the error of an object storage: download the video again",
    b"<": "it is a web page, often a login or a warning: download the video again",
}
# Extensions of pictures that KINDS does not know everywhere.
PICTURES = {".heic", ".heif", ".avif", ".jfif", ".mpo"}


@contextmanager
def open_source(
    path: Path, fps: float | None = None, **options: str
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open the video stream of a file, or of a folder of pictures with `fps` of them a second.

    `options` are those of FFmpeg's demuxer. Raise VideoError if there is no video that can be
    decoded.
    """
    opened_path = path
    if path.is_dir():
        opened_path, options = _describe_frames(path, fps)
    elif path.stat().st_size == 0:
        raise VideoError("the file is empty")
    try:
        container, stream = open_stream(opened_path, **options)
    except av.error.FFmpegError as error:
        raise VideoError(_explain_open_error(path, error)) from error
    with container:
        yield container, stream


def list_frames(folder: Path) -> list[Path]:
    """List the pictures of a folder by number.

    Raise VideoError if one is missing, or their names differ.
    """
    matches = [match for match in map(PICTURE.fullmatch, os.listdir(folder)) if match]
    if not matches:
        raise VideoError("it is a folder without numbered pictures")
    kinds = sorted({(match[1], match[3]) for match in matches})
    if len(kinds) > 1:
        raise VideoError(
            f"its frames are named in several ways: {' and '.join(map('…'.join, kinds[:2]))}"
        )
    matches.sort(key=lambda match: int(match[2]))
    first_number = int(matches[0][2])
    for number, match in enumerate(matches, first_number):
        if int(match[2]) != number:
            raise VideoError(
                f"its frames have a hole or repeat a number: {match[0]} comes in place of {number}"
            )
    return [folder / match[0] for match in matches]


def _describe_frames(folder: Path, fps: float | None) -> tuple[Path, dict[str, str]]:
    """Return how FFmpeg reads a folder of pictures as a video.

    That is the pattern of their names, and options of its demuxer. Raise VideoError without `fps`.
    """
    if fps is None:
        raise VideoError(
            "it is a folder of frames, which does not say their rate: make shards of it with"
            " make_shards.py --fps"
        )
    match = PICTURE.fullmatch(list_frames(folder)[0].name)
    assert match is not None
    prefix, number, extension = match.groups()
    digits = f"%0{len(number)}d" if number.startswith("0") else "%d"
    pattern = Path(f"{folder.absolute()}/{prefix}".replace("%", "%%") + digits + extension)
    return pattern, {
        "format_whitelist": "image2",
        "framerate": f"{fps:g}",
        "start_number": str(int(number)),
    }


def may_be_video(path: Path, content: BinaryIO | None = None) -> bool:
    """Return whether a file without a video's extension holds one.

    `content` is that of a file in an archive. Files whose name says another kind are not opened.
    """
    kind, _ = KINDS.guess_type(path.name)
    if path.suffix.lower() in PICTURES or (kind and not kind.startswith("video/")):
        return False
    try:
        with open_video(content or path) as container:
            is_photo = container.format.name == "mjpeg"
            return not is_photo and main_stream(container) is not None
    except (av.error.FFmpegError, OSError):
        return False


def require_complete(
    path: Path, container: InputContainer, stream: VideoStream, num_packets: int
) -> None:
    """Raise VideoError if an MP4 or Matroska file lacks what it promises.

    `num_packets` of it were read.
    """
    num_bytes = path.stat().st_size
    num_promised = stream.frames
    is_mp4 = container.format.name.startswith("mov")
    reaches_beyond = is_mp4 and any(
        entry.pos + entry.size > num_bytes for entry in stream.index_entries
    )
    if reaches_beyond or _is_cut_off_matroska(path):
        raise VideoError("the file is cut off: it is shorter than it says itself")
    if is_mp4 and num_packets < num_promised:
        # Frames that an edit list hides count too, as in a video that was trimmed on a phone.
        with open_source(path, ignore_editlist="1") as (container, stream):
            num_packets = sum(1 for packet in container.demux(stream) if packet.size)
        if num_packets < num_promised:
            reachable = f"only {num_packets} of its {num_promised} frames can be reached"
            raise VideoError(f"the file is cut off or damaged: {reachable}")


def _is_cut_off_matroska(path: Path) -> bool:
    """Return whether a Matroska file names a size that goes beyond its end.

    FFmpeg reads such a file as if it were complete. The size of its segment follows the segment's
    ID, 18 53 80 67 (RFC 9559, section 5.1.4), as a number of variable length (RFC 8794, section 4).
    """
    with path.open("rb") as file:
        head = file.read(128)
    offset_size = head.find(b"\x18\x53\x80\x67") + 4
    if not head.startswith(b"\x1a\x45\xdf\xa3") or offset_size < 4:
        return False
    # The number of leading zero bits says how long the size is; all ones mean that it was not
    # known.
    length = 9 - head[offset_size].bit_length()
    unknown = (1 << 7 * length) - 1
    size = int.from_bytes(head[offset_size : offset_size + length]) & unknown
    return size != unknown and offset_size + length + size > path.stat().st_size


def _explain_open_error(path: Path, error: av.error.FFmpegError) -> str:
    if path.is_dir():
        return f"its first frame cannot be read ({error.strerror})"
    with path.open("rb") as file:
        head = file.read(4096)
    if not head.strip(b"\0"):
        return "the file starts with nothing but zeros: it was probably never completely written"
    if head[4:8] == b"ftyp":
        return "the file is cut off or damaged: moov atom not found"
    for start, reason in TEXTS.items():
        if head.lstrip().startswith(start):
            return reason
    if all(byte in b"\t\n\r\f" or 32 <= byte < 127 for byte in head):
        return "it is a text file, not a video"
    if isinstance(error, av.error.ArgumentError):
        return "it is a still image, sound, or of another kind that is not supported"
    return "it is in no video format that FFmpeg knows, or its beginning is missing"
