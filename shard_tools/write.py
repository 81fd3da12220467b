"""Write shards (tar, samples.jsonl), and from these the tables, `dataset.json` and a data card.

Each file exists whole or not at all. Files of tables are named by their content and never change;
`dataset.json` names those that count, and is replaced atomically. So readers continue with what
they have opened, and a run that is killed leaves the dataset as it was. Memory does not exceed that
of one shard.
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

# The fields of a Sample that follow from the tar, and so cannot be written into it.
TAR_FIELDS = ("offset", "size", "gops", "problem")
# The tables' file extensions.
SUFFIXES = {**dict.fromkeys(TABLES, "npy"), "names": "jsonl"}
# Takes columns and a condition; selects the sources of files that share the values of the columns.
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

{num_frames} frames, {hours:.2f} hours, {megabytes:.1f} MB in {num_shards} shards of {codecs}.
Made by AdaMAE's `make_shards.py`; `dataset.json` has all settings, `rejected.jsonl` what could not
be used, with the reasons.

Each sample is `<key>.<container>`, the video, and `<key>.json`: `labels` (class ids, numbers from 0
in the list below; null: unlabeled), `num_frames`, `fps`, `width`, `height`, `source`, `segment` and
`start` (seconds) in it, and `fields` (what else the input said: captions, …).

```python
import datasets

# With torchcodec, which misses the last frame in seek_mode="approximate" where a container does not
# count its frames. For the bytes: video.cast_column("{container}", datasets.Video(decode=False))
video = datasets.load_dataset("FOLDER", split="train")

import glob, webdataset

tars = sorted(glob.glob("FOLDER/*.tar"))
for sample in webdataset.WebDataset(tars, shardshuffle=False).decode():
    sample["json"]["labels"], sample["{container}"]  # the video is bytes
```

{classes}
"""
# Of the folder that holds the splits.
SPLITS_CARD = """---
configs:
- config_name: default
  data_files:
{files}
---
# Video clips in {num_splits} splits

Made by AdaMAE's `make_shards.py`; each split's folder has a README.md of its own.

```python
import datasets

splits = datasets.load_dataset("FOLDER")
```
"""
# Offset and size in bytes of every file in a tar, in order.
Members = dict[str, tuple[int, int]]
# The bar of a rewrite of the tables would only flash by for fewer shards.
MIN_SHARDS_FOR_BAR = 100


def write_shard(folder: Path, name: str, samples: list[tuple[Sample, Path]]) -> ShardInfo:
    """Write shard `name` (shard-000000.tar) of `folder`; the same samples give the same bytes.

    Raise InputError if a copied video changes meanwhile.
    """
    with atomic_write(folder / name) as aside:
        # webdataset's TarWriter gives the same bytes in 1.5 to 2 times the time: it imports torch
        # (1.4 s) and holds whole videos in memory.
        with tarfile.open(aside, "w") as tar:
            for sample, path in samples:
                facts = asdict(sample)
                for field in TAR_FIELDS:
                    del facts[field]
                metadata = json.dumps(facts).encode()
                _add(tar, f"{sample.key}.json", io.BytesIO(metadata), len(metadata))
                with path.open("rb") as video:
                    _add(tar, _video_name(sample), video, path.stat().st_size)
        lines = []
        members = list_members(aside)
        with aside.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for sample, _ in samples:
                offset, size = members[_video_name(sample)]
                lines.append(dump_sample(locate_sample(sample, offset, size, data)))
        info = ShardInfo(name, len(samples), aside.stat().st_size, hash_file(aside))
    with atomic_write(folder / info.samples_name) as aside:
        aside.write_bytes(b"".join(lines))
    return info


def _video_name(sample: Sample) -> str:
    """Return the name of a sample's video in the tar."""
    return f"{sample.key}.{sample.container}"


def _add(tar: tarfile.TarFile, name: str, content: BinaryIO, size: int) -> None:
    """Add a file without owner and time, which would differ from run to run."""
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o444
    tar.addfile(member, content)


