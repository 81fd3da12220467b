"""Write the tables of a whole dataset and its description, out of what lies beside its shards.

Files of tables are named after their content and stay as they are; `dataset.json` says which ones count, and is
replaced at once. So whoever has the dataset open goes on reading what it has opened, and a run that is killed leaves
the dataset as it was before. Memory is that of one shard.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

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

KINDS = {**dict.fromkeys(TABLES, "npy"), "names": "jsonl"}


def publish(folder: Path, info: DatasetInfo) -> DatasetInfo:
    """Write the tables of the shards that `info` names, then `dataset.json`; returns what that says.

    Raises InputError if the `samples.jsonl` of a
    shard is missing or broken.
    """
    maker = RowWriter()
    with ExitStack() as stack:
        writers = {name: stack.enter_context(_Writer.of(folder, name)) for name in KINDS}
        shards = []
        for shard in progress_bar(info.shards, unit="shard", desc="tables", disable=len(info.shards) < 100):
            samples = list(read_samples(folder, shard))
            if len(samples) != shard.num_samples:
                raise InputError(f"{folder / shard.samples_name} lists {len(samples)} samples, not {shard.num_samples}")
            shards.append(hashed(folder, shard))
            writers["shards"].rows(np.array([_shard_row(shards[-1], maker.num_samples)], SHARD))
            try:
                made = maker.rows_of(samples)
            except (ValueError, OverflowError) as error:
                raise InputError(
                    f"{folder / shard.samples_name} cannot be used ({error}): make the shard again"
                ) from error
            writers["samples"].rows(made.samples)
            writers["gops"].rows(made.gops)
            writers["names"].bytes(made.names, len(made.samples))
        tables = {name: writer.finish() for name, writer in writers.items()}
    new = replace(
        maker.describe(info), num_samples=maker.num_samples, shards=shards, tables=tables, content="",
        schema_version=SCHEMA_VERSION,
    )  # fmt: skip
    content = Tables.open(new, folder, lambda table: folder / table.file).content
    new = replace(new, content=content)
    write_description(folder, new)
    for name, kind in KINDS.items():
        for path in folder.glob(f"{name}-*.{kind}"):
            if path.name != tables[name].file:
                path.unlink()
    return new


def write_description(folder: Path, info: DatasetInfo) -> None:
    """Write `dataset.json`, with the hash of what it says as the last entry."""
    said = info.to_json()
    write_text(folder / DATASET_FILE, json.dumps({**said, "sha256": hash_of_description(said)}, indent=2) + "\n")


def hash_of_description(said: dict[str, Any]) -> str:
    """SHA-256 of what `dataset.json` says but for this hash, as JSON without white space and with sorted keys."""
    rest = {name: value for name, value in said.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hashed(folder: Path, shard: ShardInfo) -> ShardInfo:
    """A shard with the hashes of the files beside its tar. Raises InputError if one is missing."""
    try:
        index, samples = (hash_file(folder / name) for name in (shard.index_name, shard.samples_name))
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read ({error.strerror}): put it back") from error
    return replace(shard, index_sha256=index, samples_sha256=samples)


def _shard_row(shard: ShardInfo, first_sample: int) -> tuple[Any, ...]:
    hashes = map(bytes.fromhex, (shard.sha256, shard.index_sha256, shard.samples_sha256))
    return shard.name.encode(), first_sample, shard.num_samples, shard.num_bytes, *hashes


class _Writer:
    """Writes one table aside."""

    def __init__(self, folder: Path, name: str, path: Path, file: BinaryIO) -> None:
        self._folder, self._name, self._path, self._file = folder, name, path, file
        self._num_rows = 0
        self._header()

    @classmethod
    @contextmanager
    def of(cls, folder: Path, name: str) -> "Iterator[_Writer]":
        """A writer that leaves nothing behind unless it has finished."""
        path = folder / f".{name}-table.partial"
        try:
            with path.open("wb") as file:
                yield cls(folder, name, path, file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def rows(self, rows: np.ndarray) -> None:
        self.bytes(rows.tobytes(), len(rows))

    def bytes(self, data: bytes, num_rows: int) -> None:
        self._file.write(data)
        self._num_rows += num_rows

    def finish(self) -> TableInfo:
        """Give the table its name; returns its description."""
        size = self._file.tell()
        self._file.seek(0)
        self._header()
        self._file.flush()
        digest = hash_file(self._path)
        target = self._folder / f"{self._name}-{digest[:16]}.{KINDS[self._name]}"
        sync(self._path)
        self._path.replace(target)
        sync(self._folder)
        return TableInfo(target.name, self._num_rows, size, digest)

    def _header(self) -> None:
        """NumPy keeps room for any number of rows in the header."""
        if self._name in TABLES:
            shape = {"descr": np.lib.format.dtype_to_descr(TABLES[self._name]), "fortran_order": False}
            np.lib.format.write_array_header_1_0(self._file, {**shape, "shape": (self._num_rows,)})
