"""Read dataset.json, the tables that it names, and the samples.jsonl of shards."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from adamae.common.atomic_io import hash_file
from adamae.common.errors import InputError
from adamae.pipeline.shards.format import (
    DATASET_FILE,
    PLAN_FILE,
    SCHEMA_VERSION,
    TABLES,
    DatasetInfo,
    Sample,
    ShardInfo,
    TableInfo,
)

# Tables that are hashed whenever they are opened, unless they are larger: a table of this size
# takes .2 s.
HASHED_TABLES = ("samples", "names")
HASHED_BYTES = 2**28
REWRITE = "write them again with `python shard_tools/check_shards.py {} --rewrite-tables`"

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
