"""The shard format: dataset.json, shards with their samples.jsonl, and tables.

docs/shards.md describes all of it; shard_tools writes it, and the pipeline reads it.
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
# Exists while make_shards is running, or after it was interrupted.
PLAN_FILE = ".work/plan.jsonl"
# The input files that the last run of make_shards did not take for videos.
SKIPPED_FILE = "skipped.jsonl"
CARD_FILE = "README.md"
# Both sides of re-encoded videos are multiples of it, as codecs work on blocks of 16 pixels. DALI
# keeps NVDEC's decoders by the size in blocks and looks them up by the size shown: where these
# differ, it makes one for every clip, or takes that of another size.
SIDE_STEP = 16
# In pixels. AV1, which goes farthest of the codecs, ends at twice that.
MAX_SIDE = 32768

SHARD = np.dtype(
    [
        # Such as shard-000000.tar.
        ("name", "S32"),
        # Its row in the table of samples.
        ("first_sample", "<u8"),
        ("num_samples", "<u8"),
        ("num_bytes", "<u8"),
        # Of the tar.
        ("sha256", "V32"),
        # Of its .samples.jsonl.
        ("samples_sha256", "V32"),
    ]
)
SAMPLE = np.dtype(
    [
        # Index into DatasetInfo.classes, UNLABELED or MULTI_LABEL.
        ("label", "<i4"),
        # Of the video in the tar.
        ("offset", "<u8"),
        # Bytes of the video.
        ("size", "<u8"),
        # Row in the GOP table.
        ("first_gop", "<u8"),
        # First byte in the table of names.
        ("name", "<u8"),
        ("fps", "<f8"),
        # Rows in the GOP table; 0 if the video can only be read whole.
        ("num_gops", "<u4"),
        ("num_frames", "<u4"),
        # In pixels, as displayed.
        ("width", "<u2"),
        ("height", "<u2"),
        ("frame_stride", "<u2"),
        # Index into DatasetInfo.codecs.
        ("codec", "u1"),
        # Index into DatasetInfo.containers.
        ("container", "u1"),
        # Of the video.
        ("sha256", "V32"),
    ]
)
# The table of names holds lines of JSON, the others are NumPy arrays of rows.
TABLES = {"shards": SHARD, "samples": SAMPLE, "gops": GOP, "names": None}
# Tables that are hashed whenever they are opened, unless they are larger: a table of this size
# takes .2 s.
HASHED_TABLES = ("samples", "names")
HASHED_BYTES = 2**28
REWRITE = "write them again with `python shard_tools/check_shards.py {} --rewrite-tables`"

# In the column `label`. A sample with none or several labels has them in the table of names.
UNLABELED = -1
MULTI_LABEL = -2

Count = Annotated[int, Meta(ge=1, lt=2**32)]
Bytes = Annotated[int, Meta(ge=0, lt=2**62)]
Side = Annotated[int, Meta(ge=1, le=MAX_SIDE)]
Stride = Annotated[int, Meta(ge=1, lt=2**16)]
Label = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
# May become part of a path, so it has no slashes.
Word = Annotated[str, Meta(pattern=r"^[^\x00-\x1f/\\]{0,32}$")]
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,31}$")]


@dataclass(frozen=True)
class Sample:
    """One video in a shard."""

    key: str
    # The file extension inside the tar, such as mp4 or webm.
    container: Word
    # As FFmpeg names it: h264, hevc, vp8, vp9, av1, mjpeg, mpeg4, …
    codec: Word
    # Frames that decode, counted when the shard was made.
    num_frames: Count
    # Of the stored video.
    fps: Annotated[float, Meta(gt=0, lt=1e6)]
    # Source frames per stored frame: 4 if one frame of every four is stored, 1 if all are.
    frame_stride: Stride
    # In pixels, as displayed.
    width: Side
    height: Side
    # Indices into DatasetInfo.classes; None if the video is unlabeled.
    labels: tuple[Label, ...] | None
    # Path of the input file, relative to INPUT.
    source: str
    # Of the stored video.
    sha256: Sha256
    # Of the video in the tar, and its number of bytes.
    offset: Bytes = 0
    size: Bytes = 0
    # Of the input file.
    source_sha256: str = ""
    source_size: Bytes = 0
    # Its rows of the GOP table in base64; empty if the video can only be read whole.
    gops: str = ""
    # The part of the source that was asked for: t=1.5,4 in seconds, or frames=10,50; empty for all.
    segment: str = ""
    # Of its first frame in the source.
    start: Seconds = 0.0
    # Other columns of the input, such as captions.
    fields: dict[str, Any] = field(default_factory=dict)
    # Why the video cannot be used, if its row is broken; the other values are then harmless.
    problem: str = ""

    @property
    def label(self) -> int | None:
        """The label, if there is exactly one."""
        if self.labels is not None and len(self.labels) == 1:
            return self.labels[0]
        return None


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One tar of a dataset."""

    # Such as shard-000000.tar.
    name: FileName
    num_samples: Annotated[int, Meta(ge=0, lt=2**32)]
    num_bytes: Bytes
    sha256: Sha256
    samples_sha256: str = ""

    @property
    def samples_name(self) -> str:
        """The name of the file that describes its samples."""
        return self.name.removesuffix(".tar") + ".samples.jsonl"


