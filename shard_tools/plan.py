"""Decide which sample goes into which shard, before the first video is read.

The plan is written down and never changed. It is a pure function of the sorted sources and the
settings, so that shards have the same bytes with any number of workers and after any interruption.
A video that turns out to be unusable leaves a gap and moves no other one.
"""

import hashlib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import av
import msgspec
import numpy as np
from av.container import InputContainer

from adamae.common.atomic_io import atomic_write
from adamae.common.errors import InputError
from adamae.common.logging import log, printable
from adamae.model.config import ModelConfig
from adamae.pipeline.decoding.containers import main_stream, open_video
from adamae.pipeline.planning.plan import largest_stride
from adamae.pipeline.reading.storage import MissingFileError, StorageError
from adamae.pipeline.shards.read_format import parse_line
from adamae.pipeline.videos.segment import Segment
from adamae.shard_tools.inputs import Item, ItemStore, Location
from adamae.shard_tools.inputs.item import dump_json, join_name
from adamae.shard_tools.inputs.location import open_location
from adamae.shard_tools.settings import Settings

# Hexadecimal: among 10⁹ files of one name, two have the same key with a probability of 6e-12.
KEY_DIGITS = 24
# The part of a key that people read; file systems and tars take names of 100 characters and more.
MAX_KEY_NAME = 46
SHARD_NAME = "shard-{:06d}.tar"
# Videos that threads are given at a time, so that memory does not grow with the list.
PROBED_AT_ONCE = 4096
# More than there are cores: they wait for the disk, or for the network.
NUM_THREADS = 16
# Videos whose lengths are looked at before anything is encoded: a second.
MAX_PROBED = 1000


class PlanHead(msgspec.Struct, frozen=True):
    """The first line of a plan: what holds for all of it."""

    settings: dict[str, Any]
    classes: list[str]
    # The names of samples that are known to be unusable, with the reasons.
    rejected: dict[str, str]
    # The names of the shards, with the number of their items.
    shards: dict[str, int]


class Plan:
    """The plan of a run: a file of a line with its head, and a line for the items of each video."""

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
        """Yield the items of each video, in the order in which shards are to be finished."""
        with self._open() as file:
            # The first line is the head.
            for line in islice(file, 1, None):
                yield parse_line(line, list[Item])


def save_plan(
    path: Path, inputs: ItemStore, settings: Settings, classes: list[str], first: int
) -> None:
    """Plan shards of what is new in `inputs`, from number `first` on.

    Write the plan to `path`, unless there is nothing to do.
    """
    if settings.clip_seconds is not None:
        inputs.split(cut_pieces(inputs.new(), settings.clip_seconds, settings.fps))
    shards, videos = assign_shards(inputs, settings, first)
    head = PlanHead(settings.to_json(), classes, inputs.new_problems(), shards)
    if not head.shards and not head.rejected:
        return
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

    Return the number of items of each shard, and the items of each video, where those come first
    that go into the first shards. Example: 5 items in shards of at most 2 make 3 shards, of 1, 2
    and 2 items; positions 1 to 5 go into shards 0, 1, 1, 2, 2.
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
        # The location is looked up again when the video is read: the input may be moved until an
        # interrupted run is resumed.
        return msgspec.structs.replace(
            item, shard=SHARD_NAME.format(first + index), location="", size=0
        )

    items = map(assign_shard, inputs.shuffle_new(settings.seed))
    return counts, (list(video) for _, video in groupby(items, attrgetter("source")))


def make_key(source: str, segment: str = "") -> str:
    """Return the name of a sample inside the tars, another one for every source and segment.

    It is readable and has no dots and slashes. Example: run/My video.mp4 becomes My-video-<digest>.
    """
    name = join_name(source, segment)
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:KEY_DIGITS]
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePosixPath(source).stem)
    readable = stem.strip("-")[:MAX_KEY_NAME]
    return f"{readable}-{digest}" if readable else digest


class Header(NamedTuple):
    """What a video says before its frames; 0 where it does not."""

    seconds: float = 0.0
    fps: float = 0.0
    # By how many seconds the picture starts after the sound.
    delay: float = 0.0


def probe_header(location: Location, fps: float | None = None) -> Header:
    """Read a video's header; `fps` is the rate of folders of frames.

    Raise StorageError if object storage fails.
    """
    try:
        if fps and isinstance(location, str) and os.path.isdir(location):
            return Header(len(os.listdir(location)) / fps, fps)
        with open_location(location) as content, open_video(content) as container:
            return _read_header(container)
    except MissingFileError:
        return Header()
    except StorageError:
        raise
    # Workers give the reason: the video is rejected, or read in spite of its header. Web clients
    # have errors of their own.
    except Exception:
        return Header()


def _read_header(container: InputContainer) -> Header:
    stream = main_stream(container)
    duration = (container.duration or 0) / av.time_base
    if stream is None:
        return Header(duration)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    delay = 0.0
    if stream.start_time is not None and stream.time_base and container.start_time is not None:
        picture_start = float(stream.start_time * stream.time_base)
        delay = picture_start - container.start_time / av.time_base
    # Recorders write WebM without a duration, so its frames are counted.
    if container.duration is None and rate:
        duration = sum(packet.size > 0 for packet in container.demux(stream)) / rate
    return Header(duration, rate, delay)


