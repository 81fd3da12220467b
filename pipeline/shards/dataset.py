"""A folder of shards, or a mix of several, opened as one list of samples."""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Shaped, UInt8

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.reading.cache import ShardCache
from adamae.pipeline.reading.storage import is_remote
from adamae.pipeline.shards.arrays import count_channels
from adamae.pipeline.shards.format import DatasetInfo, LazySequence, Sample, SizeRange
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.shards.index import Tables
from adamae.pipeline.video_error import VideoError

RECENT_SAMPLES = (
    4096  # are kept: planning, reading, decoding and delivery of a clip look up the same one
)
LOOKED_AT = 1024  # samples, for the names of their fields; shards hold them in random order
T = TypeVar("T")


class ShardDataset:
    """Samples of all shards in tar order; safe to use from many threads."""

    def __init__(
        self, parts: Sequence[Tables], cache: ShardCache | None = None, opened: tuple[Any, ...] = ()
    ) -> None:
        """parts: the datasets of the mix; cache: where what lies in an object store is kept; opened: see `open`."""
        self.parts, self.cache, self._opened = parts, cache or ShardCache(), opened
        self.folder = parts[0].folder  # or URL of the first dataset, for messages
        self.is_remote = any(
            is_remote(part.folder) for part in parts
        )  # whether shards lie in an object store
        self.info = _merge_infos(
            [part.info for part in parts]
        )  # of all together; shards carry their own names
        ids = {name: number for number, name in enumerate(self.info.classes)}
        for part in parts if len(parts) > 1 else ():
            part.label_ids = [ids[name] for name in part.info.classes]
        self.samples = _concatenate(
            [LazySequence(len(part), lru_cache(RECENT_SAMPLES)(part.sample)) for part in parts]
        )
        self.gops = _concatenate([LazySequence(len(part), part.gops) for part in parts])
        self.shards = _concatenate(
            [LazySequence(len(part.counts), part.locate_shard) for part in parts]
        )
        self._ends_of_shards = np.cumsum(np.concatenate([part.counts for part in parts]))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickled, a dataset is opened again."""
        return ShardDataset.open, self._opened

    @classmethod
    def open(
        cls,
        shards: DataConfig | str | Path | Sequence[str | Path],
        config: DataConfig | None = None,
    ) -> "ShardDataset":
        """Open the tables (not the videos) of what data.shards names, or of other dataset folders or URLs.

        `config` says where remote shards are cached; a subset is read in place. Class ids of a mix run over the union
        of the datasets' class names. Raises InputError if a folder is missing, broken or empty.
        """
        if isinstance(shards, DataConfig):
            config, shards = shards, shards.shards
        config = config or DataConfig()
        max_gib = (
            config.cache_gib if config.subset is None else 0.0
        )  # few videos a shard: whole ones cost more
        cache = ShardCache(
            Path(config.cache_dir) if config.cache_dir else None, max_gib, config.download_timeout_s
        )
        folders = [
            str(folder) for folder in ([shards] if isinstance(shards, str | Path) else shards)
        ]
        if not folders or not all(folders):
            raise InputError(
                "data.shards names no folder: give what shard_tools/make_shards.py has written"
            )
        return cls([Tables.open(folder, cache) for folder in folders], cache, (shards, config))

    @property
    def digest(self) -> str:
        """Hash which videos there are, in which order, with which classes, labels, frames and sides.

        Datasets of the same digest give the same clips. Opening has compared the tables with their hashes.
        """
        described = [
            [
                info.classes,
                *(
                    info.tables[name].sha256
                    for name in ("shards", "samples", *["names"] * info.multi_label)
                ),
            ]
            for info in (part.info for part in self.parts)
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    @property
    def channels(self) -> int:
        """Of every clip: 3 of videos, an array's own. Raises InputError where a mix has several."""
        return count_channels(self.info.codecs)

    def shard_of(self, samples: Any) -> Any:
        """Find the shard of a sample, or of each of an array of them."""
        return np.searchsorted(self._ends_of_shards, samples, side="right")

    def column(self, name: str, most: int | None = None) -> Shaped[np.ndarray, " samples"]:
        """Copy a column of format.SAMPLE over all samples, or the first `most` of each dataset, with labels of the
        mix."""
        return np.concatenate([part.column(name, slice(most)) for part in self.parts])

    def mark_classes(self, labels: Iterable[Sequence[int]]) -> UInt8[np.ndarray, "samples classes"]:
        """Mark the classes of each sample with ones."""
        samples = list(labels)
        marks = np.zeros((len(samples), len(self.info.classes)), np.uint8)
        for row, classes in zip(marks, samples, strict=True):
            row[list(classes)] = 1
        return marks

    def require_fields(self, names: Sequence[str]) -> None:
        """Raise InputError if none of the first samples has one of these fields."""
        for name in names:
            first = [
                self.samples[sample].fields for sample in range(min(LOOKED_AT, len(self.samples)))
            ]
            if not any(name in fields for fields in first):
                there = ", ".join(sorted(set().union(*first))) or "none"
                raise InputError(
                    f"no video of {self.folder} has the field {name} of data.fields: they have {there}"
                )

    def describe_location(self, sample: int) -> str:
        """Return where a sample is, for messages: shard:offset:key."""
        video = self.samples[sample]
        return f"{self.shards[self.shard_of(sample)]}:{video.offset}:{video.key}"

    def read_video(self, sample: int) -> bytes:
        """Read a whole video; see `read_clip`."""
        return self.read_clip(sample, ()).data

    def read_clip(self, sample: int, frames: Sequence[int]) -> VideoSlice:
        """Read the GOPs of a video that hold these frames, or all of it where there are no closed GOPs or no frames;
        from the store if the local copy of a remote shard, which is removed, is damaged.

        Raises VideoError if the bytes are not those that were stored, InputError if they cannot be had.
        """
        video, shard = self.samples[sample], int(self.shard_of(sample))
        if video.problem:
            raise VideoError(video.problem)
        url, file, gops = (
            self.shards[shard],
            self.find_shard(shard),
            self.gops[sample] if frames else None,
        )
        slice_video = partial(
            gops.slice_video if gops else partial(_read_whole, video), tuple(frames)
        )
        if is_remote(url):
            self.cache.count(**{"cache_hits" if file else "streamed_clips": 1})
        if file:
            try:
                with open(file, "rb", buffering=0) as opened:
                    return slice_video(
                        lambda offset, size: os.pread(opened.fileno(), size, video.offset + offset)
                    )
            except FileNotFoundError as error:  # or another process has evicted it
                if not is_remote(url):
                    advice = "run `python shard_tools/check_shards.py` on its folder"
                    raise InputError(f"{file} is missing: {advice}") from error
            except VideoError:
                if not is_remote(url):
                    raise
                file.unlink(missing_ok=True)
        store, name = self.cache.store(url)
        return slice_video(
            lambda offset, size: store.read_range(
                name, start := video.offset + offset, start + size
            )
        )

    def find_shard(self, shard: int) -> Path | None:
        """Return the file of a shard, downloaded if it is remote; None if the cache does not keep it."""
        url, info = self.shards[shard], self.info.shards[shard]
        return self.cache.fetch(url, info.sha256, info.num_bytes) if is_remote(url) else Path(url)


