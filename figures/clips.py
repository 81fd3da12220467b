"""Read clips for figures: from video files, folders of them, and shards."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from av.error import FFmpegError
from jaxtyping import UInt8
from torch import Tensor

from common.errors import InputError
from common.logging import log, printable
from pipeline.config import DataConfig
from pipeline.decoding.containers import VIDEO_EXTENSIONS, main_stream, open_video
from pipeline.decoding.sources import decode_frames
from pipeline.planning.crops import FrameSize
from pipeline.planning.plan import frame_step, strided_frames
from pipeline.reading.reader import Reader
from pipeline.reading.storage import is_remote
from pipeline.shards.arrays import FPS, is_array, map_frames
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import DATASET_FILE, Sample
from pipeline.video_error import VideoError

ASSUMED_FPS = 25.0  # of a video whose container does not say
Read = Callable[[], bytes | Path]  # returns what decode_frames takes


class Clip(NamedTuple):
    name: str  # of the video, made unique
    frames: UInt8[Tensor, "T H W C"]
    video: Path  # the file, or the tar that it is in
    numbers: list[int]  # of the frames in the video as stored
    times: list[float]  # of the frames, seconds
    title: str  # file name and class, for people


def read_clips(
    places: Sequence[Path | str | ShardDataset],
    num_frames: int,
    image_size: int | Sequence[int],
    data: DataConfig,
    limit: int,
) -> Iterator[Clip]:
    """Read a clip from the middle of each video, as data.frame_stride or data.fps say, scaled and center cropped.

    A place is a video file, a folder of videos, or shards: a folder, a URL, or opened. Of all but a file, `limit`
    evenly spread videos are read; one that does not decode is skipped and named on stderr. Raises InputError for a
    place without a video, and for a file that does not decode.
    """
    used: set[str] = set()
    for place in places:
        sources = list(_list_sources(place))
        if not sources:
            raise InputError(f"{place} holds no video: give a video file, a folder of videos or a folder of shards")
        for name, title, file, sample, read in sources[:: -(-len(sources) // limit)]:
            stored_stride = sample.frame_stride if sample else 1
            if data.frame_stride and data.frame_stride % stored_stride:
                raise InputError(
                    f"{name} stores every {stored_stride}th source frame:"
                    f" --frame-stride {data.frame_stride} must be a multiple"
                )
            try:
                video = read()
                total, fps = (sample.num_frames, sample.fps) if sample else count_frames(video)
                numbers = list(strided_frames(total, num_frames, frame_step(fps, stored_stride, data), 0.5))
                frames = resize_and_crop(decode_frames(video, numbers, total if sample else None), image_size)
            except VideoError as error:
                if not isinstance(place, ShardDataset) and Path(place).is_file():
                    raise InputError(f"{place} cannot be decoded: {error}") from error
                log(f"skipped {printable(name)}, which cannot be decoded: {error}", sys.stderr)
                continue
            candidates = (name if number == 1 else f"{name}-{number}" for number in count(1))
            name = next(candidate for candidate in candidates if candidate not in used)
            used.add(name)
            yield Clip(name, frames, file, numbers, [number / fps for number in numbers], title)


def describe_sample(dataset: ShardDataset, sample: Sample) -> str:
    """Return the name of the file that a video was, and its class."""
    classes = ", ".join(dataset.info.classes[label] for label in sample.labels or ())
    name = " ".join(filter(None, (PurePath(sample.source).name, sample.segment)))
    return printable(name) + f"\nclass {printable(classes)}" * bool(classes)


def _list_sources(place: Path | str | ShardDataset) -> Iterator[tuple[str, str, Path, Sample | None, Read]]:
    """Yield the name and title of each video, the file or tar that it is in, its row of shards, and how to read it."""
    if isinstance(place, ShardDataset) or is_remote(str(place)) or (Path(place) / DATASET_FILE).is_file():
        dataset = place if isinstance(place, ShardDataset) else ShardDataset.open(place)
        reader = Reader(dataset)
        for index, sample in enumerate(dataset.samples):
            shard = Path(dataset.shards[int(dataset.shard_of(index))])
            title = describe_sample(dataset, sample)
            yield sample.key.replace("/", "_"), title, shard, sample, partial(reader.read, index)
        return
    path = Path(place)
    if not path.exists():
        raise InputError(f"{path} does not exist: give a video file, a folder of videos or a folder of shards")
    if path.is_file():
        yield path.stem, printable(path.name), path, None, partial(Path, path)
        return
    for file in sorted(path.rglob("*")):
        if file.suffix.lower().removeprefix(".") in VIDEO_EXTENSIONS and file.is_file():
            name = file.relative_to(path)
            yield "_".join(name.with_suffix("").parts), printable(name), file, None, partial(Path, file)


def resize_and_crop(frames: UInt8[np.ndarray, "T H W C"], image_size: int | Sequence[int]) -> UInt8[Tensor, "T h w C"]:
    """Scale frames until they just cover `image_size`, a square's side or height and width; crop the center."""
    wanted = FrameSize.of(image_size)
    images = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()
    height, width = images.shape[2:]
    scale = max(wanted.height / height, wanted.width / width)
    size = max(wanted.height, round(height * scale)), max(wanted.width, round(width * scale))
    images = F.interpolate(images, size, mode="bilinear", antialias=True)
    top, left = (size[0] - wanted.height) // 2, (size[1] - wanted.width) // 2
    images = images[:, :, top : top + wanted.height, left : left + wanted.width]
    return images.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def count_frames(video: bytes | Path) -> tuple[int, float]:
    """Decode a video to count its frames, as containers are not always right; return the frame rate too."""
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
