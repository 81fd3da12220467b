"""A folder of shards, or a mix of several, opened as one list of samples."""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Shaped, UInt8, UInt64

from adamae.common.errors import InputError
from adamae.common.locations import is_remote
from adamae.pipeline.config import DataConfig
from adamae.pipeline.reading.cache import ShardCache
from adamae.pipeline.shards.arrays import count_channels
from adamae.pipeline.shards.format import DATASET_FILE, DatasetInfo, Sample, SizeRange
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.shards.index import Tables
from adamae.pipeline.shards.read_format import LazySequence
from adamae.pipeline.shards.remote_index import RemoteTables
from adamae.pipeline.video_error import VideoError

# Parsed samples that are kept, as planning, reading and delivery of a clip look up the same one.
MAX_RECENT_SAMPLES = 4096
# Samples that are searched for the names of fields. Shards hold them in random order.
NUM_SEARCHED = 1024
# Returns bytes of a video, from an offset on.
Reader = Callable[[int, int], bytes]
# Cuts a slice out of a video.
Slicer = Callable[[Reader], VideoSlice]
T = TypeVar("T")


class ShardDataset:
    """Samples of all shards in tar order; safe to use from many threads."""

    def __init__(
        self, parts: Sequence[Tables], cache: ShardCache | None = None, opened: tuple[Any, ...] = ()
    ) -> None:
        """parts: datasets of the mix; cache: keeps remote shards; opened: arguments of `open`."""
        self.parts = parts
        self.cache = cache or ShardCache()
        self._opened = opened
        # Folder or URL of the first dataset, for messages.
        self.folder = parts[0].folder
        # Whether any shards lie in an object store.
        self.is_remote = any(is_remote(part.folder) for part in parts)
        # Of all datasets together; the shards keep the names that they have in their own.
        self.info = _merge_infos([part.info for part in parts])
        if len(parts) > 1:
            ids = {name: class_id for class_id, name in enumerate(self.info.classes)}
            for part in parts:
                part.label_ids = [ids[name] for name in part.info.classes]
        self.samples = _concatenate([_list_samples(part) for part in parts])
        self.gops = _concatenate([LazySequence(len(part), part.gops) for part in parts])
        self._part_ends = list(accumulate(len(part.counts) for part in parts))
        self.shards = _concatenate(
            [LazySequence(len(part.counts), part.locate_shard) for part in parts]
        )
        self._ends_of_shards = np.cumsum(np.concatenate([part.counts for part in parts]))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the arguments of `open`: other processes map the tables again."""
        return ShardDataset.open, self._opened

    @classmethod
    def open(
        cls,
        shards: DataConfig | str | Path | Sequence[str | Path],
        config: DataConfig | None = None,
        descriptions: Mapping[str, bytes] | None = None,
    ) -> "ShardDataset":
        """Open the tables (not the videos) of data.shards, or of other dataset folders or URLs.

        `config` says where remote shards are cached; a subset is read in place. Class ids of a mix
        are indices of the sorted names of all its classes. `descriptions` are the dataset.json of
        URLs as another process has read them. Raise InputError if a folder is missing, broken or
        empty.
        """
        if isinstance(shards, DataConfig):
            config = shards
            shards = config.shards
        if config is None:
            config = DataConfig()
        cache_dir = Path(config.cache_dir) if config.cache_dir else None
        # A subset has few videos in each shard, so that they cost less than whole shards.
        keeps_shards = config.subset is None
        cache = ShardCache(cache_dir, config.cache_gib, config.download_timeout_s, keeps_shards)
        if isinstance(shards, str | Path):
            shards = [shards]
        folders = [str(folder) for folder in shards]
        if not folders or not all(folders):
            raise InputError(
                "data.shards names no folder: give what shard_tools/make_shards.py has written"
            )
        contents = dict(descriptions or {})
        parts = []
        for folder in folders:
            if not is_remote(folder):
                parts.append(Tables.open(folder))
                continue
            if folder not in contents:
                contents[folder] = _read_description(folder, cache)
            parts.append(RemoteTables.open_url(folder, cache, contents[folder]))
        # Decode workers open what this process has opened, though dataset.json may be replaced
        # meanwhile, and without a request.
        return cls(parts, cache, (shards, config, contents))

    @property
    def digest(self) -> str:
        """A hash of the videos, their order, classes, labels, frames and sizes.

        Datasets of the same digest give the same clips. Tables were compared with their hashes when
        they were opened.
        """
        descriptions = []
        for part in self.parts:
            info = part.info
            description = [
                info.classes,
                info.tables["shards"].sha256,
                info.tables["samples"].sha256,
            ]
            if info.multi_label:
                # Several labels of a video are in the table of names.
                description.append(info.tables["names"].sha256)
            descriptions.append(description)
        return hashlib.sha256(json.dumps(descriptions).encode()).hexdigest()

    @property
    def channels(self) -> int:
        """The channels of every clip: 3 of videos. Raise InputError if those of a mix differ."""
        return count_channels(self.info.codecs)

    def shard_of(self, samples: Any) -> Any:
        """Return the shard of a sample, or of each of an array of them."""
        return np.searchsorted(self._ends_of_shards, samples, side="right")

    def column(self, name: str, max_rows: int | None = None) -> Shaped[np.ndarray, " samples"]:
        """Copy a column of format.SAMPLE; labels become class ids in the mix.

        max_rows: of each dataset, from its first sample on.
        """
        return np.concatenate([part.column(name, slice(max_rows)) for part in self.parts])

    def read_hashes(self) -> Iterator[UInt64[np.ndarray, "rows 4"]]:
        """Yield the SHA-256 of all samples in blocks, each as four words of the hash in order."""
        for part in self.parts:
            yield from part.read_hashes()

    def mark_classes(self, labels: Iterable[Sequence[int]]) -> UInt8[np.ndarray, "samples classes"]:
        """Encode the classes of samples as ones and zeros (multi-hot)."""
        samples = list(labels)
        marks = np.zeros((len(samples), len(self.info.classes)), np.uint8)
        for row, classes in zip(marks, samples, strict=True):
            row[list(classes)] = 1
        return marks

    def require_fields(self, names: Sequence[str]) -> None:
        """Raise InputError unless some of the first samples have each of these fields."""
        if not names:
            return
        existing: set[str] = set()
        for sample in range(min(NUM_SEARCHED, len(self.samples))):
            existing.update(self.samples[sample].fields)
        for name in names:
            if name not in existing:
                raise InputError(
                    f"no video of {self.folder} has the field {name} of data.fields: they have"
                    f" {', '.join(sorted(existing)) or 'none'}"
                )

    def describe_location(self, sample: int) -> str:
        """Return the location of a sample for messages, as shard:offset:key."""
        video = self.samples[sample]
        return f"{self.shards[self.shard_of(sample)]}:{video.offset}:{video.key}"

    def read_video(self, sample: int) -> bytes:
        """Read a whole video; raise as `read_clip` does."""
        return self.read_clip(sample, ()).data

    def read_clip(self, sample: int, frames: Sequence[int]) -> VideoSlice:
        """Read the GOPs of a video that hold these frames.

        Read all of the video if `frames` is empty or its GOPs are not closed. If the local copy of
        a remote shard is damaged, remove it and read from the store. Raise VideoError if the bytes
        are not those that were stored, and InputError if they cannot be read.
        """
        video = self.samples[sample]
        if video.problem:
            raise VideoError(video.problem)
        shard = int(self.shard_of(sample))
        url = self.shards[shard]
        file = self.find_shard(shard)
        gops = self.gops[sample] if frames else None

        def slice_video(read: Reader) -> VideoSlice:
            if gops is None:
                return _read_whole(video, tuple(frames), read)
            return gops.slice_video(tuple(frames), read)

        if not is_remote(url):
            return _read_local(url, video.offset, slice_video)
        if file is None:
            self.cache.count(streamed_clips=1)
        else:
            self.cache.count(cache_hits=1)
            try:
                return _slice_file(file, video.offset, slice_video)
            except FileNotFoundError:
                # Another process has evicted it.
                pass
            except VideoError:
                file.unlink(missing_ok=True)
        store, name = self.cache.store(url)

        def read_store(offset: int, size: int) -> bytes:
            start = video.offset + offset
            return store.read_range(name, start, start + size)

        return slice_video(read_store)

    def fetch_index(self, shard: int) -> None:
        """Download the list of a shard's samples to the cache, if it is remote."""
        number = bisect_right(self._part_ends, shard)
        part = self.parts[number]
        if isinstance(part, RemoteTables):
            part.fetch_index(shard - self._part_ends[number] + len(part.counts))

    def find_shard(self, shard: int) -> Path | None:
        """Return the file of a shard, downloaded if it is remote; None if the cache has no room."""
        url = self.shards[shard]
        if not is_remote(url):
            return Path(url)
        info = self.info.shards[shard]
        return self.cache.fetch(url, info.sha256, info.num_bytes)