def _read_whole(
    video: Sample, frames: tuple[int, ...], read: Callable[[int, int], bytes]
) -> VideoSlice:
    """Read a whole video. The hash costs .6 ms per megabyte and finds what decoders do not: most flipped bytes decode
    to something."""
    data = read(0, video.size)
    if len(data) < video.size:
        raise VideoError(f"the shard ends after {len(data)} of the video's {video.size} bytes")
    if hashlib.sha256(data).hexdigest() != video.sha256:
        raise VideoError("the bytes have changed since the shard was made (sha256 differs)")
    return VideoSlice(data, frames, video.num_frames)


def _concatenate(parts: Sequence[Sequence[T]]) -> Sequence[T]:
    """Chain sequences without copying them."""
    ends = list(accumulate(map(len, parts)))

    def item(index: int) -> T:
        part = bisect_right(ends, index)
        return parts[part][index - (ends[part - 1] if part else 0)]

    return parts[0] if len(parts) == 1 else LazySequence(ends[-1], item)


def _merge_infos(infos: list[DatasetInfo]) -> DatasetInfo:
    if len(infos) == 1:  # the order of its classes is the user's own: ids must not change
        return infos[0]
    codecs: dict[str, SizeRange] = {}
    for info in infos:
        for name, sides in info.codecs.items():
            codecs[name] = codecs[name].merge(sides) if name in codecs else sides
    sums = ("num_samples", "num_frames", "num_bytes", "num_rejected", "num_unlabeled")
    return replace(
        infos[0],
        **{name: sum(getattr(info, name) for info in infos) for name in sums},
        classes=sorted({name for info in infos for name in info.classes}),
        shards=_concatenate([info.shards for info in infos]),
        codecs=codecs,
        containers=list(dict.fromkeys(name for info in infos for name in info.containers)),
        frame_strides=sorted({stride for info in infos for stride in info.frame_strides}),
        multi_label=any(info.multi_label for info in infos),
    )
