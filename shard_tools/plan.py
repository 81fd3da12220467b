"""Which sample goes into which shard: decided and written down before the first video is read, and never changed.

A pure function of the sorted sources and the settings, so that shards have the same bytes with any number of workers
and after any interruption. A video that turns out to be unusable leaves a gap and moves no other one.
"""

import hashlib
import io
import json
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
import numpy as np

from common.atomic_io import atomic_write
from common.errors import InputError
from common.logging import log
from model.config import ModelConfig
from pipeline.decoding.containers import main_stream, open_video
from pipeline.planning.plan import largest_stride
from shard_tools.inputs import Item, Location, Segment
from shard_tools.inputs.item import join_name
from shard_tools.settings import Settings
from shard_tools.temp_table import TempTable
from shard_tools.work import Entry

KEY_DIGITS = 24  # hexadecimal: among 10⁹ files of one name, two have the same key with a probability of 6e-12
SHARD_NAME = "shard-{:06d}.tar"
PROBED_AT_ONCE = 4096
THREADS = 16  # they wait for the disk, or for the network
MAX_PROBED = 1000  # videos whose lengths are looked at: a second


class Plan:
    """The plan of a run: on disk a JSON line with what holds for all of it, then one per video, [entry, …]."""

    def __init__(self, path: Path) -> None:
        """Read the first line; raise InputError if it is damaged."""
        self._path = path
        with self._open() as file:
            told = json.loads(file.readline())
            self.settings: dict[str, Any] = told["settings"]
            self.classes: list[str] = told["classes"]
            self.rejected: dict[str, str] = told["rejected"]  # sources that are known to be unusable, with the reason
            self.shards: dict[str, int] = told["shards"]  # with the number of their entries

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with self._path.open("rb") as file:
                yield file
        except (ValueError, TypeError, LookupError) as error:  # no JSON, or JSON of another shape
            raise InputError(f"{self._path} is damaged ({error}): restore it, or start in another folder") from error

    def videos(self) -> Iterator[list[Entry]]:
        """Yield all that is made of each video, in the order in which shards are to be finished."""
        with self._open() as file:
            for line in islice(file, 1, None):
                yield [Entry(*entry) for entry in json.loads(line)]


def save_plan(
    path: Path, items: Iterable[Item], settings: Settings, classes: list[str], rejected: dict[str, str], first: int
) -> None:
    """Plan shards of the items, from number `first` on; write it down, if there is anything to do."""
    shards, videos = assign_shards(items, settings, classes, first)
    if shards or rejected:
        told = {"settings": settings.to_json(), "classes": classes, "rejected": rejected, "shards": shards}
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as aside, aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in chain([told], videos))


def shard_number(name: str) -> int:
    """Return 17 for shard-000017.tar."""
    return int(name.removeprefix("shard-").removesuffix(".tar"))


def assign_shards(
    items: Iterable[Item], settings: Settings, classes: list[str], first: int = 0
) -> tuple[dict[str, int], Iterator[list[Entry]]]:
    """Shuffle items and cut them into shards of equal count.

    Return the number of entries of each shard, and all that is made of each video, those in the first shards first.
    """
    ids = {name: number for number, name in enumerate(classes)}

    def make_row(item: Item) -> tuple[bytes, str, str]:
        labels = None if item.labels is None else [ids[label] for label in item.labels]
        entry = Entry(item.source, str(item.segment or ""), labels, item.fields)
        return shuffle_key(item.name, settings.seed), item.source, json.dumps(entry)

    table = TempTable("CREATE TABLE items (shuffle_key BLOB, source BLOB, entry BLOB)")
    table.insert("items", map(make_row, items), 3)
    ((count,),) = table.run("SELECT count(*) FROM items")
    num_shards = math.ceil(count / settings.samples_per_shard)
    bounds = [number * count // num_shards for number in range(num_shards + 1)] if count else []
    counts = {SHARD_NAME.format(first + shard): end - start for shard, (start, end) in enumerate(pairwise(bounds))}
    rows = table.run("""SELECT source, entry, position
        FROM (SELECT *, row_number() OVER (ORDER BY shuffle_key) AS position FROM items)
        ORDER BY min(position) OVER (PARTITION BY source), position""")
    entries = (
        Entry(*json.loads(entry))._replace(
            shard=SHARD_NAME.format(first + (position * num_shards - 1) // count), position=position
        )
        for _, entry, position in rows
    )
    return counts, (list(video) for _, video in groupby(entries, attrgetter("source")))


def shuffle_key(name: str, seed: int = 0) -> bytes:
    """Return what shuffled values are sorted by."""
    return hashlib.sha256(f"{seed}\0{name}".encode(errors="replace")).digest()


def make_key(source: str, segment: str = "") -> str:
    """Name a sample inside the tars: readable, without dots and slashes, another name for every source and segment."""
    digest = hashlib.sha256(join_name(source, segment).encode(errors="surrogateescape")).hexdigest()[:KEY_DIGITS]
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePosixPath(source).stem).strip("-")[: 70 - KEY_DIGITS]
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
        counts = threads.map(partial(count_source_frames, clip_seconds=settings.clip_seconds), items)
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
    start, end, in_frames, _ = item.segment or Segment(0, clip_seconds or math.inf)
    seconds, fps = probe_header(item.location)
    rate = 1 if in_frames else fps
    length = min(end * rate, seconds * fps or math.inf) - start * rate if rate else 0
    return round(length) if 0 < length < math.inf else 0


def split_videos(items: Iterable[Item], settings: Settings) -> Iterator[Item]:
    """Turn whole videos into segments of clip_seconds by their headers; the last has a half to one and a half of it."""
    if (length := settings.clip_seconds) is None:
        yield from items
        return

    def split(video: list[Item]) -> list[Item]:
        if len(video) > 1 or video[0].segment:
            return video
        count = round(probe_header(video[0].location, settings.fps)[0] / length)
        bounds = [*(number * length for number in range(max(1, count))), math.inf]
        return [video[0]._replace(segment=Segment(*ends)) for ends in pairwise(bounds)] if count > 1 else video

    videos = (list(group) for _, group in groupby(items, attrgetter("source")))
    with ThreadPoolExecutor(THREADS) as threads:
        while some := list(islice(videos, PROBED_AT_ONCE)):
            yield from chain.from_iterable(threads.map(split, some))