def _read_description(url: str, cache: ShardCache) -> bytes:
    """Read the dataset.json of a dataset at a URL; raise InputError if there is none."""
    file = f"{url.rstrip('/')}/{DATASET_FILE}"
    content = cache.read_description(file)
    if content is None:
        raise InputError(f"{file} does not exist")
    return content


def _read_local(path: str, start: int, slice_video: Slicer) -> VideoSlice:
    """Cut a slice out of the video that begins at a byte of a local shard."""
    try:
        return _slice_file(Path(path), start, slice_video)
    except FileNotFoundError as error:
        raise InputError(
            f"{path} is missing: run `python shard_tools/check_shards.py` on its folder"
        ) from error


def _slice_file(path: Path, start: int, slice_video: Slicer) -> VideoSlice:
    with open(path, "rb", buffering=0) as file:
        return slice_video(lambda offset, size: os.pread(file.fileno(), size, start + offset))


def _read_whole(video: Sample, frames: tuple[int, ...], read: Reader) -> VideoSlice:
    """Read a whole video and compare its hash; raise VideoError if they differ.

    The hash takes .6 ms per megabyte, and finds what decoders do not: most flipped bytes decode to
    something.
    """
    data = read(0, video.size)
    if len(data) < video.size:
        raise VideoError(f"the shard ends after {len(data)} of the video's {video.size} bytes")
    if hashlib.sha256(data).hexdigest() != video.sha256:
        raise VideoError("the bytes have changed since the shard was made (sha256 differs)")
    return VideoSlice(data, frames, video.num_frames)


