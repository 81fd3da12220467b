"""The shard format: dataset.json, shards with their samples.jsonl, and tables whose names end in their hash.

docs/shards.md describes all of it; `shard_tools` writes it, the pipeline reads it.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from adamae.common.atomic_io import hash_file
from adamae.common.errors import InputError
from adamae.pipeline.shards.gops import GOP

SCHEMA_VERSION = 5
DATASET_FILE = "dataset.json"
REJECTED_FILE = "rejected.jsonl"
PLAN_FILE = ".work/plan.jsonl"  # there while make_shards is under way
SKIPPED_FILE = "skipped.jsonl"  # what the last run did not take for videos
CARD_FILE = "README.md"
# Both sides of what we encode are multiples of it, as codecs work on blocks of 16 pixels. DALI keeps NVDEC's decoders
# by the size in blocks and looks them up by the size shown: where these differ, it makes one for every clip, or takes
# that of another size.
SIDE_STEP = 16
MAX_SIDE = 32768  # pixels; AV1, which goes farthest of the codecs, ends at twice that

SHARD = np.dtype(
    [
        ("name", "S32"),  # shard-000000.tar
        ("first_sample", "<u8"),  # its row in the table of samples
        ("num_samples", "<u8"),
        ("num_bytes", "<u8"),
        ("sha256", "V32"),  # of the tar
        ("samples_sha256", "V32"),  # of its .samples.jsonl
    ]
)
SAMPLE = np.dtype(
    [
        (
            "label",
            "<i4",
        ),  # index into DatasetInfo.classes; -1: unlabeled; -2: none or several, which names list
        ("offset", "<u8"),  # of the video in the tar
        ("size", "<u8"),  # bytes of the video
        ("first_gop", "<u8"),  # row in the GOP table
        ("name", "<u8"),  # first byte in the table of names
        ("fps", "<f8"),
        ("num_gops", "<u4"),  # rows in the GOP table; 0: the video can only be read whole
        ("num_frames", "<u4"),
        ("width", "<u2"),  # as displayed, pixels
        ("height", "<u2"),
        ("frame_stride", "<u2"),
        ("codec", "u1"),  # place in DatasetInfo.codecs
        ("container", "u1"),  # place in DatasetInfo.containers
        ("sha256", "V32"),  # of the video
    ]
)
TABLES = {"shards": SHARD, "samples": SAMPLE, "gops": GOP, "names": None}  # None: lines
HASHED_TABLES, HASHED_BYTES = (
    ("samples", "names"),
    2**28,
)  # so large a table is hashed when it is opened, in .2 s
REWRITE = "write them again with `python shard_tools/check_shards.py {} --rewrite-tables`"

UNLABELED, MULTI_LABEL = -1, -2  # in the column `label`

Count = Annotated[int, Meta(ge=1, lt=2**32)]
Bytes = Annotated[int, Meta(ge=0, lt=2**62)]
Side = Annotated[int, Meta(ge=1, le=MAX_SIDE)]
Stride = Annotated[int, Meta(ge=1, lt=2**16)]
Label = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Word = Annotated[str, Meta(pattern=r"^[^\x00-\x1f/\\]{0,32}$")]  # it may become part of a path
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,31}$")]


@dataclass(frozen=True)
class Sample:
    """One video in a shard."""

    key: str
    container: Word  # file extension inside the tar: mp4, webm, ...
    codec: Word  # as FFmpeg names it: h264, hevc, vp8, vp9, av1, mjpeg, mpeg4, ...
    num_frames: Count  # frames that decode, counted when the shard was made
    fps: Annotated[float, Meta(gt=0, lt=1e6)]  # of the stored video
    frame_stride: Stride  # source frames per stored frame: 4 if thinned to every fourth, 1 if stored as they came
    width: Side  # as displayed, pixels
    height: Side
    labels: tuple[Label, ...] | None  # indices into DatasetInfo.classes; None: unlabeled
    source: str  # path of the input, relative to INPUT
    sha256: Sha256  # of the stored video bytes
    offset: Bytes = 0  # of the video bytes in the tar
    size: Bytes = 0  # bytes of the video
    source_sha256: str = ""  # of the input file's bytes
    source_size: Bytes = 0  # their number
    gops: str = ""  # base64 of its rows of the GOP table; empty: it can only be read whole
    segment: str = ""  # what of the source was asked for: t=1.5,4 in seconds, or frames=10,50; empty: all of it
    start: Seconds = 0.0  # of its first frame in the source
    fields: dict[str, Any] = field(
        default_factory=dict
    )  # what else the input says of it: captions, …
    problem: str = ""  # why it cannot be used, as its row is broken; the rest is then harmless

    @property
    def label(self) -> int | None:
        """The label, where there is just one."""
        return self.labels[0] if self.labels and len(self.labels) == 1 else None


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One tar of a dataset."""

    name: FileName  # shard-000000.tar
    num_samples: Annotated[int, Meta(ge=0, lt=2**32)]
    num_bytes: Bytes
    sha256: Sha256
    samples_sha256: str = ""

    @property
    def samples_name(self) -> str:
        return self.name.removesuffix(".tar") + ".samples.jsonl"


