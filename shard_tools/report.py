"""What a dataset holds, in figures that depend on nothing but its samples."""

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
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
from shard_tools.layout import shuffle_key
from shard_tools.temp_table import TempTable, as_bytes, as_text
from shard_tools.work import local_copy

CONTACT_SHEET_FILE = "contact_sheet.png"
COLUMNS, ROWS = 5, 5
CELL = (250, 232)  # width, height of a picture with its caption, pixels
HEAD = 24  # pixels above the pictures, which say how many of all they are
LETTERS = 40  # of Pillow's own font, in a cell's width


def describe(
    samples: Iterable[Sample],
    shards: list[ShardInfo],
    classes: list[str],
    settings: dict[str, Any],
    num_rejected: int,
) -> DatasetInfo:
    """The content of `dataset.json`, in memory that does not grow with the number of samples."""
    counts: Counter[str] = Counter()
    codecs: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    named: Counter[str] = Counter()
    seconds = 0.0
    with Files() as files:
        for sample in samples:
            files.add(sample)
            counts.update(samples=1, frames=sample.num_frames, bytes=sample.size)
            codecs[sample.codec] += 1
            sizes[f"{sample.width}x{sample.height}"] += 1
            if sample.label is not None:
                named[classes[sample.label]] += 1
            seconds += sample.num_frames / sample.fps
        num_sources = files.num_sources()
        file_list_sha256, duplicates = files.hash_and_duplicates()
    report: Report = {
        "hours": round(seconds / 3600, 6),
        "num_sources": num_sources,
        "video_bytes": counts["bytes"],
        "codecs": dict(sorted(codecs.items())),
        "sizes": dict(sizes.most_common(10)),
        "class_histogram": dict(sorted(named.items())),
        "unlabelled": counts["samples"] - named.total(),
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


class Files(TempTable):
    """Names and hashes of all input files, sorted."""

    schema = "CREATE TABLE files (content BLOB, source BLOB)"
    content = "the names of all samples"
    row_bytes = 200

    def add(self, sample: Sample) -> None:
        self._insert("files", [(sample.source_sha256.encode(), as_bytes(sample.source))], 2)

    def num_sources(self) -> int:
        return sum(1 for _ in groupby(self._run("SELECT source FROM files ORDER BY source")))

    def hash_and_duplicates(self) -> tuple[str, list[list[str]]]:
        """A hash that is equal for two people exactly if they made shards from the same files under the same names,
        however encoded; and the names of files that are the same, by file."""
        digest, duplicates = hashlib.sha256(), []
        rows = self._run("SELECT content, source FROM files ORDER BY content, source || x'0a'")
        for content, of_content in groupby((row for row, _ in groupby(rows)), itemgetter(0)):
            sources = [as_text(source) for _, source in of_content]
            for source in sources:
                digest.update(f"{content.decode()}  {source}\n".encode(errors="surrogateescape"))
            if len(sources) > 1:
                duplicates.append(sorted(sources))
        return digest.hexdigest(), sorted(duplicates)


def write_contact_sheet(folder: Path, info: DatasetInfo) -> None:
    """Write the middle frames of random samples, what is known about them and how many they are into one picture."""
    places = ((shard, sample) for shard in info.shards for sample in read_samples(folder, shard))
    chosen = heapq.nsmallest(COLUMNS * ROWS, places, lambda place: shuffle_key(place[1].key))
    rows = -(-len(chosen) // COLUMNS)
    sheet = Image.new("RGB", (CELL[0] * COLUMNS, HEAD + CELL[1] * rows), "white")
    draw = ImageDraw.Draw(sheet)
    how_many = (
        f"all {info.num_samples}"
        if len(chosen) == info.num_samples
        else f"{len(chosen)} of {info.num_samples}, drawn at random"
    )
    draw.text((5, 5), f"{how_many} videos: the frame in the middle of each", fill="black")
    for number, (shard, sample) in enumerate(chosen):
        left, top = number % COLUMNS * CELL[0], HEAD + number // COLUMNS * CELL[1]
        picture = middle_frame(folder / shard.name, sample)
        picture.thumbnail((CELL[0] - 10, CELL[1] - 72))
        sheet.paste(picture, (left + 5, top + 5))
        label = "no label" if sample.label is None else info.classes[sample.label]
        facts = f"{sample.width}x{sample.height} {sample.codec} {sample.fps:.4g} fps, {sample.num_frames} frames"
        lines = (*caption(sample.key), printable(label)[:LETTERS], facts)
        draw.text((left + 5, top + CELL[1] - 64), "\n".join(lines).encode("ascii", "replace").decode(), fill="black")
    with atomic_write(folder / CONTACT_SHEET_FILE) as aside:
        sheet.save(aside, format="PNG")


def caption(name: str) -> tuple[str, str]:
    """A name in two lines: its beginning always, its end where it fits, and else the middle is left out."""
    text = printable(name)
    if len(text) > 2 * LETTERS:
        text = f"{text[: LETTERS + 10]}...{text[-(LETTERS - 13) :]}"
    return text[:LETTERS], text[LETTERS:]


def middle_frame(shard: Path, sample: Sample) -> Image.Image:
    """The frame in the middle of a stored video."""
    place = TarMember(str(shard), sample.offset, sample.size, f"{sample.key}.{sample.container}")
    with local_copy(place, None) as path:
        if sample.container == arrays.CONTAINER:
            return Image.fromarray(arrays.to_rgb(arrays.read_array(path, [sample.num_frames // 2])[0]))
        return _decoded_frame(path, sample, sample.num_frames // 2)


def _decoded_frame(path: Path, sample: Sample, wanted: int) -> Image.Image:
    with open_source(path) as (container, stream):
        for number, frame in enumerate(read_frames(container, stream)):
            if number == wanted:
                return frame.to_image()
    raise ValueError(f"{sample.key} has fewer frames than its description says")
