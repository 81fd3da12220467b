"""Put staged samples into a shard: tar, DALI index and samples.jsonl, each of which exists whole or not at all."""

import hashlib
import io
import json
import mmap
import tarfile
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
Members = dict[str, tuple[int, int]]  # (offset, size) in bytes of every file in a tar, in order


class ChangedError(Exception):
    """A video is not what it was when it was processed; the message is its source."""


class HashingFile:
    """Hashes and counts what is written to, or read from, a file."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.num_bytes += len(data)
        return self.file.write(data)

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        return data


def tar_metadata(sample: Sample) -> bytes:
    """Return the <key>.json member: all of a sample but what follows from the tar."""
    return json.dumps({name: value for name, value in asdict(sample).items() if name not in PLACE}).encode()


def write_shard(folder: Path, name: str, samples: list[tuple[Sample, Path]]) -> ShardInfo:
    """Write shard `name` (shard-000000.tar) of `folder`; the same samples give the same bytes. Raise ChangedError."""
    placed = []
    members: Members = {}
    with atomic_write(folder / name) as aside, aside.open("wb") as file:
        hashing = HashingFile(file)
        # As webdataset's TarWriter does, but that imports torch (1.5 s) and keeps whole videos in memory.
        with tarfile.open(fileobj=hashing, mode="w|") as tar:  # type: ignore[call-overload]
            for sample, path in samples:
                metadata = tar_metadata(sample)
                _add(tar, members, f"{sample.key}.json", io.BytesIO(metadata), len(metadata))
                offset, size = _add_video(tar, members, sample, path)
                placed.append(
                    replace(sample, offset=offset, size=size, gops=encode_gops(_index_stored_gops(sample, path)))
                )
    info = ShardInfo(name, len(samples), hashing.num_bytes, hashing.digest.hexdigest())
    write_text(folder / info.index_name, format_index(members))
    with atomic_write(folder / info.samples_name) as aside:
        aside.write_bytes(b"".join(map(sample_line, placed)))
    return info


def _index_stored_gops(sample: Sample, path: Path) -> np.ndarray:
    """Return the GOP table's rows of a video that we have encoded.

    A copied one may have groups too, but only its encoder knows whether they are closed; frames of an array always are.
    """
    if sample.sha256 == sample.source_sha256 and sample.container != CONTAINER:
        return np.empty(0, GOP)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as video,
        memoryview(video) as view,
    ):
        return index_gops(view, sample.num_frames)


def _add_video(tar: tarfile.TarFile, members: Members, sample: Sample, path: Path) -> tuple[int, int]:
    """Raise ChangedError if its bytes are not those that `sample` was made from: a copied video is the user's file."""
    with path.open("rb") as video:
        hashing, size = HashingFile(video), path.stat().st_size
        try:
            place = _add(tar, members, f"{sample.key}.{sample.container}", cast(BinaryIO, hashing), size)
        except OSError as error:
            if error.errno is not None:  # the disk's fault; tarfile's own error, for a file that ends early, has none
                raise
            raise ChangedError(sample.source) from error
    if hashing.digest.hexdigest() != sample.sha256:
        raise ChangedError(sample.source)
    return place


def _add(tar: tarfile.TarFile, members: Members, name: str, content: BinaryIO, size: int) -> tuple[int, int]:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o444
    offset = tar.offset + tarfile.BLOCKSIZE  # names are short enough for a header of one block
    tar.addfile(member, content)
    members[name] = offset, size
    return members[name]


def list_members(path: Path) -> Members:
    """List the files in a tar; raise tarfile.TarError if it is not whole."""
    try:
        members = {}
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.size < 0:  # tarfile would loop forever
                    raise ValueError(f"{member.size} bytes")
                if member.isfile():
                    members[member.name] = member.offset_data, member.size
        return members
    except (ValueError, OverflowError) as error:  # tarfile seeks wherever a header says
        raise tarfile.ReadError(f"a header describes an impossible file: {error}") from error


def format_index(members: Members) -> str:
    """Return what DALI's `wds2idx` writes for a tar with these members."""
    lines: dict[str, list[str]] = {}
    for name, (offset, size) in members.items():
        start = name.find(".", name.rfind("/") + 1)
        lines.setdefault(name[:start], []).append(f"{name[start + 1 :]} {offset} {size} {name}")
    return f"{INDEX_VERSION} {len(lines)}\n" + "".join(" ".join(parts) + "\n" for parts in lines.values())
