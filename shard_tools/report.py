"""Summarize what a dataset holds, in numbers that depend on its samples alone, and in a picture."""

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from common.atomic_io import atomic_write
from common.logging import printable
from pipeline.shards import arrays
from pipeline.shards.format import DatasetInfo, Report, Sample, ShardInfo, read_samples
from shard_tools.encoding.source import open_source, read_frames
from shard_tools.inputs import TarMember
from shard_tools.plan import shuffle_key
from shard_tools.temp_table import TempTable, as_bytes, as_text
from shard_tools.work import local_copy

CONTACT_SHEET_FILE = "contact_sheet.png"
COLUMNS, ROWS = 5, 5
CELL = (250, 232)  # width, height of a picture with its caption, pixels
HEAD = 24  # pixels above the pictures, which say how many of all they are
LETTERS = 40  # of Pillow's own font, in a cell's width


def describe_samples(
    samples: Iterable[Sample],
    shards: list[ShardInfo],
    classes: list[str],
    settings: dict[str, Any],
    num_rejected: int,
) -> DatasetInfo:
    """Compute the content of `dataset.json`, in memory that does not grow with the number of samples."""
    counts: Counter[str] = Counter()
    codecs: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    histogram: Counter[str] = Counter()
    seconds = 0.0
    files = TempTable("CREATE TABLE files (sha256 BLOB, source BLOB)")
    for sample in samples:
        files.insert("files", [(sample.source_sha256.encode(), as_bytes(sample.source))], 2)
        counts.update(samples=1, frames=sample.num_frames, bytes=sample.size)
        codecs[sample.codec] += 1
        sizes[f"{sample.width}x{sample.height}"] += 1
        if sample.label is not None:
            histogram[classes[sample.label]] += 1
        seconds += sample.num_frames / sample.fps
    file_list_sha256, duplicates = _hash_files(files)
    report: Report = {
        "hours": round(seconds / 3600, 6),
        "num_sources": files.fetch_one("SELECT count(DISTINCT source) FROM files")[0],
        "video_bytes": counts["bytes"],
        "codecs": dict(sorted(codecs.items())),
        "sizes": dict(sizes.most_common(10)),
        "class_histogram": dict(sorted(histogram.items())),
        "unlabeled": counts["samples"] - histogram.total(),
        "file_list_sha256": file_list_sha256,
        "duplicates": duplicates,
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
    rows = files.run("SELECT DISTINCT sha256, source FROM files ORDER BY sha256, source || x'0a'")
    for sha256, group in groupby(rows, itemgetter(0)):
        sources = [as_text(source) for _, source in group]
        for source in sources:
            digest.update(f"{sha256.decode()}  {source}\n".encode(errors="surrogateescape"))
        if len(sources) > 1:
            duplicates.append(sorted(sources))
    return digest.hexdigest(), sorted(duplicates)


def write_contact_sheet(folder: Path, info: DatasetInfo) -> None:
    """Draw the middle frames of random samples, with what is known about them."""
    places = ((shard, sample) for shard in info.shards for sample in read_samples(folder, shard))
    chosen = heapq.nsmallest(COLUMNS * ROWS, places, lambda place: shuffle_key(place[1].key))
    sheet = Image.new("RGB", (CELL[0] * COLUMNS, HEAD + CELL[1] * -(-len(chosen) // COLUMNS)), "white")
    draw = ImageDraw.Draw(sheet)
    is_all = len(chosen) == info.num_samples
    title = f"all {info.num_samples} videos" if is_all else f"{len(chosen)} random videos of {info.num_samples}"
    draw.text((5, 5), f"{title} (middle frames)", fill="black")
    for number, (shard, sample) in enumerate(chosen):
        left, top = number % COLUMNS * CELL[0], HEAD + number // COLUMNS * CELL[1]
        picture = _middle_frame(folder / shard.name, sample)
        picture.thumbnail((CELL[0] - 10, CELL[1] - 72))
        sheet.paste(picture, (left + 5, top + 5))
        label = "no label" if sample.label is None else info.classes[sample.label]
        facts = f"{sample.width}x{sample.height} {sample.codec} {sample.fps:.4g} fps, {sample.num_frames} frames"
        lines = (*wrap_caption(sample.key), printable(label)[:LETTERS], facts)
        draw.text((left + 5, top + CELL[1] - 64), "\n".join(lines).encode("ascii", "replace").decode(), fill="black")
    with atomic_write(folder / CONTACT_SHEET_FILE) as aside:
        sheet.save(aside, format="PNG")


def wrap_caption(name: str) -> tuple[str, str]:
    """Wrap a name into two lines; leave out the middle of one that is too long."""
    text = printable(name)
    if len(text) > 2 * LETTERS:
        text = f"{text[: LETTERS + 10]}...{text[-(LETTERS - 13) :]}"
    return text[:LETTERS], text[LETTERS:]


def _middle_frame(shard: Path, sample: Sample) -> Image.Image:
    number = sample.num_frames // 2
    with local_copy(TarMember(str(shard), sample.offset, sample.size, f"{sample.key}.{sample.container}")) as path:
        if sample.container == arrays.CONTAINER:
            return Image.fromarray(arrays.to_rgb(arrays.read_array(path, [number])[0]))
        with open_source(path) as (container, stream):
            return next(islice(read_frames(container, stream), number, None)).to_image()
