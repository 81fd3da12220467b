"""A folder of shards, or a mix of several, opened as one list of samples."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Int, Shaped

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.reading.cache import ShardCache
from pipeline.reading.storage import is_remote
from pipeline.shards.arrays import count_channels
from pipeline.shards.format import (
    DATASET_FILE,
    DatasetInfo,
    Lazy,
    Sample,
    Sides,
    TableInfo,
    parse_dataset_info,
    read_dataset_info,
)
from pipeline.shards.gops import GopIndex
from pipeline.shards.index import Tables
from pipeline.shards.rows import merged_sides


@dataclass(frozen=True)
class Part:
    """One of the datasets of a mix."""

    place: str  # folder or URL
    tables: Tables
    labels: tuple[int, ...] | None  # of the mix, by those of this dataset; None: they are the same


class Samples(Sequence[Sample]):
    """The samples of all parts, one behind the other; nothing is copied."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part.tables) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        part, number = self._place(index)
        sample = part.tables.sample(number)
        if part.labels is not None and sample.label is not None:
            sample.__dict__["label"] = part.labels[sample.label]  # it has just been made, and nobody else has it
        return sample

    def gops(self, index: int) -> GopIndex | None:
        """The groups of pictures of a sample, None if it can only be read whole."""
        part, number = self._place(index)
        return part.tables.gops(number)

    def column(self, name: str, most: int | None = None) -> Shaped[np.ndarray, " samples"]:
        """A copy of one column of the rows, of all parts, or of the first `most` of each; labels are those of the
        mix."""
        columns = [part.tables.rows[name][:most] for part in self._parts]
        if name == "label":
            columns = [_relabeled(column, part.labels) for column, part in zip(columns, self._parts, strict=True)]
        return np.concatenate(columns)

    def _place(self, index: int) -> tuple[Part, int]:
        place = int(index) + len(self) if index < 0 else int(index)
        if not 0 <= place < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = bisect_right(self._ends, place)
        return self._parts[part], place - (self._ends[part - 1] if part else 0)


class ShardOf:
    """The shard of every sample, found when it is asked for: `[i]` for a number or an array of such."""

    def __init__(self, first_of_shard: Int[np.ndarray, " shards"], num_samples: int) -> None:
        self.first_of_shard, self._num_samples = first_of_shard, num_samples

    @property
    def counts(self) -> Int[np.ndarray, " shards"]:
        """Samples of each shard."""
        return np.diff(self.first_of_shard, append=self._num_samples)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, samples: Any) -> Any:
        return np.searchsorted(self.first_of_shard, samples, side="right") - 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Int[np.ndarray, " samples"]:
        return np.repeat(np.arange(len(self.first_of_shard), dtype=dtype), self.counts)

    def tolist(self) -> list[int]:
        return np.asarray(self).tolist()


