"""Which sample goes into which shard: decided and written down before the first video is read, and never changed.

A pure function of the sorted sources and the settings, so that shards have the same bytes with any number of workers
and after any interruption. A video that turns out to be unusable leaves a gap and moves no other one.
"""

import hashlib
import io
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby, islice, pairwise
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import av
import fsspec
import msgspec
import numpy as np

from adamae.common.atomic_io import atomic_write
from adamae.common.errors import InputError
from adamae.common.logging import log
from adamae.model.config import ModelConfig
from adamae.pipeline.decoding.containers import main_stream, open_video
from adamae.pipeline.planning.plan import largest_stride
from adamae.pipeline.shards.read_format import parse_line
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs import Item, ItemStore, Location
from adamae.shard_tools.inputs.item import dump_json, join_name
from adamae.shard_tools.settings import Settings

KEY_DIGITS = 24  # hexadecimal: among 10⁹ files of one name, two have the same key with a probability of 6e-12
SHARD_NAME = "shard-{:06d}.tar"
PROBED_AT_ONCE = 4096
THREADS = 16  # they wait for the disk, or for the network
MAX_PROBED = 1000  # videos whose lengths are looked at: a second


class PlanHead(msgspec.Struct, frozen=True):
    """The first line of a plan: what holds for all of it."""

    settings: dict[str, Any]
    classes: list[str]
    rejected: dict[str, str]  # samples that are known to be unusable, by name, with the reason
    shards: dict[str, int]  # with the number of their items


class Plan:
    """The plan of a run: on disk a line with its head, then a line per video, with the items that are made of it."""

    def __init__(self, path: Path) -> None:
        """Read the head; raise InputError if it is damaged."""
        self._path = path
        with self._open() as file:
            head = parse_line(file.readline(), PlanHead)
        self.settings = head.settings
        self.classes = head.classes
        self.rejected = head.rejected
        self.shards = head.shards

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with self._path.open("rb") as file:
                yield file
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self._path} is damaged ({error}): restore it, or start in another folder"
            ) from error

    def videos(self) -> Iterator[list[Item]]:
        """Yield all that is made of each video, in the order in which shards are to be finished."""
        with self._open() as file:
            for line in islice(file, 1, None):
                yield parse_line(line, list[Item])


def save_plan(
    path: Path, inputs: ItemStore, settings: Settings, classes: list[str], first: int
) -> None:
    """Plan shards of what is new in `inputs`, from number `first` on; write it down, if there is anything to do."""
    if settings.clip_seconds is not None:
        inputs.split(cut_pieces(inputs.new(), settings.clip_seconds, settings.fps))
    shards, videos = assign_shards(inputs, settings, first)
    head = PlanHead(settings.to_json(), classes, inputs.new_problems(), shards)
    if head.shards or head.rejected:
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
            file.write(dump_json(head) + "\n")
            for video in videos:
                file.write(dump_json(video) + "\n")


def shard_number(name: str) -> int:
    """Return 17 for shard-000017.tar."""
    return int(name.removeprefix("shard-").removesuffix(".tar"))


def assign_shards(
    inputs: ItemStore, settings: Settings, first: int = 0
) -> tuple[dict[str, int], Iterator[list[Item]]]:
    """Shuffle what is new in `inputs` and cut it into shards of equal count.

    Return the number of items of each shard, and all that is made of each video, those in the first shards first.
    Example: 5 items in shards of at most 2 make 3 shards, of 1, 2 and 2 items; positions 1 to 5 go into 0, 1, 1, 2, 2.
    """
    count = inputs.count_new()
    num_shards = math.ceil(count / settings.samples_per_shard)
    counts = {}
    for index in range(num_shards):
        start = index * count // num_shards
        end = (index + 1) * count // num_shards
        counts[SHARD_NAME.format(first + index)] = end - start

    def assign_shard(item: Item) -> Item:
        index = (item.position * num_shards - 1) // count
        # Where its bytes are is looked up again when they are read: the input may be moved until the run is resumed.
        return msgspec.structs.replace(
            item, shard=SHARD_NAME.format(first + index), location="", size=0
        )

    items = map(assign_shard, inputs.shuffle_new(settings.seed))
    return counts, (list(video) for _, video in groupby(items, attrgetter("source")))


