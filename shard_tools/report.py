"""What a dataset holds, in numbers that depend on its samples alone."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from pipeline.shards.format import DatasetInfo, Report, Sample, ShardInfo
from shard_tools.temp_table import TempTable


def describe_samples(
    samples: Iterable[Sample],
    shards: list[ShardInfo],
    classes: list[str],
    settings: dict[str, Any],
    num_rejected: int,
) -> DatasetInfo:
    """Compute the content of `dataset.json`, in memory that does not grow with the number of samples."""
    counts, codecs, sizes, histogram = (Counter[str]() for _ in range(4))
    seconds = 0.0
    files = TempTable("CREATE TABLE files (sha256 BLOB, source BLOB, segment BLOB, labels BLOB)")
    for sample in samples:
        row = sample.source_sha256, sample.source, sample.segment, json.dumps(sample.labels)
        files.insert("files", [row], 4)
        counts.update(samples=1, frames=sample.num_frames, bytes=sample.size)
        codecs[sample.codec] += 1
        sizes[f"{sample.width}x{sample.height}"] += 1
        histogram.update(classes[label] for label in sample.labels or ())
        counts["unlabeled"] += sample.labels is None
        seconds += sample.num_frames / sample.fps
    file_list_sha256, duplicates = _hash_files(files)
    report: Report = {
        "hours": round(seconds / 3600, 6),
        "num_sources": next(files.run("SELECT count(DISTINCT source) FROM files"))[0],
        "video_bytes": counts["bytes"],
        "codecs": dict(sorted(codecs.items())),
        "sizes": dict(sizes.most_common(10)),
        "class_histogram": dict(sorted(histogram.items())),
        "unlabeled": counts["unlabeled"],
        "file_list_sha256": file_list_sha256,
        "duplicates": duplicates,
        "conflicts": _find_conflicts(files),
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


def _hash_files(files: TempTable) -> tuple[str, list[list[str]]]:
    """Hash the input files with their names, however they were encoded; also list the names of equal files."""
    digest, duplicates = hashlib.sha256(), []
    rows = files.run("SELECT DISTINCT sha256, source FROM files ORDER BY sha256, CAST(source AS BLOB) || x'0a'")
    for sha256, group in groupby(rows, itemgetter(0)):
        sources = [source for _, source in group]
        for source in sources:
            digest.update(f"{sha256}  {source}\n".encode(errors="surrogateescape"))
        if len(sources) > 1:
            duplicates.append(sorted(sources))
    return digest.hexdigest(), sorted(duplicates)


def _find_conflicts(files: TempTable) -> list[list[str]]:
    """List the names of equal files that have different labels, of the whole or of an equal segment."""
    rows = files.run("""SELECT DISTINCT sha256, segment, source FROM files WHERE (sha256, segment) IN (
        SELECT sha256, segment FROM files GROUP BY sha256, segment
        HAVING count(DISTINCT labels) > 1 AND count(DISTINCT source) > 1) ORDER BY sha256, segment, source""")
    return sorted(sorted(source for *_, source in group) for _, group in groupby(rows, itemgetter(0, 1)))
