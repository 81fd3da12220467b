"""What a dataset holds: numbers that depend on its samples alone, and its data card."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from common.atomic_io import write_text
from common.logging import printable
from pipeline.shards.format import CARD_FILE, DatasetInfo, Report, Sample, ShardInfo
from shard_tools.temp_table import TempTable

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


def describe_samples(
    samples: Iterable[Sample], shards: list[ShardInfo], classes: list[str], settings: dict[str, Any], num_rejected: int
) -> DatasetInfo:
    """Compute the content of `dataset.json`, in memory that does not grow with the number of samples."""
    num_samples = num_frames = 0
    seconds, histogram = 0.0, Counter[str]()
    files = TempTable("CREATE TABLE files (sha256 BLOB, source BLOB, segment BLOB, labels BLOB)")
    for sample in samples:
        row = sample.source_sha256, sample.source, sample.segment, json.dumps(sample.labels)
        files.insert("files", [row], 4)
        num_samples += 1
        num_frames += sample.num_frames
        histogram.update(classes[label] for label in sample.labels or ())
        seconds += sample.num_frames / sample.fps
    report: Report = {
        "hours": round(seconds / 3600, 6),
        "class_histogram": dict(sorted(histogram.items())),
        "duplicates": _group(files.run(DUPLICATES)),
        "conflicts": _group(files.run(CONFLICTS)),
    }
    return DatasetInfo(
        num_samples=num_samples,
        num_frames=num_frames,
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


def write_card(folder: Path, info: DatasetInfo) -> None:
    """Write README.md, with which other libraries find the shards and people what is in them."""
    histogram = info.report.get("class_histogram", {})
    lines = [f"{number}. {printable(name)}: {histogram.get(name, 0)}" for number, name in enumerate(info.classes)]
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
