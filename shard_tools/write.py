"""Put staged samples into a shard: tar, DALI index and table of samples, each of which exists whole or not at all."""

import hashlib
import io
import json
import mmap
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from common.atomic_io import atomic_write, write_text
from pipeline.shards.arrays import CONTAINER
from pipeline.shards.format import Sample, ShardInfo, sample_line
from pipeline.shards.gops import GOP, index_gops
from pipeline.shards.rows import encode_gops

INDEX_VERSION = "v1.2"  # of DALI's wds2idx
PLACE = ("offset", "size", "gops")  # what of a Sample follows from the tar


class ChangedError(Exception):
    """A video is not what it was when it was looked at; the message is its source."""


class HashingFile:
    """A file that hashes and counts what is written to it."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        return self.file.write(data)


class HashingReader:
    """Hashes what is read from a file."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        return data


def tar_metadata(sample: Sample) -> bytes:
    """The <key>.json member: all of a sample but what follows from the tar."""
    value = {name: content for name, content in asdict(sample).items() if name not in PLACE}
    return json.dumps(value).encode()


def write_shard(folder: Path, name: str, samples: Iterable[tuple[Sample, Path]]) -> ShardInfo:
    """Write shard `name` (shard-000000.tar) of `folder`; the same samples give the same bytes. Raises ChangedError."""
    samples = list(samples)
    with atomic_write(folder / name) as aside:
        with aside.open("wb") as file:
            hashing = HashingFile(file)
            # As webdataset's TarWriter does, but that imports torch (1.5 s) and keeps whole videos in memory.
            with tarfile.open(fileobj=hashing, mode="w|") as tar:  # type: ignore[call-overload]
                for sample, path in samples:
                    description = tar_metadata(sample)
                    _add(tar, f"{sample.key}.json", io.BytesIO(description), len(description))
                    _add_video(tar, sample, path)
        members = list_members(aside)
    placed = [
        replace(
            sample,
            offset=members[f"{sample.key}.{sample.container}"][0],
            size=path.stat().st_size,
            gops=encode_gops(index_stored_gops(sample, path)),
        )
        for sample, path in samples
    ]
    info = ShardInfo(name, len(samples), hashing.num_bytes, hashing.digest.hexdigest())
    write_text(folder / info.index_name, index_of(members))
    with atomic_write(folder / info.samples_name) as aside:
        aside.write_bytes(b"".join(map(sample_line, placed)))
    return info


def index_stored_gops(sample: Sample, path: Path) -> np.ndarray:
    """The rows of the GOP table of a video that we have encoded.

    One that was copied may be cut into groups too, but whether these need each other only its encoder knows; frames of
    an array never do.
    """
    if sample.sha256 == sample.source_sha256 and sample.container != CONTAINER:
        return np.empty(0, GOP)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as video,
        memoryview(video) as view,
    ):
        return index_gops(view, sample.num_frames)


def _add_video(tar: tarfile.TarFile, sample: Sample, path: Path) -> None:
    """Raises ChangedError if its bytes are not those that `sample` was made from: a copied video is the user's file."""
    with path.open("rb") as video:
        member = HashingReader(video)
        try:
            _add(tar, f"{sample.key}.{sample.container}", cast(BinaryIO, member), path.stat().st_size)
        except OSError as error:
            if error.errno is not None:  # the disk's fault; tarfile's own error, at a file that ends early, has none
                raise
            raise ChangedError(sample.source) from error
    if member.digest.hexdigest() != sample.sha256:
        raise ChangedError(sample.source)


def _add(tar: tarfile.TarFile, name: str, content: BinaryIO, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o444
    tar.addfile(member, content)


def list_members(path: Path) -> dict[str, tuple[int, int]]:
    """(offset, size) in bytes of every file in a tar, in order; raises tarfile.TarError if it is not whole."""
    try:
        members = {}
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.size < 0:  # tarfile would go round in circles
                    raise ValueError(f"{member.size} bytes")
                if member.isfile():
                    members[member.name] = member.offset_data, member.size
        return members
    except (ValueError, OverflowError) as error:  # tarfile seeks wherever a header says
        raise tarfile.ReadError(f"a header is of no file that could be: {error}") from error


def index_of(members: dict[str, tuple[int, int]]) -> str:
    """What DALI's `wds2idx` writes for a tar with these members."""
    lines: dict[str, list[str]] = {}
    for name, (offset, size) in members.items():
        start = name.find(".", name.rfind("/") + 1)
        lines.setdefault(name[:start], []).append(f"{name[start + 1 :]} {offset} {size} {name}")
    return f"{INDEX_VERSION} {len(lines)}\n" + "".join(" ".join(parts) + "\n" for parts in lines.values())