def _list_samples(part: Tables) -> LazySequence[Sample]:
    return LazySequence(len(part), lru_cache(MAX_RECENT_SAMPLES)(part.sample))


def _concatenate(parts: Sequence[Sequence[T]]) -> Sequence[T]:
    """Chain sequences without copying them."""
    if len(parts) == 1:
        return parts[0]
    starts = list(accumulate(map(len, parts), initial=0))

    def get_item(index: int) -> T:
        part = bisect_right(starts, index) - 1
        return parts[part][index - starts[part]]

    return LazySequence(starts[-1], get_item)


def _merge_infos(infos: list[DatasetInfo]) -> DatasetInfo:
    """Describe all datasets of a mix together."""
    if len(infos) == 1:
        # Its classes stay in the order of the user's file, as checkpoints and predictions hold ids.
        return infos[0]
    classes: set[str] = set()
    codecs: dict[str, SizeRange] = {}
    # A dictionary without values, as a set has no order.
    containers: dict[str, None] = {}
    frame_strides: set[int] = set()
    for info in infos:
        classes.update(info.classes)
        containers.update(dict.fromkeys(info.containers))
        frame_strides.update(info.frame_strides)
        for name, sizes in info.codecs.items():
            if name in codecs:
                sizes = codecs[name].merge(sizes)
            codecs[name] = sizes
    return replace(
        infos[0],
        num_samples=sum(info.num_samples for info in infos),
        num_frames=sum(info.num_frames for info in infos),
        num_bytes=sum(info.num_bytes for info in infos),
        num_rejected=sum(info.num_rejected for info in infos),
        num_unlabeled=sum(info.num_unlabeled for info in infos),
        classes=sorted(classes),
        shards=_concatenate([info.shards for info in infos]),
        codecs=codecs,
        containers=list(containers),
        frame_strides=sorted(frame_strides),
        multi_label=any(info.multi_label for info in infos),
    )