def make_key(source: str, segment: str = "") -> str:
    """Name a sample inside the tars: readable, without dots and slashes, another name for every source and segment."""
    digest = hashlib.sha256(
        join_name(source, segment).encode(errors="surrogateescape")
    ).hexdigest()[:KEY_DIGITS]
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePosixPath(source).stem).strip("-")[
        : 70 - KEY_DIGITS
    ]
    return f"{readable}-{digest}" if readable else digest


def probe_header(location: Location, fps: float | None = None) -> tuple[float, float]:
    """Return a video's seconds and frames per second by its header, 0 if unknown; `fps`: of folders of frames."""
    try:
        if fps and isinstance(location, str) and os.path.isdir(location):
            return len(os.listdir(location)) / fps, fps
        file = fsspec.open(location) if isinstance(location, str) else io.BytesIO(location.read())
        with file as content, open_video(content) as container:
            stream = main_stream(container)
            rate = float((stream and (stream.average_rate or stream.guessed_rate)) or 0)
            if container.duration is None and stream and rate:  # as recorders write WebM
                return sum(packet.size > 0 for packet in container.demux(stream)) / rate, rate
            return (container.duration or 0) / av.time_base, rate
    except (av.error.FFmpegError, OSError, ValueError):
        return 0.0, 0.0


def warn_of_short_videos(items: Iterable[Item], settings: Settings) -> None:
    """Warn if some of these would be stored with fewer frames than a clip has, and a smaller stride would help."""
    with ThreadPoolExecutor(THREADS) as threads:
        counts = threads.map(
            partial(count_source_frames, clip_seconds=settings.clip_seconds), items
        )
        frames = np.array([count for count in counts if count], dtype=np.int64)
    num_frames = ModelConfig.num_frames
    stride = settings.to_json()["frame_stride"]  # 1 where bytes are copied
    if settings.fps or not len(frames) or (wanted := largest_stride(frames, num_frames)) >= stride:
        return
    short = int((np.ceil(frames / stride) < num_frames).sum())
    log(
        f"WARNING: {short} of {len(frames)} videos would have fewer than {num_frames} frames, of which one of every"
        f" {stride} is stored: give --frame-stride {wanted}, and train with data.frame_stride={wanted}",
        sys.stderr,
    )


def count_source_frames(item: Item, clip_seconds: float | None) -> int:
    """Return the frames of a video, a segment or a piece by the header; 0 if it does not say."""
    segment = Segment(0, clip_seconds or math.inf)
    if item.segment:
        segment = Segment.parse(item.segment)
    seconds, fps = probe_header(item.location)
    rate = 1 if segment.in_frames else fps
    if not rate:
        return 0
    length = min(segment.end * rate, seconds * fps or math.inf) - segment.start * rate
    return round(length) if 0 < length < math.inf else 0


def cut_pieces(items: Iterable[Item], clip_seconds: float, fps: float | None) -> Iterator[Item]:
    """Yield the pieces of whole videos, in the order of these.

    A piece is a segment of `clip_seconds`, the last one a half to one and a half of it. A video that is too short for
    two pieces has none, nor has one that comes with segments of its own. Lengths are those of the headers; `fps` is the
    rate of folders of frames.
    """

    def cut(item: Item) -> list[Item]:
        num_pieces = round(probe_header(item.location, fps)[0] / clip_seconds)
        if num_pieces < 2:
            return []
        bounds = [number * clip_seconds for number in range(num_pieces)] + [math.inf]
        return [
            msgspec.structs.replace(item, segment=str(Segment(*ends))) for ends in pairwise(bounds)
        ]

    videos = (list(group) for _, group in groupby(items, attrgetter("source")))
    whole_videos = (video[0] for video in videos if len(video) == 1 and not video[0].segment)
    with ThreadPoolExecutor(THREADS) as threads:
        while batch := list(islice(whole_videos, PROBED_AT_ONCE)):
            yield from chain.from_iterable(threads.map(cut, batch))
