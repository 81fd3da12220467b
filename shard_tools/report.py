"""What a dataset holds, in figures that depend on nothing but its samples."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from durable import write_aside
from pipeline import arrays
from pipeline.shards import DatasetInfo, Report, Sample, ShardInfo, read_samples
from shard_tools.inputs import Member
from shard_tools.layout import shuffled_by
from shard_tools.source import intact_frames, opened
from shard_tools.work import fetched
from terminal import shown

CONTACT_SHEET_FILE = "contact_sheet.png"
COLUMNS, ROWS = 5, 5
CELL = (250, 232)  # width, height of a picture with its caption, pixels
HEAD = 24  # pixels above the pictures, which say how many of all they are
LETTERS = 40  # of Pillow's own font, in a cell's width


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
    report: Report = {
        "hours": round(sum(sample.num_frames / sample.fps for sample in samples) / 3600, 6),
        "num_sources": len({sample.source for sample in samples}),
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


def write_contact_sheet(folder: Path, info: DatasetInfo) -> None:
    """Write the middle frames of random samples, what is known about them and how many they are into one picture."""
    places = [(shard, sample) for shard in info.shards for sample in read_samples(folder, shard)]
    chosen = shuffled_by(places, lambda place: place[1].key)[: COLUMNS * ROWS]
    rows = -(-len(chosen) // COLUMNS)
    sheet = Image.new("RGB", (CELL[0] * COLUMNS, HEAD + CELL[1] * rows), "white")
    draw = ImageDraw.Draw(sheet)
    how_many = (
        f"all {len(places)}" if len(chosen) == len(places) else f"{len(chosen)} of {len(places)}, drawn at random"
    )
    draw.text((5, 5), f"{how_many} videos: the frame in the middle of each", fill="black")
    for number, (shard, sample) in enumerate(chosen):
        left, top = number % COLUMNS * CELL[0], HEAD + number // COLUMNS * CELL[1]
        picture = middle_frame(folder / shard.name, sample)
        picture.thumbnail((CELL[0] - 10, CELL[1] - 72))
        sheet.paste(picture, (left + 5, top + 5))
        label = "no label" if sample.label is None else info.classes[sample.label]
        facts = f"{sample.width}x{sample.height} {sample.codec} {sample.fps:.4g} fps, {sample.num_frames} frames"
        lines = (*caption(sample.key), shown(label)[:LETTERS], facts)
        draw.text((left + 5, top + CELL[1] - 64), "\n".join(lines).encode("ascii", "replace").decode(), fill="black")
    with write_aside(folder / CONTACT_SHEET_FILE) as aside:
        sheet.save(aside, format="PNG")


def caption(name: str) -> tuple[str, str]:
    """A name in two lines: its beginning always, its end where it fits, and else the middle is left out."""
    text = shown(name)
    if len(text) > 2 * LETTERS:
        text = f"{text[: LETTERS + 10]}...{text[-(LETTERS - 13) :]}"
    return text[:LETTERS], text[LETTERS:]


def middle_frame(shard: Path, sample: Sample) -> Image.Image:
    """The frame in the middle of a stored video."""
    place = Member(str(shard), sample.offset, sample.size, f"{sample.key}.{sample.container}")
    with fetched(place, None) as path:
        if sample.container == arrays.CONTAINER:
            return Image.fromarray(arrays.shown(arrays.read_array(path, [sample.num_frames // 2])[0]))
        return _decoded_frame(path, sample, sample.num_frames // 2)


def _decoded_frame(path: Path, sample: Sample, wanted: int) -> Image.Image:
    with opened(path) as (container, stream):
        for number, frame in enumerate(intact_frames(container, stream)):
            if number == wanted:
                return frame.to_image()
    raise ValueError(f"{sample.key} has fewer frames than its description says")
