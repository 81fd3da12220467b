"""The shard format: what `shard_tools` writes and the pipeline reads.

A dataset is a folder:

    dataset.json                  DatasetInfo: schema version, counts, class names, encode settings, shard hashes
    shard-000000.tar              WebDataset tar: <key>.<container> (video), <key>.json (Sample without offset, size)
    shard-000000.idx              index in DALI's `wds2idx` format, v1.2
    shard-000000.samples.jsonl    one Sample a line, in tar order: all that the plan needs, without opening the tar
    rejected.jsonl                {"source": ..., "reason": ...} for every input that is in no shard
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from errors import InputError

SCHEMA_VERSION = 1
DATASET_FILE = "dataset.json"
REJECTED_FILE = "rejected.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """One video in a shard."""

    key: str
    container: str  # file extension inside the tar: mp4, webm, ...
    codec: str  # as FFmpeg names it: h264, hevc, vp8, vp9, av1, mjpeg, mpeg4, ...
    num_frames: int  # frames that decode, counted when the shard was made
    fps: float  # of the stored video
    frame_stride: int  # source frames per stored frame: 4 if thinned to every fourth, 1 if stored as they came
    width: int  # as displayed, pixels
    height: int
    label: int | None  # index into DatasetInfo.classes
    source: str  # path of the input, relative to INPUT
    sha256: str  # of the stored video bytes
    offset: int = 0  # of the video bytes in the tar
    size: int = 0  # bytes of the video
    source_sha256: str = ""  # of the input file's bytes
    source_size: int = 0  # their number; 0 where an older version did not say it


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One tar of a dataset."""

    name: str  # shard-000000.tar
    num_samples: int
    num_bytes: int
    sha256: str

    @property
    def index_name(self) -> str:
        return self.name.removesuffix(".tar") + ".idx"

    @property
    def samples_name(self) -> str:
        return self.name.removesuffix(".tar") + ".samples.jsonl"


@dataclass(frozen=True)
class DatasetInfo:
    """What `dataset.json` says."""

    num_samples: int
    num_frames: int
    num_bytes: int
    classes: list[str]  # class id -> name, empty when there are no labels
    encode: dict[str, Any]  # the settings the shards were made with
    shards: list[ShardInfo]
    num_rejected: int = 0
    report: dict[str, Any] = field(default_factory=dict)  # hours, codecs, class histogram, file-list hash, duplicates
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_dataset_info(folder: Path) -> DatasetInfo:
    """Read `dataset.json`; raises InputError if it is missing, broken or of another schema version."""
    path = folder / DATASET_FILE
    if not path.is_file():
        raise InputError(f"{folder} holds no {DATASET_FILE}: make shards with `python shard_tools/make_shards.py`")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["schema_version"]
        if version != SCHEMA_VERSION:
            raise InputError(
                f"{path} has schema version {version}, this code reads {SCHEMA_VERSION}: make the shards again"
            )
        return DatasetInfo(**{**raw, "shards": [ShardInfo(**shard) for shard in raw["shards"]]})
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a dataset description ({error}): make the shards again") from error


def read_samples(folder: Path, shard: ShardInfo) -> Iterator[Sample]:
    """The samples of one shard in tar order; raises InputError if the table is missing or broken."""
    path = folder / shard.samples_name
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            yield Sample(**json.loads(line))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): run `python shard_tools/check_shards.py {folder}`"
        ) from error
