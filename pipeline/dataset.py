"""A folder of shards, or a mix of several, opened as one list of samples."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int

from errors import InputError
from pipeline.config import DataConfig
from pipeline.shards import DATASET_FILE, DatasetInfo, Sample, read_dataset_info, read_samples
from pipeline.store import Cache, is_remote


@dataclass(frozen=True)
class ShardDataset:
    """Samples of all shards in tar order; sample i is in shard `shard_of[i]`, shard s in dataset `part_of[s]`."""

    folder: Path  # of the first dataset
    info: DatasetInfo  # of all together; shards carry their own names
    samples: list[Sample]
    shard_of: Int[np.ndarray, " samples"]
    shards: list[str]  # paths or URLs of the tars
    part_of: Int[np.ndarray, " shards"]
    holds_copies: bool = False  # of videos as they came, with whatever their encoders made of them
    cache: Cache = field(default_factory=Cache)  # where what lies in an object store is kept

    @classmethod
    def open(cls, folders: str | Path | Sequence[str | Path], cache: Cache | None = None) -> "ShardDataset":
        """Read the descriptions (not the videos) of one or several dataset folders or URLs of such.

        Class ids of a mix run over the union of the datasets' class names. Raises InputError if a folder is missing,
        broken or empty.
        """
        cache = cache or Cache()
        places = [str(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)]
        if not places or not all(places):
            raise InputError("data.shards names no folder: give what shard_tools/make_shards.py has written")
        paths = [_local_tables(place, cache) for place in places]
        infos = [read_dataset_info(path) for path in paths]
        classes = sorted({name for info in infos for name in info.classes})
        if len(infos) == 1:
            classes = infos[0].classes  # their order is the user's own: ids must not change

        samples: list[Sample] = []
        shard_of: list[int] = []
        shards: list[str] = []
        part_of: list[int] = []
        for part, (place, path, info) in enumerate(zip(places, paths, infos, strict=True)):
            for shard in info.shards:
                table = _relabelled(read_samples(path, shard), info.classes, classes)
                if len(table) != shard.num_samples:
                    raise InputError(
                        f"{path / shard.samples_name} lists {len(table)} samples where dataset.json says"
                        f" {shard.num_samples}: run `python shard_tools/check_shards.py {path}`"
                    )
                samples += table
                shard_of += [len(shards)] * len(table)
                shards.append(f"{place.rstrip('/')}/{shard.name}")
                part_of.append(part)
            if not samples or part_of[shard_of[-1]] != part:
                raise InputError(f"{path} holds no video: see its rejected.jsonl")
        copies = any(info.encode.get("encode") == "copy" for info in infos)
        info = _merged(infos, classes)
        return cls(paths[0], info, samples, np.array(shard_of), shards, np.array(part_of), copies, cache)

    @classmethod
    def of(cls, config: DataConfig) -> "ShardDataset":
        """What data.shards names, with the cache that data.cache names."""
        return cls.open(config.shards, config.shard_cache)

    @property
    def digest(self) -> str:
        """Which videos, in which order, with which classes: datasets of the same digest give the same clips."""
        said = [*(shard.sha256 for shard in self.info.shards), *self.info.classes]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def shard_path(self, sample: int) -> Path:
        """The tar that a sample is in, where that is a local file."""
        return Path(self.shards[self.shard_of[sample]])

    def where(self, sample: int) -> str:
        """Name of a sample for messages: shard:offset:key."""
        return f"{self.shards[self.shard_of[sample]]}:{self.samples[sample].offset}:{self.samples[sample].key}"


def _local_tables(place: str, cache: Cache) -> Path:
    """Folder with the description and the sample tables of a dataset: its own, or a copy of them."""
    if not is_remote(place):
        return Path(place)
    url = place.rstrip("/")
    description = cache.fetch(f"{url}/{DATASET_FILE}", fresh=True)
    for shard in read_dataset_info(description.parent).shards:
        cache.fetch(f"{url}/{shard.samples_name}", fresh=True)
    return description.parent


def _relabelled(samples: Iterable[Sample], own: list[str], union: list[str]) -> list[Sample]:
    if own == union:
        return list(samples)
    ids = [union.index(name) for name in own]
    return [sample if sample.label is None else replace(sample, label=ids[sample.label]) for sample in samples]


def _merged(infos: list[DatasetInfo], classes: list[str]) -> DatasetInfo:
    return replace(
        infos[0],
        num_samples=sum(info.num_samples for info in infos),
        num_frames=sum(info.num_frames for info in infos),
        num_bytes=sum(info.num_bytes for info in infos),
        num_rejected=sum(info.num_rejected for info in infos),
        classes=classes,
        shards=[shard for info in infos for shard in info.shards],
    )
