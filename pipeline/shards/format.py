"""The shard format: dataset.json, shards with their samples.jsonl, and tables.

docs/shards.md describes all of it; shard_tools/write.py writes it, and read_format.py reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

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

    @property
    def has_one_label(self) -> bool:
        """Return whether every video has one label, of two classes or more."""
        return len(self.classes) > 1 and not self.num_unlabeled and not self.multi_label

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `dataset.json`."""
        values: dict[str, Any] = msgspec.to_builtins(replace(self, shards=[]))
        del values["shards"]
        return values
