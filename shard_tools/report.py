"""What a dataset holds, in numbers that depend on its samples alone."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from pipeline.shards.format import DatasetInfo, Report, Sample, ShardInfo
from shard_tools.temp_table import TempTable

DUPLICATES = """SELECT DISTINCT sha256, source FROM files WHERE sha256 IN (
    SELECT sha256 FROM files GROUP BY sha256 HAVING count(DISTINCT source) > 1) ORDER BY sha256"""
CONFLICTS = """SELECT DISTINCT sha256, segment, source FROM files WHERE (sha256, segment) IN (
    SELECT sha256, segment FROM files GROUP BY sha256, segment
    HAVING count(DISTINCT labels) > 1 AND count(DISTINCT source) > 1) ORDER BY sha256, segment"""


def describe_samples(
    samples: Iterable[Sample],
    shards: list[ShardInfo],
    classes: list[str],
    settings: dict[str, Any],
    num_rejected: int,
) -> DatasetInfo:
    """Compute the content of `dataset.json`, in memory that does not grow with the number of samples."""
    counts, histogram = Counter[str](), Counter[str]()
    seconds = 0.0
    files = TempTable("CREATE TABLE files (sha256 BLOB, source BLOB, segment BLOB, labels BLOB)")
    for sample in samples:
        row = sample.source_sha256, sample.source, sample.segment, json.dumps(sample.labels)
        files.insert("files", [row], 4)
        counts.update(samples=1, frames=sample.num_frames)
        histogram.update(classes[label] for label in sample.labels or ())
        seconds += sample.num_frames / sample.fps
    report: Report = {
        "hours": round(seconds / 3600, 6),
        "num_sources": next(files.run("SELECT count(DISTINCT source) FROM files"))[0],
        "class_histogram": dict(sorted(histogram.items())),
        "duplicates": _group(files.run(DUPLICATES)),
        "conflicts": _group(files.run(CONFLICTS)),
    }
    return DatasetInfo(
        num_samples=counts["samples"],
        num_frames=counts["frames"],
        num_bytes=sum(shard.num_bytes for shard in shards),
        classes=classes,
        encode=settings,
        shards=shards,
        num_rejected=num_rejected,
        report=report,
    )


def _group(rows: Iterator[list[Any]]) -> list[list[str]]:
    """Group the sources, last in each row, that have all else in common."""
    return sorted(sorted(row[-1] for row in group) for _, group in groupby(rows, lambda row: row[:-1]))