@dataclass(frozen=True)
class SizeRange:
    """Of all videos of a codec, in pixels."""

    num_samples: Annotated[int, Meta(ge=1)]
    min_width: Side
    max_width: Side
    min_height: Side
    max_height: Side

    def contain(self, width: int, height: int) -> bool:
        return (
            self.min_width <= width <= self.max_width
            and self.min_height <= height <= self.max_height
        )

    def merge(self, other: "SizeRange") -> "SizeRange":
        """Combine those of two sets of videos."""
        return SizeRange(
            self.num_samples + other.num_samples,
            min(self.min_width, other.min_width),
            max(self.max_width, other.max_width),
            min(self.min_height, other.min_height),
            max(self.max_height, other.max_height),
        )


@dataclass(frozen=True)
class TableInfo:
    """One table of a dataset."""

    file: FileName
    num_rows: Bytes
    num_bytes: Bytes
    sha256: Sha256


class Report(TypedDict, total=False):
    """Statistics of a dataset, for people."""

    hours: float
    class_histogram: dict[str, Bytes]
    duplicates: list[list[str]]  # sources of equal bytes
    conflicts: list[list[str]]  # those of them that have different labels


@dataclass(frozen=True)
class DatasetInfo:
    """What `dataset.json` says."""

    num_samples: Bytes
    num_frames: Bytes
    num_bytes: Bytes
    classes: list[str]  # class id -> name, empty when there are no labels
    encode: dict[str, Any]  # the settings the shards were made with
    shards: Sequence[ShardInfo]  # not in dataset.json, but in their table
    num_rejected: Bytes = 0
    report: Report = field(default_factory=Report)
    # What nobody needs to look at every sample for:
    codecs: dict[Word, SizeRange] = field(default_factory=dict)
    containers: list[Word] = field(default_factory=list)
    frame_strides: list[Stride] = field(default_factory=list)
    num_unlabeled: Bytes = 0
    multi_label: bool = False  # whether any sample has other than one label
    tables: dict[str, TableInfo] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """All but the shards, which have a table."""
        values: dict[str, Any] = msgspec.to_builtins(replace(self, shards=[]))
        return {name: value for name, value in values.items() if name != "shards"}


T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, length: int, item: Callable[[int], T]) -> None:
        self._length, self._item = length, item

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> T:  # type: ignore[override]  # no slices
        if not -self._length <= index < self._length:
            raise IndexError(f"item {index} of {self._length}")
        return self._item(index % self._length)


Locate = Callable[[TableInfo], Path]


def has_dataset_json(folder: Path) -> bool:
    """Return whether a folder holds a `dataset.json`, be it a link that leads nowhere: it is not to be overwritten."""
    return os.path.lexists(folder / DATASET_FILE)


def read_dataset_info(folder: Path) -> DatasetInfo:
    """Read `dataset.json`; raises InputError if it is missing, broken or of another schema version."""
    path = folder / DATASET_FILE
    if not has_dataset_json(folder):
        raise InputError(f"no {DATASET_FILE} in {folder}: {_advise(folder)}")
    if not path.is_file():
        raise InputError(
            f"{path} is no file, or a link that leads to none: put the dataset's description there again"
        )
    return parse_dataset_info(path.read_bytes(), str(path), lambda table: folder / table.file)


def find_splits(folder: Path) -> list[Path]:
    """Find the datasets that `make_shards.py INPUT FOLDER` with --hold-out or --split has written."""
    return sorted(file.parent for file in folder.glob(f"*/{DATASET_FILE}"))


