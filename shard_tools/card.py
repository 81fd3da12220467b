"""The data card of a dataset: README.md, with which other libraries find its shards and people what is in them."""

from pathlib import Path

from common.atomic_io import write_text
from common.logging import printable
from pipeline.shards.format import CARD_FILE, DatasetInfo

MAX_CLASSES = 1000  # that are listed
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

from torchcodec.decoders import VideoDecoder
VideoDecoder(sample["{container}"])[:16]  # uint8 [16, 3, H, W]
```

{classes}
"""


def write_card(folder: Path, info: DatasetInfo) -> None:
    histogram = info.report.get("class_histogram", {})
    lines = [f"{number}. {printable(name)}: {histogram.get(name, 0)}" for number, name in enumerate(info.classes)]
    if len(lines) > MAX_CLASSES:
        lines = [*lines[:MAX_CLASSES], f"… and {len(lines) - MAX_CLASSES} more, in `dataset.json`"]
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
