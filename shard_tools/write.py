"""Write shards (tar, samples.jsonl), and from what lies beside them the tables, `dataset.json` and a data card.

Each file exists whole or not at all. Files of tables are named by their content and never change; `dataset.json` says
which ones count, and is replaced atomically. So readers continue with what they have opened, and a run that is killed
leaves the dataset as it was. Memory is that of one shard.
"""

import base64
import hashlib
import io
import json
import mmap
import struct
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import asdict, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from adamae.common.atomic_io import atomic_write, hash_file, sync, write_text
from adamae.common.errors import InputError
from adamae.common.logging import printable
from adamae.common.progress import progress_bar
from adamae.pipeline.shards.arrays import CONTAINER, Buffer, is_array, map_frames, read_shape
from adamae.pipeline.shards.format import (
    CARD_FILE,
    DATASET_FILE,
    MULTI_LABEL,
    SAMPLE,
    SCHEMA_VERSION,
    SHARD,
    TABLES,
    UNLABELED,
    DatasetInfo,
    Report,
    Sample,
    ShardInfo,
    SizeRange,
    TableInfo,
)
from adamae.pipeline.shards.gops import GOP, Rows, checksum
from adamae.pipeline.shards.index import ROW_FIELDS, NameLine, summarize_labels
from adamae.pipeline.shards.mp4 import read_fragments
from adamae.pipeline.shards.read_format import read_samples
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools.temp_table import TempTable

TAR_FIELDS = ("offset", "size", "gops", "problem")  # what of a Sample follows from the tar
SUFFIXES = {**dict.fromkeys(TABLES, "npy"), "names": "jsonl"}  # of tables
# Of files, (columns, condition): those with the same columns and several sources.
EQUAL = """SELECT DISTINCT {0}, source FROM files WHERE ({0}) IN (
    SELECT {0} FROM files GROUP BY {0} HAVING count(DISTINCT source) > 1 {1}) ORDER BY {0}"""
DUPLICATES = EQUAL.format("sha256", "")
CONFLICTS = EQUAL.format("sha256, segment", "AND count(DISTINCT labels) > 1")
CARD = """---
configs:
- config_name: default
  data_files: "*.tar"
---
# {num_samples} video clips

{num_frames} frames, {hours:.2f} hours, {megabytes:.1f} MB in {num_shards} shards of {codecs}. Made by AdaMAE's
`make_shards.py`; `dataset.json` has all settings, `rejected.jsonl` what could not be used, with the reasons.

Each sample is `<key>.<container>`, the video, and `<key>.json`: `labels` (class ids, numbers from 0 in the list below;
null: unlabeled), `num_frames`, `fps`, `width`, `height`, `source`, `segment` and `start` (seconds) in it, and `fields`
(what else the input said: captions, …).

```python
import datasets  # with torchcodec, or video.cast_column("{container}", datasets.Video(decode=False)) for the bytes
video = datasets.load_dataset("FOLDER", split="train")

import glob, webdataset
for sample in webdataset.WebDataset(sorted(glob.glob("FOLDER/*.tar")), shardshuffle=False).decode():
    sample["json"]["labels"], sample["{container}"]  # bytes
```

{classes}
"""
Members = dict[str, tuple[int, int]]  # (offset, size) in bytes of every file in a tar, in order


def write_shard(folder: Path, name: str, samples: list[tuple[Sample, Path]]) -> ShardInfo:
    """Write shard `name` (shard-000000.tar) of `folder`; the same samples give the same bytes.

    Raise InputError if a copied video changes meanwhile.
    """
    with atomic_write(folder / name) as aside:
        # webdataset's TarWriter gives the same bytes in 1.5 to 2 times the time: it imports torch (1.4 s) and holds
        # whole videos in memory.
        with tarfile.open(aside, "w") as tar:
            for sample, path in samples:
                facts = {
                    name: value for name, value in asdict(sample).items() if name not in TAR_FIELDS
                }
                metadata = json.dumps(facts).encode()
                _add(tar, f"{sample.key}.json", io.BytesIO(metadata), len(metadata))
                with path.open("rb") as video:
                    _add(tar, f"{sample.key}.{sample.container}", video, path.stat().st_size)
        members = list_members(aside)
        with aside.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            located = [
                locate_sample(sample, *members[f"{sample.key}.{sample.container}"], data)
                for sample, _ in samples
            ]
        info = ShardInfo(name, len(samples), aside.stat().st_size, hash_file(aside))
    with atomic_write(folder / info.samples_name) as aside:
        aside.write_bytes(b"".join(map(dump_sample, located)))
    return info


