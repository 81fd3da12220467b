"""Write the tables of a whole dataset and its description, from what lies beside its shards.

Files of tables are named by their content and never change; `dataset.json` says which ones count, and is replaced
atomically. So readers go on with what they have opened, and a run that is killed leaves the dataset as it was. Memory
is that of one shard.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.atomic_io import hash_file, sync, write_text
from common.errors import InputError
from common.progress import progress_bar
from pipeline.shards.format import (
    DATASET_FILE,
    SCHEMA_VERSION,
    SHARD,
    TABLES,
    DatasetInfo,
    ShardInfo,
    TableInfo,
    read_samples,
)
from pipeline.shards.index import Tables
from pipeline.shards.rows import RowWriter

SUFFIXES = {**dict.fromkeys(TABLES, "npy"), "names": "jsonl"}


def publish_tables(folder: Path, info: DatasetInfo) -> DatasetInfo:
    """Write the tables, then `dataset.json`, then remove tables that it no longer names; return what it says."""
    new = write_tables(folder, info, folder)
    write_description(folder, new)
    for name, suffix in SUFFIXES.items():
        for path in folder.glob(f"{name}-*.{suffix}"):
            if path.name != new.tables[name].file:
                path.unlink()
    return new


def write_tables(folder: Path, info: DatasetInfo, target: Path) -> DatasetInfo:
    """Write the tables of the shards that `info` names to `target`; return `info` with what they say.

    Raise InputError if the samples.jsonl of a shard is missing or broken.
    """
    maker = RowWriter()
    tables = {name: _TableFile(target, name) for name in SUFFIXES}
    shards = []
    for shard in progress_bar(info.shards, unit="shard", desc="tables", disable=len(info.shards) < 100):
        samples = list(read_samples(folder, shard))
        if len(samples) != shard.num_samples:
            raise InputError(f"{folder / shard.samples_name} lists {len(samples)} samples, not {shard.num_samples}")
        shards.append(add_hashes(folder, shard))
        tables["shards"].add(np.array([_shard_row(shards[-1], maker.num_samples)], SHARD).tobytes(), 1)
        try:
            rows = maker.rows_of(samples)
        except (ValueError, OverflowError) as error:
            raise InputError(f"{folder / shard.samples_name} is broken ({error}): create the shard again") from error
        tables["samples"].add(rows.samples.tobytes(), len(rows.samples))
        tables["gops"].add(rows.gops.tobytes(), len(rows.gops))
        tables["names"].add(rows.names, len(rows.samples))
    new = replace(
        maker.describe(info),
        num_samples=maker.num_samples,
        shards=shards,
        tables={name: table.finish() for name, table in tables.items()},
        content="",
        schema_version=SCHEMA_VERSION,
    )
    return replace(new, content=Tables.open(new, target, lambda table: target / table.file).content)


def write_description(folder: Path, info: DatasetInfo) -> None:
    """Write `dataset.json`, with the hash of what it says as the last entry."""
    values = info.to_json()
    write_text(folder / DATASET_FILE, json.dumps({**values, "sha256": hash_description(values)}, indent=2) + "\n")


def hash_description(values: dict[str, Any]) -> str:
    """Hash what `dataset.json` says except this hash, as JSON without white space and with sorted keys."""
    rest = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def add_hashes(folder: Path, shard: ShardInfo) -> ShardInfo:
    """Return a shard with the hashes of the files beside its tar. Raise InputError if one is missing."""
    try:
        index, samples = (hash_file(folder / name) for name in (shard.index_name, shard.samples_name))
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read ({error.strerror}): restore it") from error
    return replace(shard, index_sha256=index, samples_sha256=samples)


def _shard_row(shard: ShardInfo, first_sample: int) -> tuple[Any, ...]:
    hashes = map(bytes.fromhex, (shard.sha256, shard.index_sha256, shard.samples_sha256))
    return shard.name.encode(), first_sample, shard.num_samples, shard.num_bytes, *hashes


class _TableFile:
    """A table that is written to a temporary file, and then named by its hash."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._path = folder / f".{name}-table.partial"
        self._file = self._path.open("wb")
        self._num_rows = 0
        self._write_header()

    def add(self, data: bytes, num_rows: int) -> None:
        self._file.write(data)
        self._num_rows += num_rows

    def finish(self) -> TableInfo:
        """Give the file its name; return its description."""
        size = self._file.tell()
        self._file.seek(0)
        self._write_header()
        self._file.close()
        digest = hash_file(self._path)
        target = self._folder / f"{self._name}-{digest[:16]}.{SUFFIXES[self._name]}"
        sync(self._path)
        self._path.replace(target)
        sync(self._folder)
        return TableInfo(target.name, self._num_rows, size, digest)

    def _write_header(self) -> None:
        """Write NumPy's header, which has room for any number of rows."""
        if self._name in TABLES:
            header = {"descr": np.lib.format.dtype_to_descr(TABLES[self._name]), "fortran_order": False}
            np.lib.format.write_array_header_1_0(self._file, {**header, "shape": (self._num_rows,)})
