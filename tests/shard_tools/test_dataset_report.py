"""What dataset.json says of the samples, and what it costs to find out."""

import hashlib
import tracemalloc
from collections.abc import Iterator

import pytest

from common.errors import InputError
from pipeline.shards.format import Sample
from shard_tools.report import Files, describe

HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]


def sample(source: str, content: str, label: int | None = None, codec: str = "h264") -> Sample:
    return Sample(
        key=source, container="mp4", codec=codec, num_frames=30, fps=10.0, frame_stride=1, width=64, height=48,
        label=label, source=source, sha256=content, size=7, source_sha256=content,
    )  # fmt: skip


def many(count: int) -> Iterator[Sample]:
    return (
        sample(f"folder/{number:09d}.mp4", hashlib.sha256(str(number).encode()).hexdigest()) for number in range(count)
    )


SAMPLES = [
    sample("b\n.mp4", HASHES[0], 1),
    sample("b\udc80.mp4", HASHES[1], 0),  # not UTF-8
    sample("a.mp4", HASHES[1], 1, "vp9"),
    sample("\uffee.mp4", HASHES[1]),
    sample("b\udc80.mp4", HASHES[1], 0),  # the second piece of a video
    sample("b", HASHES[0]),
    sample("b\udc80.mp4", HASHES[2], 0),  # a third, cut when the video had been changed
]


def test_the_summary_is_that_of_all_samples_together() -> None:
    report = describe(iter(SAMPLES), [], ["no", "yes"], {}, 0).report
    lines = sorted({f"{sample.source_sha256}  {sample.source}\n" for sample in SAMPLES})
    duplicates = [["a.mp4", "b\udc80.mp4", "\uffee.mp4"], ["b", "b\n.mp4"]]
    assert report == {
        "hours": round(21 / 3600, 6),
        "num_sources": 5,
        "video_bytes": 49,
        "codecs": {"h264": 6, "vp9": 1},
        "sizes": {"64x48": 7},
        "class_histogram": {"no": 3, "yes": 2},
        "unlabelled": 2,
        "file_list_sha256": hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest(),
        "duplicates": duplicates,
    }


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    peaks = []
    for count in (500, 10_000):
        tracemalloc.start()
        assert describe(many(count), [], [], {}, 0).report["num_sources"] == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000  # bytes; the samples alone are 10 MB


def test_a_full_disk_of_temporary_files_is_a_sentence() -> None:
    with pytest.raises(InputError, match=r"cannot be sorted \(database or disk is full\): make room"):
        fill_a_disk_of_two_pages()


def fill_a_disk_of_two_pages() -> None:
    with Files() as files:
        files._database.execute("PRAGMA max_page_count = 2")
        for each in many(1000):
            files.add(each)
