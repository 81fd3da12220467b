"""Clips to draw: out of plain video files, folders of them, and shards."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from common.errors import InputError
from common.logging import log, printable
from pipeline.decoding.video_error import VideoError
from pipeline.planning.crops import FrameSize
from pipeline.reading.reader import Reader
from pipeline.reading.storage import is_remote
from pipeline.shards.arrays import FPS, is_array, map_frames
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import DATASET_FILE

ASSUMED_FPS = 25.0  # of a video that does not say


class Clip(NamedTuple):
    name: str  # of the video, made unique
    frames: UInt8[Tensor, "T H W C"]
    video: Path  # the file, or the tar that it is in
    numbers: list[int]  # of the frames in the video as stored
    times: list[float]  # of the frames, seconds


class Source(NamedTuple):
    """A video that has not been opened yet."""

    name: str
    video: Path  # the file, or the tar that it is in
    open: Callable[[], bytes | Path]  # what decode_frames takes
    stored_stride: int = 1  # source frames per stored frame
    num_frames: int | None = None  # None: not known
    fps: float | None = None  # of the stored frames; None: not known


def read_clips(
    places: Sequence[Path | str | ShardDataset],
    num_frames: int,
    image_size: int | Sequence[int],
    frame_stride: int,
    limit: int,
) -> Iterator[Clip]:
    """A clip from the middle of each video, every `frame_stride`-th frame, shorter side scaled, centre cropped.

    A place is a video file, a folder of videos, or shards: a folder, a URL, or opened. Of all but a file, `limit`
    evenly spread videos; there, one that does not decode is named on stderr and left out. Raises InputError for a place
    that holds no video, and for a file that does not decode.
    """
    used: set[str] = set()
    for place in places:
        found = list(_videos_of(place) if isinstance(place, ShardDataset) else _sources(place))
        if not found:
            raise InputError(f"{place} holds no video: give a video file, a folder of videos or a folder of shards")
        for source in found[:: -(-len(found) // limit)]:
            try:
                frames, numbers, fps = _read(source, num_frames, image_size, frame_stride)
            except VideoError as error:
                if not isinstance(place, ShardDataset) and Path(place).is_file():
                    raise InputError(f"{place} cannot be shown: {error}") from error
                log(f"left out: {printable(source.name)} cannot be shown: {error}", sys.stderr)
                continue
            name = next(name for name in _names(source.name) if name not in used)
            used.add(name)
            yield Clip(name, frames, source.video, numbers, [number / fps for number in numbers])


def _names(name: str) -> Iterator[str]:
    """`name`, `name`-2, `name`-3, ..."""
    return (name if number == 1 else f"{name}-{number}" for number in count(1))


def _sources(place: Path | str) -> Iterator[Source]:
    from pipeline.decoding.containers import VIDEO_EXTENSIONS  # PyAV, which may be missing where nothing is drawn

    path = Path(place)
    if is_remote(str(place)):
        yield from _videos_of(ShardDataset.open(str(place)))
    elif not path.exists():
        raise InputError(f"{path} does not exist: give a video file, a folder of videos or a folder of shards")
    elif path.is_file():
        yield Source(path.stem, path, lambda: path)
    elif (path / DATASET_FILE).is_file():
        yield from _videos_of(ShardDataset.open(path))
    else:
        for file in sorted(path.rglob("*")):
            if file.suffix.lower().removeprefix(".") in VIDEO_EXTENSIONS and file.is_file():
                name = "_".join(file.relative_to(path).with_suffix("").parts)
                yield Source(name, file, partial(Path, file))


def _videos_of(dataset: ShardDataset) -> Iterator[Source]:
    reader = Reader(dataset)
    for index, sample in enumerate(dataset.samples):
        name = sample.key.replace("/", "_")
        read = partial(reader.read, index)
        yield Source(name, dataset.shard_path(index), read, sample.frame_stride, sample.num_frames, sample.fps)


def _read(
    source: Source, num_frames: int, image_size: int | Sequence[int], frame_stride: int
) -> tuple[UInt8[Tensor, "T H W C"], list[int], float]:
    """The clip, the numbers of its frames, and how many of those the video has a second."""
    if frame_stride % source.stored_stride:
        raise InputError(
            f"{source.name} stores every {source.stored_stride}th frame, so every {frame_stride}th cannot be had:"
            f" give a --frame-stride that is a multiple of {source.stored_stride}"
        )
    from pipeline.decoding.sources import decode_frames  # likewise

    stride = frame_stride // source.stored_stride
    video = source.open()
    total, fps = (source.num_frames, source.fps) if source.num_frames and source.fps else _count_frames(video)
    numbers = middle(total, num_frames, stride)
    return fit(decode_frames(video, numbers, source.num_frames), image_size), numbers, fps


def middle(total: int, num_frames: int, stride: int) -> list[int]:
    """Frame numbers of the clip in the middle of `total` frames; the last frame repeats where they are too few."""
    start = max(0, (total - (num_frames - 1) * stride - 1) // 2)
    return [min(start + i * stride, total - 1) for i in range(num_frames)]


def fit(frames: UInt8[np.ndarray, "T H W 3"], image_size: int | Sequence[int]) -> UInt8[Tensor, "T h w C"]:
    """Scale frames until they just cover `image_size`, a square's side or height and width, and cut out the centre."""
    wanted = FrameSize.of(image_size)
    images = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()
    height, width = images.shape[2:]
    scale = max(wanted.height / height, wanted.width / width)
    size = max(wanted.height, round(height * scale)), max(wanted.width, round(width * scale))
    images = F.interpolate(images, size, mode="bilinear", antialias=True)
    top, left = (size[0] - wanted.height) // 2, (size[1] - wanted.width) // 2
    images = images[:, :, top : top + wanted.height, left : left + wanted.width]
    return images.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _count_frames(video: bytes | Path) -> tuple[int, float]:
    """Frames that decode, and how many there are a second. What a container says of itself is not always true."""
    from av.error import FFmpegError  # likewise

    from pipeline.decoding.containers import main_stream, open_video

    if is_array(video):
        return len(map_frames(video)), FPS
    try:
        with open_video(video) as container:
            stream = main_stream(container)
            if stream is None:
                raise VideoError("it has no video track")
            decoded = sum(1 for _ in container.decode(stream))
            fps = float(stream.average_rate or stream.guessed_rate or ASSUMED_FPS)
    except FFmpegError as error:
        raise VideoError(str(error)) from error
    if not decoded:
        raise VideoError("none of its frames decodes")
    return decoded, fps