@dataclass(frozen=True)
class SizeRange:
    """The smallest and largest sides in pixels of all videos of a codec."""

    num_samples: Annotated[int, Meta(ge=1)]
    min_width: Side
    max_width: Side
    min_height: Side
    max_height: Side

    def contains(self, width: int, height: int) -> bool:
        """Return whether a size is in the range."""
        fits_width = self.min_width <= width <= self.max_width
        fits_height = self.min_height <= height <= self.max_height
        return fits_width and fits_height

    def merge(self, other: "SizeRange") -> "SizeRange":
        """Return the range of two sets of videos."""
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
    """Statistics of a dataset for its card."""

    hours: float
    class_histogram: dict[str, Bytes]
    # Lists of sources whose bytes are equal.
    duplicates: list[list[str]]
    # Those of them that have different labels.
    conflicts: list[list[str]]


@dataclass(frozen=True)
class DatasetInfo:
    """The content of `dataset.json`."""

    num_samples: Bytes
    num_frames: Bytes
    num_bytes: Bytes
    # Names by class id; empty if there are no labels.
    classes: list[str]
    # The settings that the shards were made with.
    encode: dict[str, Any]
    # From their table, not in dataset.json.
    shards: Sequence[ShardInfo]
    num_rejected: Bytes = 0
    report: Report = field(default_factory=Report)
    # Summaries, so that nobody has to read every sample for them.
    codecs: dict[Word, SizeRange] = field(default_factory=dict)
    containers: list[Word] = field(default_factory=list)
    frame_strides: list[Stride] = field(default_factory=list)
    num_unlabeled: Bytes = 0
    # Whether a sample has several labels, or an empty list of them.
    multi_label: bool = False
    tables: dict[str, TableInfo] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `dataset.json`."""
        values: dict[str, Any] = msgspec.to_builtins(replace(self, shards=[]))
        del values["shards"]
        return values


T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence whose items are made whenever they are asked for."""

    def __init__(self, length: int, item: Callable[[int], T]) -> None:
        self._length = length
        self._item = item

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> T:  # type: ignore[override]  # no slices
        if not -self._length <= index < self._length:
            raise IndexError(f"item {index} of {self._length}")
        return self._item(index % self._length)


# Returns the local file of a table, which may have to be downloaded first.
Locate = Callable[[TableInfo], Path]


def has_dataset_json(folder: Path) -> bool:
    """Return whether a folder holds `dataset.json`.

    A link that leads nowhere counts: its target may be on a disk that is not mounted, and it must
    not be overwritten.
    """
    return os.path.lexists(folder / DATASET_FILE)


def read_dataset_info(folder: Path) -> DatasetInfo:
    """Read `dataset.json`; raise InputError if it is missing, broken or of another version."""
    path = folder / DATASET_FILE
    if not has_dataset_json(folder):
        raise InputError(f"no {DATASET_FILE} in {folder}: {_advise(folder)}")
    if not path.is_file():
        raise InputError(
            f"{path} is no file, or a link that leads to none: put the dataset's description there"
            " again"
        )
    return parse_dataset_info(path.read_bytes(), str(path), lambda table: folder / table.file)


def find_splits(folder: Path) -> list[Path]:
    """Find the datasets that `make_shards.py INPUT FOLDER` with --hold-out or --split has made."""
    return sorted(file.parent for file in folder.glob(f"*/{DATASET_FILE}"))


def _advise(folder: Path) -> str:
    """Say what to do about a folder that is no dataset."""
    if not folder.is_dir():
        return "there is no such folder"
    splits = find_splits(folder)
    if splits:
        return f"give {' or '.join(map(str, splits))}"
    plans = [*folder.glob(PLAN_FILE), *folder.glob(f"*/{PLAN_FILE}")]
    if plans:
        return (
            "shard_tools/make_shards.py was interrupted there: run the same command again, which"
            " completes it"
        )
    return f"create shards with `python shard_tools/make_shards.py {folder} SHARDS`"


