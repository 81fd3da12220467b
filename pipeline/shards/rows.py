"""Samples into rows of the tables, shard after shard, and what dataset.json says of all of them."""

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipeline.shards.format import SAMPLE, DatasetInfo, Sample, Sides
from pipeline.shards.gops import GOP


class ShardRows(NamedTuple):
    """What one shard adds to the tables."""

    samples: np.ndarray  # of SAMPLE
    gops: np.ndarray  # of GOP
    names: bytes


class RowWriter:
    """Makes the rows of a dataset; keeps none of them."""

    def __init__(self) -> None:
        self.num_samples = self.num_gops = self.num_name_bytes = self._num_shards = self._num_unlabeled = 0
        self._codecs: dict[str, int] = {}
        self._containers: dict[str, int] = {}
        self._strides: set[int] = set()
        self._labels: tuple[int, int] | None = None
        self._sides: list[Sides] = []

    def rows_of(self, samples: Sequence[Sample]) -> ShardRows:
        """Make the rows of the next shard's samples, in tar order."""
        names = [name_line(sample) for sample in samples]
        gops = [decode_gops(sample) for sample in samples]
        rows = np.array([self._row(sample) for sample in samples], SAMPLE)
        rows["shard"] = self._num_shards
        rows["name"] = self.num_name_bytes + _starts(names)
        rows["first_gop"] = self.num_gops + _starts(gops)
        rows["num_gops"] = [len(part) for part in gops]
        self._count(rows)
        self._num_shards += 1
        self.num_samples += len(samples)
        self.num_gops += sum(map(len, gops))
        self.num_name_bytes += sum(map(len, names))
        held = [part for part in gops if len(part)]
        return ShardRows(rows, np.concatenate(held) if held else np.empty(0, GOP), b"".join(names))

    def describe(self, info: DatasetInfo) -> DatasetInfo:
        """`info` with what is known of all samples."""
        return replace(
            info,
            codecs=dict(zip(self._codecs, self._sides, strict=True)),
            containers=list(self._containers),
            frame_strides=sorted(self._strides),
            labels=self._labels,
            num_unlabeled=self._num_unlabeled,
        )

    def _row(self, sample: Sample) -> tuple[int | float | bytes, ...]:
        codec = self._codecs.setdefault(sample.codec, len(self._codecs))
        container = self._containers.setdefault(sample.container, len(self._containers))
        label = -1 if sample.label is None else sample.label
        sides = sample.width, sample.height, sample.frame_stride
        place = 0, label, sample.offset, sample.size, 0, 0
        return *place, sample.fps, 0, sample.num_frames, *sides, codec, container, bytes.fromhex(sample.sha256)

    def _count(self, rows: np.ndarray) -> None:
        self._strides |= set(np.unique(rows["frame_stride"]).tolist())
        labels = rows["label"][rows["label"] >= 0]
        self._num_unlabeled += len(rows) - len(labels)
        if len(labels):
            bounds = (int(labels.min()), int(labels.max()))
            known = self._labels or bounds
            self._labels = min(known[0], bounds[0]), max(known[1], bounds[1])
        for codec in range(len(self._codecs)):
            chosen = rows[rows["codec"] == codec]
            if len(chosen):
                sides = sides_of(chosen["width"], chosen["height"])
                if codec < len(self._sides):
                    self._sides[codec] = merge_sides(self._sides[codec], sides)
                else:
                    self._sides.append(sides)


def sides_of(widths: np.ndarray, heights: np.ndarray) -> Sides:
    area = widths.astype(np.int64) * heights
    numbers = widths.min(), widths.max(), heights.min(), heights.max(), area.max()
    return Sides(len(widths), *map(int, numbers))


def merge_sides(a: Sides, b: Sides) -> Sides:
    """Combine those of two sets of videos."""
    return Sides(
        a.num_samples + b.num_samples,
        min(a.min_width, b.min_width),
        max(a.max_width, b.max_width),
        min(a.min_height, b.min_height),
        max(a.max_height, b.max_height),
        max(a.max_area, b.max_area),
    )


def name_line(sample: Sample) -> bytes:
    """Make a line of the table of names, in ASCII, whatever the letters of the name are."""
    return json.dumps([sample.key, sample.source]).encode() + b"\n"


def decode_gops(sample: Sample) -> np.ndarray:
    """Decode a sample's rows of the GOP table."""
    return np.frombuffer(base64.b64decode(sample.gops), GOP)


def encode_gops(rows: np.ndarray) -> str:
    """Encode rows of the GOP table as text."""
    return base64.b64encode(rows.tobytes()).decode("ascii")


def _starts(parts: Sequence[bytes] | Sequence[np.ndarray]) -> np.ndarray:
    """Where each begins if they stand one behind the other."""
    lengths = np.array([len(part) for part in parts], np.int64)
    return np.cumsum(lengths) - lengths
