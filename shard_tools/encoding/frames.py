"""Folders of numbered pictures, as datasets of frames come (00001.jpg, img_00001.jpg, …), read as videos."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
from av.container import InputContainer
from av.video.stream import VideoStream

from pipeline.decoding.containers import open_video
from shard_tools.encoding.picture import UnusableError

PICTURE = re.compile(r"(.*?)(\d+)(\.(?:jpe?g|png|bmp|webp))", re.IGNORECASE)


def list_frames(folder: Path) -> list[Path]:
    """Return the pictures of a folder by number. Raise UnusableError if one is missing, or their names differ."""
    found = [match for name in os.listdir(folder) if (match := PICTURE.fullmatch(name))]
    if not found:
        raise UnusableError("it is a folder without numbered pictures")
    kinds = sorted({(match[1], match[3]) for match in found})
    if len(kinds) > 1:
        raise UnusableError(f"its frames are named in several ways: {' and '.join(map('…'.join, kinds[:2]))}")
    found.sort(key=lambda match: int(match[2]))
    for number, match in enumerate(found, int(found[0][2])):
        if int(match[2]) != number:
            raise UnusableError(f"its frames have a hole or repeat a number: {match[0]} comes in place of {number}")
    return [folder / match[0] for match in found]


@contextmanager
def open_frames(folder: Path, fps: float | None) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a folder of pictures for decoding, as encoding.source.open_source does a video."""
    if fps is None:
        raise UnusableError("it is a folder of frames, which does not say their rate: give --fps")
    first = list_frames(folder)[0]
    match = PICTURE.fullmatch(first.name)
    assert match is not None
    prefix, number, extension = match.groups()
    digits = f"%0{len(number)}d" if number.startswith("0") else "%d"
    pattern = f"{folder.absolute()}/{prefix}".replace("%", "%%") + digits + extension
    options = {"format_whitelist": "image2", "framerate": f"{fps:g}", "start_number": str(int(number))}
    try:
        container = open_video(Path(pattern), **options)
    except av.error.FFmpegError as error:
        raise UnusableError(f"its first frame {first.name} cannot be read ({error.strerror})") from error
    with container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        yield container, stream