def parse_dataset_info(data: bytes, path: str, locate: Locate) -> DatasetInfo:
    """Parse the content of `dataset.json`, and open the table of shards that it names.

    path: for messages. Raise InputError as read_dataset_info does.
    """
    try:
        raw = json.loads(data.decode())
        if raw["schema_version"] != SCHEMA_VERSION:
            raise InputError(
                f"{path} has schema version {raw['schema_version']}, this code reads"
                f" {SCHEMA_VERSION}: make the shards again"
            )
        raw.pop("sha256", None)
        info = _convert_description(raw)
        rows = open_table("shards", info, locate)
        # A shard is looked up for every clip.
        read_shard = lru_cache(4096)(partial(_read_shard, rows))
        return replace(info, shards=LazySequence(len(rows), read_shard))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise InputError(
            f"{path} is not a dataset description ({reason}): make the shards again"
        ) from error


def _convert_description(raw: dict[str, Any]) -> DatasetInfo:
    """Check the fields of a description; raise ValueError if one is unknown, missing or broken."""
    unknown = raw.keys() - {entry.name for entry in fields(DatasetInfo)}
    if unknown:
        raise ValueError(f"unknown field {min(unknown)}")
    info: DatasetInfo = msgspec.convert({**raw, "shards": []}, DatasetInfo)
    if info.tables.keys() != TABLES.keys():
        raise ValueError(f"its tables are {', '.join(info.tables) or 'missing'}")
    if info.num_samples and not (info.codecs and info.containers and info.frame_strides):
        raise ValueError("it names no codecs, containers or frame_strides")
    return info


def _read_shard(rows: np.ndarray, number: int) -> ShardInfo:
    """Check a row of the table of shards; raise InputError if it is broken."""
    name, _first_sample, num_samples, num_bytes, sha256, samples_sha256 = rows[number].item()
    values = {
        "name": name.decode("ascii", "replace"),
        "num_samples": num_samples,
        "num_bytes": num_bytes,
        "sha256": sha256.hex(),
        "samples_sha256": samples_sha256.hex(),
    }
    try:
        return msgspec.convert(values, ShardInfo)
    except ValueError as error:
        raise InputError(
            f"row {number} of the table of shards is damaged ({error}): put the table back"
        ) from error


def open_table(name: str, info: DatasetInfo, locate: Locate) -> np.ndarray:
    """Map a table of a dataset into memory: its rows, or the bytes of its lines.

    Raise InputError if it is not the one that dataset.json describes. Tables above HASHED_BYTES are
    hashed by check_shards alone. So are those of shards and GOPs, as the bytes that they lead to
    are checked when they are read.
    """
    table = info.tables[name]
    path = locate(table)
    try:
        _check_file(name, table, path)
        dtype = TABLES[name]
        if dtype is None:
            return np.asarray(np.memmap(path, np.uint8, "r"))
        # An empty file cannot be mapped.
        rows = np.load(path, mmap_mode="r" if table.num_rows else None, allow_pickle=False)
        is_array = isinstance(rows, np.ndarray)
        if not is_array or rows.dtype != dtype or rows.shape != (table.num_rows,):
            raise ValueError("it is not the table that the description promises")
    # NumPy's parser raises a dozen kinds of exceptions for damaged headers.
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        advice = REWRITE.format(path.parent)
        if name == "shards":
            advice = "put it back, or make the shards again"
        raise InputError(f"{path} cannot be used ({reason}): {advice}") from error
    # A view of the type ndarray, as np.memmap makes an object of every row.
    return np.asarray(rows)


def _check_file(name: str, table: TableInfo, path: Path) -> None:
    """Raise ValueError if a file is not the table that dataset.json describes."""
    num_bytes = path.stat().st_size
    if num_bytes != table.num_bytes:
        raise ValueError(f"it has {num_bytes} bytes and should have {table.num_bytes}")
    is_hashed = name in HASHED_TABLES and num_bytes <= HASHED_BYTES
    if is_hashed and hash_file(path) != table.sha256:
        raise ValueError("it has changed since it was written")


def read_samples(folder: Path, shard: ShardInfo) -> Iterator[Sample]:
    """Read the samples of a shard in tar order; raise InputError if their file is broken."""
    path = folder / shard.samples_name
    try:
        with path.open("rb") as lines:
            for line in lines:
                yield parse_line(line, Sample)
    # msgspec's errors are ValueErrors.
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): run"
            f" `python shard_tools/check_shards.py {path.parent}`"
        ) from error


def parse_line(line: bytes, kind: type[T]) -> T:
    """Parse a line of JSON and check every field; raise ValueError or RecursionError.

    msgspec takes a sixth of the time of json.loads.
    """
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Names that are not UTF-8 are written as half a surrogate pair, which only json takes.
        return msgspec.convert(json.loads(line), kind)