def locate_sample(sample: Sample, offset: int, size: int, tar: mmap.mmap) -> Sample:
    """Return a sample with its position in the tar, and its GOPs if make_shards has encoded it.

    A copied video may have GOPs too, but only its encoder knows whether they are closed; frames of
    an array always are. Raise InputError if the bytes are not those of the sample's hash: a copied
    video is the user's file, and may have changed.
    """
    with memoryview(tar) as whole, whole[offset : offset + size] as video:
        if hashlib.sha256(video).hexdigest() != sample.sha256:
            raise InputError(
                f"{sample.source} changed while it was stored: run the same command again"
            )
        is_copied = sample.sha256 == sample.source_sha256 and sample.container != CONTAINER
        gops = b"" if is_copied else index_gops(video, sample.num_frames).tobytes()
    return replace(sample, offset=offset, size=size, gops=base64.b64encode(gops).decode("ascii"))


def index_gops(data: Buffer, num_frames: int) -> Rows:
    """Return the rows of a video in the table of GOPs.

    There are none if it is not fragmented MP4, or its fragments need each other to be decoded. The
    first row is that of the bytes before the first GOP. A video of 1,000 bytes whose GOPs of 10
    frames begin at bytes 100 and 600 has the rows (first_frame, offset) = (0, 0), (0, 100),
    (10, 600).
    """
    no_rows = np.empty(0, GOP)
    try:
        if is_array(data):
            shape = read_shape(data)
            lengths = [1] * len(map_frames(data))
            offsets = [shape.start + index * shape.frame_bytes for index in range(len(lengths))]
        else:
            fragments = list(read_fragments(data))
            offsets = [fragment.start for fragment in fragments]
            lengths = [fragment.num_frames for fragment in fragments]
    except (struct.error, ValueError, VideoError):
        return no_rows
    # Offsets are stored in 32 bits.
    if not offsets or sum(lengths) != num_frames or len(data) >= 2**32:
        return no_rows
    first_frames = [0, 0, *accumulate(lengths[:-1])]
    bounds = [0, *offsets, len(data)]
    rows = np.empty(len(first_frames), GOP)
    for index, first_frame in enumerate(first_frames):
        start = bounds[index]
        end = bounds[index + 1]
        rows[index] = (first_frame, start, checksum(first_frame, data[start:end]))
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
                # On a negative size, tarfile would loop forever.
                if member.size < 0:
                    raise ValueError(f"{member.size} bytes")
                if member.isfile():
                    members[member.name] = member.offset_data, member.size
    # tarfile seeks wherever a header says, and seeking raises these.
    except (ValueError, OverflowError) as error:
        raise tarfile.ReadError(f"a header describes an impossible file: {error}") from error
    return members


def publish_tables(folder: Path, info: DatasetInfo) -> DatasetInfo:
    """Write the tables, then `dataset.json`, then remove tables that it no longer names.

    Return `info` with what follows from the shards.
    """
    new = write_tables(folder, info)
    write_description(folder, new)
    for name, suffix in SUFFIXES.items():
        for path in folder.glob(f"{name}-*.{suffix}"):
            if path.name != new.tables[name].file:
                path.unlink()
    return new