def warn_of_headers(inputs: ItemStore, settings: Settings) -> None:
    """Warn of what the headers of some videos say about frames and segments.

    That is of videos that would be stored with fewer frames than a clip, where a smaller stride
    helps, and of segments in videos whose sound starts before the picture.
    """
    items = list(inputs.sample(MAX_PROBED))
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        headers = list(threads.map(probe_header, [item.location for item in items]))
    _warn_of_short_videos(items, headers, settings)
    _warn_of_late_pictures(items, headers)


def _warn_of_short_videos(items: list[Item], headers: list[Header], settings: Settings) -> None:
    counts = [
        count_source_frames(item, header, settings.clip_seconds)
        for item, header in zip(items, headers, strict=True)
    ]
    source_frames = np.array([count for count in counts if count], dtype=np.int64)
    # With --fps the stride of each video follows from its own rate.
    if settings.fps or not len(source_frames):
        return
    # The stride of copies is 1, whatever the option says.
    stride = settings.to_json()["frame_stride"]
    clip_frames = ModelConfig.num_frames
    better_stride = largest_stride(source_frames, clip_frames)
    if better_stride >= stride:
        return
    num_short = int((np.ceil(source_frames / stride) < clip_frames).sum())
    stored = f"one frame of every {stride} is stored"
    if stride == Settings().frame_stride:
        stored += " (the default)"
    log(
        f"WARNING: {num_short} of {len(source_frames)} videos are too short: {stored}, and a clip"
        f" needs {clip_frames} frames; give --frame-stride {better_stride}, and train with"
        f" data.frame_stride={better_stride}",
        sys.stderr,
    )


def _warn_of_late_pictures(items: list[Item], headers: list[Header]) -> None:
    """Warn of segments in seconds if the sound of a video starts first, by more than a frame.

    Players count from the sound then, and segments count from the first frame.
    """
    late = {}
    for item, header in zip(items, headers, strict=True):
        is_in_seconds = item.segment and not Segment.parse(item.segment).in_frames
        if is_in_seconds and header.delay * header.fps > 1:
            late[item.source] = header.delay
    if late:
        source, delay = max(late.items(), key=itemgetter(1))
        log(
            f"WARNING: in {len(late)} of {len({item.source for item in items})} videos the picture"
            f" starts later than the sound (by {delay:.3g} s in {printable(source)}): segments"
            " count from the first frame, so subtract this from times that count from the sound,"
            " as players show them",
            sys.stderr,
        )


def count_source_frames(item: Item, header: Header, clip_seconds: float | None) -> int:
    """Return the frames of a video, a segment or a piece by the header; 0 if it does not say."""
    segment = Segment(0, clip_seconds or math.inf)
    if item.segment:
        segment = Segment.parse(item.segment)
    frames_per_unit = 1 if segment.in_frames else header.fps
    if not frames_per_unit:
        return 0
    video_end = header.seconds * header.fps or math.inf
    end = min(segment.end * frames_per_unit, video_end)
    length = end - segment.start * frames_per_unit
    return round(length) if 0 < length < math.inf else 0


def cut_pieces(items: Iterable[Item], clip_seconds: float, fps: float | None) -> Iterator[Item]:
    """Yield the pieces of whole videos, in the order of these.

    A piece is a segment of `clip_seconds`. The last one ends with the video, after a half to one
    and a half of that. A video that is too short for two pieces has none, nor has one that comes
    with segments of its own. Lengths are those of the headers; `fps` is the rate of folders of
    frames.

    Example: in pieces of 10 s, a video of 34 s becomes 0-10, 10-20 and 20-end, one of 14 s stays
    whole.
    """
    cut = partial(_cut_video, clip_seconds=clip_seconds, fps=fps)
    whole_videos = _list_whole_videos(items)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        while batch := list(islice(whole_videos, PROBED_AT_ONCE)):
            for pieces in threads.map(cut, batch):
                yield from pieces


def _list_whole_videos(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items of which there is just one of a video, and no segment."""
    for _, group in groupby(items, attrgetter("source")):
        video = list(group)
        if len(video) == 1 and not video[0].segment:
            yield video[0]


def _cut_video(item: Item, clip_seconds: float, fps: float | None) -> list[Item]:
    """Return the pieces of one whole video; see cut_pieces."""
    header = probe_header(item.location, fps)
    num_pieces = round(header.seconds / clip_seconds)
    if num_pieces < 2:
        return []
    pieces = []
    for index in range(num_pieces):
        start = index * clip_seconds
        end = (index + 1) * clip_seconds
        if index == num_pieces - 1:
            # The header may be wrong about the end.
            end = math.inf
        pieces.append(msgspec.structs.replace(item, segment=str(Segment(start, end))))
    return pieces