def _add(tar: tarfile.TarFile, name: str, content: BinaryIO, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o444
    tar.addfile(member, content)


def locate_sample(sample: Sample, offset: int, size: int, tar: mmap.mmap) -> Sample:
    """Return a sample with its place in the tar, and its GOPs if we have encoded it.

    A copied video may have groups too, but only its encoder knows whether they are closed; frames of an array always
    are. Raise InputError if its bytes are not those that it was made from: a copied video is the user's file.
    """
    with memoryview(tar) as whole, whole[offset : offset + size] as video:
        if hashlib.sha256(video).hexdigest() != sample.sha256:
            raise InputError(
                f"{sample.source} changed while it was stored: run the same command again"
            )
        is_copied = sample.sha256 == sample.source_sha256 and sample.container != CONTAINER
        rows = b"" if is_copied else index_gops(video, sample.num_frames).tobytes()
    return replace(sample, offset=offset, size=size, gops=base64.b64encode(rows).decode("ascii"))


def index_gops(data: Buffer, num_frames: int) -> Rows:
    """Make the rows of a video, none if it is not fragmented MP4, or its fragments need each other to be decoded.

    The first row is that of the bytes before the first group. A video of 1,000 bytes whose groups of 10 frames begin
    at bytes 100 and 600 has the rows (first_frame, offset) = (0, 0), (0, 100), (10, 600).
    """
    no_rows = np.empty(0, GOP)
    try:
        if is_array(data):
            shape = read_shape(data)
            offsets = [
                shape.start + number * shape.frame_bytes for number in range(len(map_frames(data)))
            ]
            lengths = [1] * len(offsets)
        else:
            fragments = list(read_fragments(data))
            offsets = [fragment.start for fragment in fragments]
            lengths = [fragment.num_frames for fragment in fragments]
    except (struct.error, ValueError, VideoError):
        return no_rows
    if not offsets or sum(lengths) != num_frames or len(data) >= 2**32:
        return no_rows
    first_frames = [0, 0, *accumulate(lengths[:-1])]
    bounds = [0, *offsets, len(data)]
    rows = np.empty(len(first_frames), GOP)
    for number, first_frame in enumerate(first_frames):
        start, end = bounds[number], bounds[number + 1]
        rows[number] = (first_frame, start, checksum(first_frame, data[start:end]))
    return rows


def dump_sample(sample: Sample) -> bytes:
    """Return a sample's line of `samples.jsonl`; a `problem` is never stored."""
    values = asdict(sample)
    del values["problem"]
    return json.dumps(values).encode() + b"\n"


def list_members(path: Path) -> Members:
    """List the files in a tar; raise tarfile.TarError if it is not whole."""
    members = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.size < 0:  # tarfile would loop forever
                    raise ValueError(f"{member.size} bytes")
                if member.isfile():
                    members[member.name] = member.offset_data, member.size
    except (ValueError, OverflowError) as error:  # tarfile seeks wherever a header says
        raise tarfile.ReadError(f"a header describes an impossible file: {error}") from error
    return members


def publish_tables(folder: Path, info: DatasetInfo) -> DatasetInfo:
    """Write the tables, then `dataset.json`, then remove tables that it no longer names; return what it says."""
    new = write_tables(folder, info)
    write_description(folder, new)
    for name, suffix in SUFFIXES.items():
        for path in folder.glob(f"{name}-*.{suffix}"):
            if path.name != new.tables[name].file:
                path.unlink()
    return new


def write_tables(folder: Path, info: DatasetInfo) -> DatasetInfo:
    """Write the tables of the shards that `info` names; return `info` with what they say.

    Memory does not grow with the number of samples. Raise InputError if the samples.jsonl of a shard is missing or
    broken.
    """
    writer = RowWriter()
    tables = {name: _TableFile(folder, name) for name in SUFFIXES}
    files = TempTable("CREATE TABLE files (sha256 BLOB, source BLOB, segment BLOB, labels BLOB)")
    num_frames, seconds, histogram, shards = 0, 0.0, Counter[int](), []
    for shard in progress_bar(
        info.shards, unit="shard", desc="tables", disable=len(info.shards) < 100
    ):
        path = folder / shard.samples_name
        samples = list(read_samples(folder, shard))
        if len(samples) != shard.num_samples:
            raise InputError(f"{path} lists {len(samples)} samples, not {shard.num_samples}")
        shards.append(replace(shard, samples_sha256=hash_file(path)))
        hashes = bytes.fromhex(shard.sha256), bytes.fromhex(shards[-1].samples_sha256)
        row = shard.name.encode(), writer.num_samples, shard.num_samples, shard.num_bytes, *hashes
        tables["shards"].add(np.array([row], SHARD).tobytes(), 1)
        try:
            rows, gops, names = writer.make_rows(samples)
        except (ValueError, OverflowError) as error:
            raise InputError(f"{path} is broken ({error}): create the shard again") from error
        tables["samples"].add(rows.tobytes(), len(rows))
        tables["gops"].add(gops.tobytes(), len(gops))
        tables["names"].add(names, len(rows))
        files.insert(
            "files",
            ((it.source_sha256, it.source, it.segment, json.dumps(it.labels)) for it in samples),
            4,
        )
        for sample in samples:
            histogram.update(sample.labels or ())
            num_frames += sample.num_frames
            seconds += sample.num_frames / sample.fps
    counts = {
        name: histogram[label] for label, name in enumerate(info.classes) if label in histogram
    }
    report: Report = {
        "hours": round(seconds / 3600, 6),
        "class_histogram": dict(sorted(counts.items())),
        "duplicates": _group(files.run(DUPLICATES)),
        "conflicts": _group(files.run(CONFLICTS)),
    }
    return replace(
        writer.describe(info),
        num_samples=writer.num_samples,
        num_frames=num_frames,
        num_bytes=sum(shard.num_bytes for shard in shards),
        report=report,
        shards=shards,
        tables={name: table.finish() for name, table in tables.items()},
        schema_version=SCHEMA_VERSION,
    )


def _group(rows: Iterator[list[Any]]) -> list[list[str]]:
    """Group the sources, last in each row, that have all else in common."""
    return sorted(
        sorted(row[-1] for row in group) for _, group in groupby(rows, lambda row: row[:-1])
    )


def write_card(folder: Path, info: DatasetInfo) -> None:
    """Write README.md, with which other libraries find the shards and people what is in them."""
    histogram = info.report.get("class_histogram", {})
    lines = [
        f"{number}. {printable(name)}: {histogram.get(name, 0)}"
        for number, name in enumerate(info.classes)
    ]
    text = CARD.format(
        num_samples=info.num_samples,
        num_frames=info.num_frames,
        hours=info.report.get("hours", 0.0),
        megabytes=info.num_bytes / 1e6,
        num_shards=len(info.shards),
        codecs=", ".join(f"{name} ({sides.num_samples})" for name, sides in info.codecs.items()),
        container=info.containers[0],
        classes="\n".join(["Classes, with their samples:", "", *lines]) if lines else "No labels.",
    )
    write_text(folder / CARD_FILE, text)


def write_description(folder: Path, info: DatasetInfo) -> None:
    """Write `dataset.json`, with the hash of what it says as the last entry."""
    values = info.to_json()
    write_text(
        folder / DATASET_FILE,
        json.dumps({**values, "sha256": hash_description(values)}, indent=2) + "\n",
    )


def hash_description(values: dict[str, Any]) -> str:
    """Hash what `dataset.json` says except this hash, as JSON without white space and with sorted keys."""
    rest = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(
        json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


class RowWriter:
    """Turns samples into rows of the tables, shard after shard, and collects what dataset.json says of all of them."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._num_gops = 0
        self._num_name_bytes = 0
        self._num_unlabeled = 0
        self._multi_label = False
        self._strides: set[int] = set()
        # A codec's number, and a container's, is its position in these.
        self._codecs: dict[str, SizeRange] = {}
        self._containers: dict[str, int] = {}

    def make_rows(self, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, bytes]:
        """Make the rows of the next shard's samples, in tar order: of SAMPLE, of GOP, and lines of names."""
        names = [_dump_names(sample) for sample in samples]
        gops = [np.frombuffer(base64.b64decode(sample.gops), GOP) for sample in samples]
        labels = [summarize_labels(sample.labels) for sample in samples]
        strides = [sample.frame_stride for sample in samples]
        columns: dict[str, Any] = {
            name: [getattr(sample, name) for sample in samples] for name in ROW_FIELDS
        }
        columns["label"] = labels
        columns["codec"] = [self._number_codec(sample) for sample in samples]
        columns["container"] = [self._number_container(sample) for sample in samples]
        columns["sha256"] = [bytes.fromhex(sample.sha256) for sample in samples]
        columns["num_gops"] = [len(rows) for rows in gops]
        columns["first_gop"] = _find_starts(self._num_gops, gops)
        columns["name"] = _find_starts(self._num_name_bytes, names)
        rows = np.empty(len(samples), SAMPLE)
        for name, values in columns.items():
            rows[name] = values
        self._strides.update(strides)
        self._num_unlabeled += labels.count(UNLABELED)
        self._multi_label |= MULTI_LABEL in labels
        self.num_samples += len(samples)
        self._num_gops += sum(map(len, gops))
        self._num_name_bytes += sum(map(len, names))
        return rows, np.concatenate([np.empty(0, GOP), *gops]), b"".join(names)

    def describe(self, info: DatasetInfo) -> DatasetInfo:
        """Add to `info` what is known of all samples."""
        return replace(
            info,
            codecs=self._codecs,
            containers=list(self._containers),
            frame_strides=sorted(self._strides),
            num_unlabeled=self._num_unlabeled,
            multi_label=self._multi_label,
        )

    def _number_codec(self, sample: Sample) -> int:
        """Return the number of a sample's codec, and widen the range of its videos' sizes."""
        sizes = SizeRange(1, sample.width, sample.width, sample.height, sample.height)
        if sample.codec in self._codecs:
            sizes = self._codecs[sample.codec].merge(sizes)
        self._codecs[sample.codec] = sizes
        return list(self._codecs).index(sample.codec)

    def _number_container(self, sample: Sample) -> int:
        return self._containers.setdefault(sample.container, len(self._containers))


def _dump_names(sample: Sample) -> bytes:
    """Return a sample's line of the table of names."""
    values = [getattr(sample, name) for name in NameLine._fields]
    return json.dumps(values).encode() + b"\n"


def _find_starts(first: int, parts: Sequence[Sized]) -> list[int]:
    """Return where each part starts, one behind the other, if the first one starts at `first`."""
    *starts, _end = accumulate(map(len, parts), initial=first)
    return starts


class _TableFile:
    """A table that is written to a temporary file, and then named by its hash."""

    def __init__(self, folder: Path, name: str) -> None:
        self._name, self._path, self._num_rows = name, folder / f".{name}-table.partial", 0
        self._file = self._path.open("wb")
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
        sync(self._path)
        path = self._path.rename(
            self._path.with_name(f"{self._name}-{digest[:16]}.{SUFFIXES[self._name]}")
        )
        sync(path.parent)
        return TableInfo(path.name, self._num_rows, size, digest)

    def _write_header(self) -> None:
        """Write NumPy's header, which has room for any number of rows."""
        if (dtype := TABLES[self._name]) is not None:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
            np.lib.format.write_array_header_1_0(self._file, {**header, "shape": (self._num_rows,)})