def write_tables(folder: Path, info: DatasetInfo) -> DatasetInfo:
    """Write the tables of the shards that `info` names; return `info` with what these hold.

    Memory does not grow with the number of samples. Raise InputError if the samples.jsonl of a
    shard is missing or broken.
    """
    writer = RowWriter()
    tables = {name: _TableFile(folder, name) for name in SUFFIXES}
    files = TempTable("CREATE TABLE files (sha256 BLOB, source BLOB, segment BLOB, labels BLOB)")
    num_frames = 0
    seconds = 0.0
    histogram = Counter[int]()
    shards = []
    hides_bar = len(info.shards) < MIN_SHARDS_FOR_BAR
    for shard in progress_bar(info.shards, unit="shard", desc="tables", disable=hides_bar):
        path = folder / shard.samples_name
        samples = list(read_samples(folder, shard))
        if len(samples) != shard.num_samples:
            raise InputError(f"{path} lists {len(samples)} samples, not {shard.num_samples}")
        shard = replace(shard, samples_sha256=hash_file(path))
        shards.append(shard)
        tables["shards"].add(_dump_shard(shard, writer.num_samples), 1)
        try:
            rows, gops, names = writer.make_rows(samples)
        except (ValueError, OverflowError) as error:
            raise InputError(f"{path} is broken ({error}): create the shard again") from error
        tables["samples"].add(rows.tobytes(), len(rows))
        tables["gops"].add(gops.tobytes(), len(gops))
        tables["names"].add(names, len(rows))
        file_rows = []
        for sample in samples:
            labels = json.dumps(sample.labels)
            file_rows.append((sample.source_sha256, sample.source, sample.segment, labels))
            histogram.update(sample.labels or ())
            num_frames += sample.num_frames
            seconds += sample.num_frames / sample.fps
        files.insert("files", file_rows, 4)
    class_counts = {}
    for label, name in enumerate(info.classes):
        if label in histogram:
            class_counts[name] = histogram[label]
    report: Report = {
        "hours": round(seconds / 3600, 6),
        "class_histogram": dict(sorted(class_counts.items())),
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


def _dump_shard(shard: ShardInfo, first_sample: int) -> bytes:
    """Return a shard's row of the table of shards."""
    row = (
        shard.name.encode(),
        first_sample,
        shard.num_samples,
        shard.num_bytes,
        bytes.fromhex(shard.sha256),
        bytes.fromhex(shard.samples_sha256),
    )
    return np.array([row], SHARD).tobytes()


def _group(rows: Iterator[list[Any]]) -> list[list[str]]:
    """Return groups of the sources, last in each row, of rows that are equal otherwise."""
    groups = []
    for _, equal_rows in groupby(rows, lambda row: row[:-1]):
        sources = [row[-1] for row in equal_rows]
        groups.append(sorted(sources))
    return sorted(groups)


def write_card(folder: Path, info: DatasetInfo) -> None:
    """Write README.md, for other libraries to find the shards and for people to read."""
    classes = "No labels."
    if info.classes:
        histogram = info.report.get("class_histogram", {})
        lines = ["Classes, with their samples:", ""]
        for index, name in enumerate(info.classes):
            lines.append(f"{index}. {printable(name)}: {histogram.get(name, 0)}")
        classes = "\n".join(lines)
    text = CARD.format(
        num_samples=info.num_samples,
        num_frames=info.num_frames,
        hours=info.report.get("hours", 0.0),
        megabytes=info.num_bytes / 1e6,
        num_shards=len(info.shards),
        codecs=", ".join(f"{name} ({sides.num_samples})" for name, sides in info.codecs.items()),
        container=info.containers[0],
        classes=classes,
    )
    write_text(folder / CARD_FILE, text)


def write_splits_card(folder: Path, names: Sequence[str]) -> None:
    """Write README.md beside the splits, for datasets.load_dataset to read them together."""
    lines = [f'  - split: {name}\n    path: "{name}/*.tar"' for name in names]
    text = SPLITS_CARD.format(files="\n".join(lines), num_splits=len(names))
    write_text(folder / CARD_FILE, text)


def write_description(folder: Path, info: DatasetInfo) -> None:
    """Write `dataset.json`, with the hash of all other entries as the last one."""
    values = info.to_json()
    values["sha256"] = hash_description(values)
    write_text(folder / DATASET_FILE, json.dumps(values, indent=2) + "\n")


def hash_description(values: dict[str, Any]) -> str:
    """Hash the entries of `dataset.json` but the hash, as JSON with sorted keys and no spaces."""
    rest = {name: value for name, value in values.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class RowWriter:
    """Turns samples into rows of the tables, shard by shard, and sums up facts about them all."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._num_gops = 0
        self._num_name_bytes = 0
        self._num_unlabeled = 0
        self._multi_label = False
        self._strides: set[int] = set()
        # The table of samples stores the position of a codec, and of a container, in these.
        self._codecs: dict[str, SizeRange] = {}
        self._containers: dict[str, int] = {}

    def make_rows(self, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, bytes]:
        """Return rows of SAMPLE, rows of GOP and lines of names for the samples of the next shard.

        `samples` are in tar order.
        """
        names = [_dump_names(sample) for sample in samples]
        gops = [np.frombuffer(base64.b64decode(sample.gops), GOP) for sample in samples]
        labels = [summarize_labels(sample.labels) for sample in samples]
        columns: dict[str, Any] = {}
        for name in ROW_FIELDS:
            columns[name] = [getattr(sample, name) for sample in samples]
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
        self._strides.update(columns["frame_stride"])
        self._num_unlabeled += labels.count(UNLABELED)
        self._multi_label |= MULTI_LABEL in labels
        self.num_samples += len(samples)
        self._num_gops += sum(map(len, gops))
        self._num_name_bytes += sum(map(len, names))
        return rows, np.concatenate([np.empty(0, GOP), *gops]), b"".join(names)

    def describe(self, info: DatasetInfo) -> DatasetInfo:
        """Return `info` with the facts about all samples so far."""
        return replace(
            info,
            codecs=self._codecs,
            containers=list(self._containers),
            frame_strides=sorted(self._strides),
            num_unlabeled=self._num_unlabeled,
            multi_label=self._multi_label,
        )

    def _number_codec(self, sample: Sample) -> int:
        """Return the index of a sample's codec, and widen the range of its videos' sizes."""
        sizes = SizeRange(1, sample.width, sample.width, sample.height, sample.height)
        if sample.codec in self._codecs:
            sizes = self._codecs[sample.codec].merge(sizes)
        # An existing key keeps its position.
        self._codecs[sample.codec] = sizes
        return list(self._codecs).index(sample.codec)

    def _number_container(self, sample: Sample) -> int:
        """Return the index of a sample's container; a new one comes after all others."""
        return self._containers.setdefault(sample.container, len(self._containers))


def _dump_names(sample: Sample) -> bytes:
    """Return a sample's line of the table of names."""
    values = [getattr(sample, name) for name in NameLine._fields]
    return json.dumps(values).encode() + b"\n"


def _find_starts(first: int, parts: Sequence[Sized]) -> list[int]:
    """Return where each part starts, if they follow each other and the first starts at `first`.

    Example: parts of 3, 5 and 2 start at 10, 13 and 18 if `first` is 10.
    """
    starts = []
    for part in parts:
        starts.append(first)
        first += len(part)
    return starts


class _TableFile:
    """A table that is written to a temporary file, and then named by its hash."""

    def __init__(self, folder: Path, name: str) -> None:
        self._name = name
        self._path = folder / f".{name}-table.partial"
        self._num_rows = 0
        self._file = self._path.open("wb")
        self._write_header()

    def add(self, data: bytes, num_rows: int) -> None:
        self._file.write(data)
        self._num_rows += num_rows

    def finish(self) -> TableInfo:
        """Give the file its name; return its description."""
        size = self._file.tell()
        # The header tells the number of rows, which is known only now.
        self._file.seek(0)
        self._write_header()
        self._file.close()
        digest = hash_file(self._path)
        # Both the bytes and the name must be on the disk before dataset.json refers to them.
        sync(self._path)
        name = f"{self._name}-{digest[:16]}.{SUFFIXES[self._name]}"
        path = self._path.rename(self._path.with_name(name))
        sync(path.parent)
        return TableInfo(path.name, self._num_rows, size, digest)

    def _write_header(self) -> None:
        """Write NumPy's header, which has as many bytes for any number of rows."""
        dtype = TABLES[self._name]
        if dtype is None:
            return
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (self._num_rows,),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
