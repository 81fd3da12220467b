"""What a dataset holds, in figures that depend on nothing but its samples."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from pipeline.shards import DatasetInfo, Sample, ShardInfo


def describe(
    samples: Sequence[Sample],
    shards: list[ShardInfo],
    classes: list[str],
    settings: dict[str, Any],
    num_rejected: int,
) -> DatasetInfo:
    """The content of `dataset.json`."""
    by_content: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        by_content[sample.source_sha256].add(sample.source)
    report = {
        "hours": round(sum(sample.num_frames / sample.fps for sample in samples) / 3600, 6),
        "video_bytes": sum(sample.size for sample in samples),
        "codecs": dict(sorted(Counter(sample.codec for sample in samples).items())),
        "sizes": dict(Counter(f"{sample.width}x{sample.height}" for sample in samples).most_common(10)),
        "class_histogram": dict(sorted(Counter(classes[s.label] for s in samples if s.label is not None).items())),
        "unlabelled": sum(sample.label is None for sample in samples),
        "file_list_sha256": file_list_hash(samples),
        "duplicates": sorted(sorted(sources) for sources in by_content.values() if len(sources) > 1),
    }
    return DatasetInfo(
        num_samples=len(samples),
        num_frames=sum(sample.num_frames for sample in samples),
        num_bytes=sum(shard.num_bytes for shard in shards),
        classes=classes,
        encode=settings,
        shards=shards,
        num_rejected=num_rejected,
        report=report,
    )


def file_list_hash(samples: Sequence[Sample]) -> str:
    """Equal for two people exactly if they made shards from the same files under the same names, however encoded."""
    lines = sorted({f"{sample.source_sha256}  {sample.source}\n" for sample in samples})
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