def _advise(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    if splits := find_splits(folder):
        return f"give {' or '.join(map(str, splits))}"
    if any(any(folder.glob(pattern)) for pattern in (PLAN_FILE, f"*/{PLAN_FILE}")):
        return "shard_tools/make_shards.py was interrupted there: run the same command again, which completes it"
    return f"create shards with `python shard_tools/make_shards.py {folder} SHARDS`"


def parse_dataset_info(data: bytes, path: str, locate: Locate) -> DatasetInfo:
    """Parse the content of `dataset.json` and open the table of shards that it names; see read_dataset_info."""
    try:
        raw = json.loads(data.decode())
        if raw["schema_version"] != SCHEMA_VERSION:
            raise InputError(
                f"{path} has schema version {raw['schema_version']}, this code reads {SCHEMA_VERSION}: make the shards"
                " again"
            )
        raw.pop("sha256", None)
        if unknown := raw.keys() - {entry.name for entry in fields(DatasetInfo)}:
            raise ValueError(f"unknown field {min(unknown)}")
        info: DatasetInfo = msgspec.convert({**raw, "shards": []}, DatasetInfo)
        if info.tables.keys() != TABLES.keys():
            raise ValueError(f"its tables are {', '.join(info.tables) or 'missing'}")
        if info.num_samples and not (info.codecs and info.containers and info.frame_strides):
            raise ValueError("it names no codecs, containers or frame_strides")
        rows = open_table("shards", info, locate)  # which are asked for with every clip
        return replace(
            info, shards=LazySequence(len(rows), lru_cache(4096)(partial(_read_shard, rows)))
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise InputError(
            f"{path} is not a dataset description ({reason}): make the shards again"
        ) from error


def _read_shard(rows: np.ndarray, number: int) -> ShardInfo:
    name, _, *numbers, sha256, samples_sha256 = rows[number].item()
    values = (name.decode("ascii", "replace"), *numbers, sha256.hex(), samples_sha256.hex())
    try:
        return msgspec.convert(dict(zip(ShardInfo.__match_args__, values, strict=True)), ShardInfo)
    except ValueError as error:
        raise InputError(
            f"row {number} of the table of shards is damaged ({error}): put the table back"
        ) from error


def open_table(name: str, info: DatasetInfo, locate: Locate) -> np.ndarray:
    """Map a table of a dataset into memory: rows, or bytes of lines.

    Raises InputError if it is not the one that dataset.json describes. Larger ones than HASHED_BYTES are hashed by
    check_shards alone, as are shards and groups, whose bytes are checked when they are read.
    """
    table, path = info.tables[name], locate(info.tables[name])
    try:
        if (num_bytes := path.stat().st_size) != table.num_bytes:
            raise ValueError(f"it has {num_bytes} bytes and should have {table.num_bytes}")
        if name in HASHED_TABLES and num_bytes <= HASHED_BYTES and hash_file(path) != table.sha256:
            raise ValueError("it has changed since it was written")
        if TABLES[name] is None:
            return np.asarray(np.memmap(path, np.uint8, "r"))
        rows = np.load(path, mmap_mode="r" if table.num_rows else None, allow_pickle=False)
        if (
            not isinstance(rows, np.ndarray)
            or rows.dtype != TABLES[name]
            or rows.shape != (table.num_rows,)
        ):
            raise ValueError("it is not the table that the description promises")
    except Exception as error:  # NumPy's parser of damaged headers raises a dozen kinds
        reason = getattr(error, "strerror", None) or error
        advice = (
            "put it back, or make the shards again"
            if name == "shards"
            else REWRITE.format(path.parent)
        )
        raise InputError(f"{path} cannot be used ({reason}): {advice}") from error
    return np.asarray(rows)  # a view: np.memmap makes an object of every row


def read_samples(folder: Path, shard: ShardInfo) -> Iterator[Sample]:
    """Read the samples of a shard in tar order from `samples.jsonl`; raises InputError if it is missing or broken."""
    path = folder / shard.samples_name
    try:
        with path.open("rb") as lines:
            yield from (parse_line(line, Sample) for line in lines)
    except (OSError, ValueError, RecursionError) as error:  # among them msgspec's
        raise InputError(
            f"{path} cannot be read ({error}): run `python shard_tools/check_shards.py {path.parent}`"
        ) from error


def parse_line(line: bytes, kind: type[T]) -> T:
    """Parse JSON and check every field, in a sixth of the time of json.loads; raise ValueError or RecursionError."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Names that are not UTF-8 are written as half a surrogate pair, which only json takes.
        return msgspec.convert(json.loads(line), kind)