@dataclass(frozen=True)
class ShardDataset:
    """Samples of all shards in tar order; sample i is in shard `shard_of[i]`, shard s in dataset `part_of[s]`."""

    folder: Path  # of the first dataset
    info: DatasetInfo  # of all together; shards carry their own names
    samples: Sequence[Sample]
    shard_of: ShardOf
    shards: Sequence[str]  # paths or URLs of the tars
    part_of: Int[np.ndarray, " shards"]
    holds_copies: bool = False  # of videos as they came, with whatever their encoders made of them
    cache: ShardCache = field(default_factory=ShardCache)  # where what lies in an object store is kept
    parts: Sequence[Part] = ()

    @classmethod
    def open(
        cls, shards: DataConfig | str | Path | Sequence[str | Path], config: DataConfig | None = None
    ) -> "ShardDataset":
        """Open the tables (not the videos) of what data.shards names, or of other dataset folders or URLs.

        `config` says where remote shards are cached. Class ids of a mix run over the union of the datasets' class
        names. Raises InputError if a folder is missing, broken or empty.
        """
        if isinstance(shards, DataConfig):
            config = shards
            shards = config.shards
        config = config or DataConfig()
        cache = ShardCache(
            Path(config.cache_dir) if config.cache_dir else None, config.cache_gib, config.download_timeout_s
        )
        places = [str(folder) for folder in ([shards] if isinstance(shards, str | Path) else shards)]
        if not places or not all(places):
            raise InputError("data.shards names no folder: give what shard_tools/make_shards.py has written")
        found = [_open_tables(place, cache) for place in places]
        classes = sorted({name for _, tables in found for name in tables.info.classes})
        if len(found) == 1:
            classes = found[0][1].info.classes  # their order is the user's own: ids must not change
        parts = [
            Part(place, tables, _labels_in(tables.info.classes, classes))
            for place, (_, tables) in zip(places, found, strict=True)
        ]
        infos = [tables.info for _, tables in found]
        num_shards = [len(info.shards) for info in infos]
        samples = Samples(parts)
        lengths = [0, *accumulate(len(tables) for _, tables in found)]
        first_of_shard = [tables.first_of_shard + before for (_, tables), before in zip(found, lengths, strict=False)]
        return cls(
            folder=found[0][0],
            info=_merged(infos, classes),
            samples=samples,
            shard_of=ShardOf(np.concatenate(first_of_shard), len(samples)),
            shards=_joined([Lazy(len(part.tables.info.shards), partial(_tar, part)) for part in parts]),
            part_of=np.repeat(np.arange(len(parts)), num_shards),
            holds_copies=any(info.encode.get("encode") == "copy" for info in infos),
            cache=cache,
            parts=parts,
        )

    @property
    def digest(self) -> str:
        """Hash of which videos there are, in which order, with which classes, labels, frames and sides: datasets of the
        same digest give the same clips. It is taken of the tables as they are now."""
        described = [[part.tables.content, part.tables.info.classes] for part in self.parts]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    @property
    def is_remote(self) -> bool:
        """Whether shards lie in an object store."""
        return any(is_remote(part.place) for part in self.parts)

    @property
    def channels(self) -> int:
        """Of every clip: 3 of videos, an array's own. Raises InputError where a mix has several."""
        return count_channels(self.info.codecs)

    def gops(self, sample: int) -> GopIndex | None:
        """The groups of pictures of a sample, None if its video can only be read whole."""
        return self.samples.gops(sample) if isinstance(self.samples, Samples) else None

    def column(self, name: str, most: int | None = None) -> Shaped[np.ndarray, " samples"]:
        """One column of shards.SAMPLE over all samples, or the first `most` of each dataset, as it stands in the
        tables, with labels of the mix."""
        assert isinstance(self.samples, Samples)
        return self.samples.column(name, most)

    def shard_path(self, sample: int) -> Path:
        """The tar that a sample is in, where that is a local file."""
        return Path(self.shards[int(self.shard_of[sample])])

    def where(self, sample: int) -> str:
        """Name of a sample for messages: shard:offset:key."""
        video = self.samples[sample]
        return f"{self.shards[int(self.shard_of[sample])]}:{video.offset}:{video.key}"


def _open_tables(place: str, cache: ShardCache) -> tuple[Path, Tables]:
    """Open the tables of a dataset; returns them with its folder, or the one that its copies are cached in."""
    if is_remote(place):
        url = f"{place.rstrip('/')}/{DATASET_FILE}"
        folder = cache.path(url, "").parent

        def locate(table: TableInfo) -> Path:
            return cache.fetch_table(f"{place.rstrip('/')}/{table.file}", table.sha256, table.num_bytes)

        info = parse_dataset_info(cache.read(url), url, locate)
    else:
        folder = Path(place)
        info = read_dataset_info(folder)

        def locate(table: TableInfo) -> Path:
            return folder / table.file

    if not info.num_samples:
        raise InputError(f"{place} holds no video: see its rejected.jsonl")
    tables = Tables.open(info, folder, locate)
    tables.check_content(folder)
    return folder, tables


def _tar(part: Part, number: int) -> str:
    return f"{part.place.rstrip('/')}/{part.tables.info.shards[number].name}"


def _labels_in(own: list[str], union: list[str]) -> tuple[int, ...] | None:
    return None if own == union else tuple(map(union.index, own))


def _relabeled(column: np.ndarray, labels: tuple[int, ...] | None) -> np.ndarray:
    if labels is None:
        return column
    known = (column >= 0) & (column < len(labels))  # what is not is for Tables to say
    return np.where(known, np.array([*labels, -1], column.dtype)[np.where(known, column, -1)], -1)


def _joined(parts: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Sequences one behind the other, without a copy."""
    ends = list(accumulate(map(len, parts)))

    def item(index: int) -> Any:
        part = bisect_right(ends, index)
        return parts[part][index - (ends[part - 1] if part else 0)]

    return parts[0] if len(parts) == 1 else Lazy(ends[-1], item)


def _merged(infos: list[DatasetInfo], classes: list[str]) -> DatasetInfo:
    codecs: dict[str, Sides] = {}
    for info in infos:
        for name, sides in info.codecs.items():
            codecs[name] = merged_sides(codecs[name], sides) if name in codecs else sides
    return replace(
        infos[0],
        num_samples=sum(info.num_samples for info in infos),
        num_frames=sum(info.num_frames for info in infos),
        num_bytes=sum(info.num_bytes for info in infos),
        num_rejected=sum(info.num_rejected for info in infos),
        classes=classes,
        shards=_joined([info.shards for info in infos]),
        codecs=codecs,
        containers=list(dict.fromkeys(name for info in infos for name in info.containers)),
        frame_strides=sorted({stride for info in infos for stride in info.frame_strides}),
        num_unlabeled=sum(info.num_unlabeled for info in infos),
    )
