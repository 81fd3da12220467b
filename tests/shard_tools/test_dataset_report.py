"""What dataset.json says of the samples, what that costs, and how samples look."""

import hashlib
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from shard_making import NUM_VIDEOS, all_samples, make

from pipeline.shards.format import Sample
from shard_tools.report import describe_samples

HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]


def sample(source: str, content: str, label: int | None = None, codec: str = "h264") -> Sample:
    return Sample(
        key=source, container="mp4", codec=codec, num_frames=30, fps=10.0, frame_stride=1, width=64, height=48,
        labels=None if label is None else (label,), source=source, sha256=content, size=7, source_sha256=content,
    )  # fmt: skip


SAMPLES = [
    sample("b\n.mp4", HASHES[0], 1),
    sample("b\udc80.mp4", HASHES[1], 0),  # not UTF-8
    sample("a.mp4", HASHES[1], 1, "vp9"),
    sample("\uffee.mp4", HASHES[1]),
    sample("b\udc80.mp4", HASHES[1], 0),  # the second piece of a video
    sample("b", HASHES[0]),
    sample("b\udc80.mp4", HASHES[2], 0),  # a third, cut when the video had been changed
]


def test_the_summary_covers_all_samples() -> None:
    assert describe_samples(iter(SAMPLES), [], ["no", "yes"], {}, 0).report == {
        "hours": round(21 / 3600, 6),
        "num_sources": 5,
        "class_histogram": {"no": 3, "yes": 2},
        "duplicates": [["a.mp4", "b\udc80.mp4", "\uffee.mp4"], ["b", "b\n.mp4"]],
        "conflicts": [["a.mp4", "b\udc80.mp4", "\uffee.mp4"], ["b", "b\n.mp4"]],
    }


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    def many(count: int) -> Iterator[Sample]:
        return (
            sample(f"{number:09d}.mp4", hashlib.sha256(str(number).encode()).hexdigest()) for number in range(count)
        )

    peaks = []
    for count in (500, 10_000):
        tracemalloc.start()
        assert describe_samples(many(count), [], [], {}, 0).report["num_sources"] == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000  # bytes; the samples alone are 10 MB


def test_equal_files_with_other_labels_are_said(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run/a.mp4", "walk/b.mp4", "walk/c.mp4"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sorted(videos.rglob("*.mp4"))[name.endswith("c.mp4")], tmp_path / "in" / name)
    make(tmp_path / "in", tmp_path / "out")
    said = capsys.readouterr().err
    for what in ("under several names", "with several labels"):
        assert f"1 file appears {what}; all were kept (the first: run/a.mp4, walk/b.mp4)" in said


def test_a_card_says_how_others_load_the_shards(dataset: Path) -> None:
    text = (dataset / "README.md").read_text()
    assert text.startswith('---\nconfigs:\n- config_name: default\n  data_files: "*.tar"\n---\n')
    for part in (f"{NUM_VIDEOS} video clips", "h264 (9)", "0. down: 3\n1. left: 3\n2. right: 3", "load_dataset"):
        assert part in text


def test_datasets_loads_the_shards(dataset: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="not installed")
    loaded = datasets.load_dataset(str(dataset), split="train", cache_dir=str(tmp_path))
    rows = list(loaded.cast_column("mp4", datasets.Video(decode=False)))
    assert {row["__key__"]: row["json"]["labels"] for row in rows} == {
        sample.key: list(sample.labels or ()) for _, sample in all_samples(dataset)
    }
