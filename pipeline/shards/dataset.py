"""A folder of shards, or a mix of several, opened as one list of samples."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.reading.cache import ShardCache
from pipeline.reading.storage import is_remote
from pipeline.shards.arrays import count_channels
from pipeline.shards.format import (
    DATASET_FILE,
    DatasetInfo,
    LazySequence,
    Sample,
    SizeRange,
    TableInfo,
    parse_dataset_info,
    read_dataset_info,
)
from pipeline.shards.gops import GopIndex
from pipeline.shards.index import Tables

RECENT_SAMPLES = 4096  # are kept: planning, reading, decoding and delivery of a clip look up the same one
LOOKED_AT = 1024  # samples, for the names of their fields; shards hold them in random order
T = TypeVar("T")


class ShardLookup:
    """The shard of every sample, found when it is asked for: `[i]` for a number or an array of them."""

    def __init__(self, first_of_shard: Int[np.ndarray, " shards"], num_samples: int) -> None:
        self.first_of_shard = first_of_shard
        self.counts = np.diff(first_of_shard, append=num_samples)  # samples of each shard

    def __getitem__(self, samples: Any) -> Any:
        return np.searchsorted(self.first_of_shard, samples, side="right") - 1


@dataclass(frozen=True)
class ShardDataset:
    """Samples of all shards in tar order; sample i is in shard `shard_of[i]`, shard s in dataset `part_of[s]`."""

    folder: str  # or URL of the first dataset, for messages
    info: DatasetInfo  # of all together; shards carry their own names
    samples: Sequence[Sample]
    shard_of: ShardLookup
    shards: Sequence[str]  # paths or URLs of the tars
    part_of: Int[np.ndarray, " shards"]
    is_remote: bool = False  # whether shards lie in an object store
    cache: ShardCache = field(default_factory=ShardCache)  # where what lies in an object store is kept
    parts: Sequence[Tables] = ()
    gops: Sequence[GopIndex | None] = ()  # of each sample, None if its video can only be read whole
    opened: tuple[Any, ...] = ()  # what `open` was given

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickled, a dataset is opened again."""
        return ShardDataset.open, self.opened

    @classmethod
    def open(
        cls, shards: DataConfig | str | Path | Sequence[str | Path], config: DataConfig | None = None
    ) -> "ShardDataset":
        """Open the tables (not the videos) of what data.shards names, or of other dataset folders or URLs.

        `config` says where remote shards are cached; a subset is read in place. Class ids of a mix run over the union
        of the datasets' class names. Raises InputError if a folder is missing, broken or empty.
        """
        if isinstance(shards, DataConfig):
            config = shards
            shards = config.shards
        config = config or DataConfig()
        max_gib = config.cache_gib if config.subset is None else 0.0  # few videos a shard: whole ones cost more
        cache = ShardCache(Path(config.cache_dir) if config.cache_dir else None, max_gib, config.download_timeout_s)
        folders = [str(folder) for folder in ([shards] if isinstance(shards, str | Path) else shards)]
        if not folders or not all(folders):
            raise InputError("data.shards names no folder: give what shard_tools/make_shards.py has written")
        parts = [_open_tables(folder, cache) for folder in folders]
        infos = [part.info for part in parts]
        classes = infos[0].classes  # their order is the user's own: ids must not change
        if len(parts) > 1:
            classes = sorted({name for info in infos for name in info.classes})
        for part in parts:
            part.mix_labels = None if part.info.classes == classes else tuple(map(classes.index, part.info.classes))
        starts = np.cumsum([0, *map(len, parts)])
        first_of_shard = [part.first_of_shard + start for part, start in zip(parts, starts, strict=False)]
        part_of = np.repeat(np.arange(len(parts)), [len(info.shards) for info in infos])
        info = _merge_infos(infos, classes)
        return cls(
            folder=folders[0],
            info=info,
            samples=_concatenate([LazySequence(len(part), lru_cache(RECENT_SAMPLES)(part.sample)) for part in parts]),
            shard_of=ShardLookup(np.concatenate(first_of_shard), int(starts[-1])),
            shards=LazySequence(len(part_of), lambda shard: join_url(folders[part_of[shard]], info.shards[shard].name)),
            part_of=part_of,
            is_remote=any(map(is_remote, folders)),
            cache=cache,
            parts=parts,
            gops=_concatenate([LazySequence(len(part), part.gops) for part in parts]),
            opened=(shards, config),
        )

    @property
    def digest(self) -> str:
        """Hash which videos there are, in which order, with which classes, labels, frames and sides.

        Datasets of the same digest give the same clips. Opening has compared the tables with their hashes.
        """
        described = [
            [info.classes, *(info.tables[name].sha256 for name in ("shards", "samples", *["names"] * info.multi_label))]
            for info in (part.info for part in self.parts)
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    @property
    def channels(self) -> int:
        """Of every clip: 3 of videos, an array's own. Raises InputError where a mix has several."""
        return count_channels(self.info.codecs)

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
            first = [self.samples[sample].fields for sample in range(min(LOOKED_AT, len(self.samples)))]
            if not any(name in fields for fields in first):
                there = ", ".join(sorted(set().union(*first))) or "none"
                raise InputError(f"no video of {self.folder} has the field {name} of data.fields: they have {there}")

    def where(self, sample: int) -> str:
        """Name of a sample for messages: shard:offset:key."""
        video = self.samples[sample]
        return f"{self.shards[int(self.shard_of[sample])]}:{video.offset}:{video.key}"


def join_url(folder: str, name: str) -> str:
    """Join a folder or URL and a file's name."""
    return f"{folder.rstrip('/')}/{name}"


def _open_tables(folder: str, cache: ShardCache) -> Tables:
    """Open the tables of a dataset, or the copies of them that are cached."""

    def locate(table: TableInfo) -> Path:
        url = join_url(folder, table.file)
        return cache.fetch_table(url, table.sha256, table.num_bytes) if is_remote(folder) else Path(url)

    if is_remote(folder):
        url = join_url(folder, DATASET_FILE)
        info = parse_dataset_info(cache.read(url), url, locate)
    else:
        info = read_dataset_info(Path(folder), locate)
    if not info.num_samples:
        raise InputError(f"{folder} holds no video: see its rejected.jsonl")
    return Tables.open(info, folder, locate)


def _concatenate(parts: Sequence[Sequence[T]]) -> Sequence[T]:
    """Chain sequences without copying them."""
    ends = list(accumulate(map(len, parts)))

    def item(index: int) -> T:
        part = bisect_right(ends, index)
        return parts[part][index - (ends[part - 1] if part else 0)]

    return parts[0] if len(parts) == 1 else LazySequence(ends[-1], item)


def _merge_infos(infos: list[DatasetInfo], classes: list[str]) -> DatasetInfo:
    codecs: dict[str, SizeRange] = {}
    for info in infos:
        for name, sides in info.codecs.items():
            codecs[name] = codecs[name].merge(sides) if name in codecs else sides
    sums = ("num_samples", "num_frames", "num_bytes", "num_rejected", "num_unlabeled")
    return replace(
        infos[0],
        **{name: sum(getattr(info, name) for info in infos) for name in sums},
        classes=classes,
        shards=_concatenate([info.shards for info in infos]),
        codecs=codecs,
        containers=list(dict.fromkeys(name for info in infos for name in info.containers)),
        frame_strides=sorted({stride for info in infos for stride in info.frame_strides}),
        multi_label=any(info.multi_label for info in infos),
    )
