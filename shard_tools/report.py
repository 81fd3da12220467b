"""What a dataset holds, in numbers that depend on its samples alone and in a picture, and what it will cost to make."""

import hashlib
import heapq
import json
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from common.atomic_io import atomic_write
from common.logging import format_bytes, format_duration, format_number, log, printable
from pipeline.shards import arrays
from pipeline.shards.format import DatasetInfo, Report, Sample, ShardInfo, read_samples
from shard_tools.encoding.source import open_source, read_frames
from shard_tools.inputs import Inputs, TarMember
from shard_tools.plan import shuffle_key
from shard_tools.settings import Settings
from shard_tools.temp_table import TempTable
from shard_tools.work import Entry, Job, local_copy, process_job
from shard_tools.write import tar_metadata

MAX_TRIED = 12  # videos, for an estimate
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
    rows = files.run("SELECT DISTINCT sha256, source FROM files ORDER BY sha256, source || x'0a'")
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
    return sorted([source for *_, source in group] for _, group in groupby(rows, itemgetter(0, 1)))


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
        member = TarMember(str(folder / shard.name), sample.offset, sample.size, f"{sample.key}.{sample.container}")
        with local_copy(member) as path:
            picture = _read_frame(path, sample.num_frames // 2)
        picture.thumbnail((CELL[0] - 10, CELL[1] - 72))
        sheet.paste(picture, (left + 5, top + 5))
        label = ", ".join(info.classes[label] for label in sample.labels or ()) or "no label"
        facts = f"{sample.width}x{sample.height} {sample.codec} {sample.fps:.4g} fps, {sample.num_frames} frames"
        lines = (sample.key[:LETTERS], sample.key[LETTERS:], printable(label)[:LETTERS], facts)
        draw.text((left + 5, top + CELL[1] - 64), "\n".join(lines).encode("ascii", "replace").decode(), fill="black")
    with atomic_write(folder / "contact_sheet.png") as aside:
        sheet.save(aside, format="PNG")


def _read_frame(path: Path, number: int) -> Image.Image:
    if arrays.is_array(path):
        return Image.fromarray(arrays.to_rgb(arrays.read_array(path, [number])[0]))
    with open_source(path) as (container, stream):
        return next(islice(read_frames(container, stream), number, None)).to_image()


def estimate_dataset(splits: Sequence[Inputs], settings: Settings, num_workers: int) -> None:
    """Print the expected size and time; processes a dozen videos of all sizes, one after the other."""
    num_rejected = 0
    num_bytes = num_frames = seconds = 0.0
    by_size = heapq.merge(*(inputs.by_size() for inputs in splits), key=lambda item: (item.size, item.source))
    num_usable = sum(inputs.num_usable for inputs in splits)
    num_tried = min(MAX_TRIED, num_usable)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_tried):  # the middle one of as many groups of videos of about one size
            group = list(islice(by_size, num_usable * (number + 1) // num_tried - num_usable * number // num_tried))
            item = group[len(group) // 2]
            start = time.perf_counter()
            entry = Entry(item.source, str(item.segment or ""))
            outcomes = process_job(Job(item.source, item.location, [(Path(folder, str(number)), entry)], settings))
            if isinstance(outcomes, OSError):
                raise outcomes
            (outcome,) = outcomes
            # Videos differ more in length than in what a byte of them costs.
            times = sum(other.size for other in group) / item.size if item.size else len(group)
            seconds += times * (time.perf_counter() - start)
            num_rejected += outcome.reason is not None
            for sample, _ in outcome.samples:
                for size in (sample.size, len(tar_metadata(sample))):  # in blocks, behind a header of one
                    num_bytes += times * tarfile.BLOCKSIZE * (1 + -(-size // tarfile.BLOCKSIZE))
                num_frames += times * sample.num_frames
    num_bytes = -(-num_bytes // tarfile.RECORDSIZE) * tarfile.RECORDSIZE  # a tar ends in zeros
    log(
        f"tried {num_tried} of {sum(map(len, splits))} videos, {num_rejected} unusable: expect about"
        f" {format_bytes(num_bytes)}, {format_number(num_frames)} frames and"
        f" {format_duration(seconds / num_workers)} with {num_workers} workers"
    )
