"""The end-to-end benchmark trains on the videos that it is given, and counts what it says."""

import json
import operator
from pathlib import Path

import pytest
import torch

from benchmarks import end_to_end
from benchmarks.end_to_end import Source, open_clips, summarize
from model.config import ModelConfig


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, synthetic_videos: Path) -> Path:
    """Two rounds at the smallest size, all in this process."""
    folder = tmp_path_factory.mktemp("end_to_end")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_to_end, "in_fresh_process", operator.call)
        patch.setattr(end_to_end, "WARM_UP_STEPS", 1)
        work, few = ["--work", str(folder / "work")], ["--batch-size", "2", "--steps", "1", "--rounds", "2"]
        output = ["--encodes", "h264", "--output", str(folder / "results")]
        end_to_end.main([str(synthetic_videos), "--size", "tiny", *few, *work, *output])
    return folder


def test_every_source_has_its_row(results: Path) -> None:
    found = json.loads((results / "results" / "end_to_end.json").read_text())
    rows = found["rows"]
    assert [row["batches"] for row in rows] == ["cached batch", "h264 shards", "h264 shards, 2 clips per decoded video"]
    assert rows[0]["relative_to_cached"] == 1
    assert rows[0]["data_stall"] == 0, "nothing is waited for"
    for row in rows[1:]:
        assert 0 < row["data_stall"] < 1
        assert row["relative_to_cached"] == pytest.approx(
            row["clips_per_second"] / rows[0]["clips_per_second"], abs=1e-3
        )
    assert all(row["lower"] <= row["clips_per_second"] <= row["upper"] for row in rows)
    assert (found["about"]["videos"], found["about"]["batch_size"]) == (16, 2)


def test_the_clips_are_the_shards_own(results: Path) -> None:
    source = Source(results / "work" / "h264", repeats=2)
    with open_clips(source, ModelConfig("tiny"), 2, torch.device("cpu")) as (clips, loader):
        assert next(clips).shape == (2, 16, 224, 224, 3)
        assert loader is not None
        assert loader.counters["videos_read"] > 0


def test_the_middle_round_counts() -> None:
    rounds = [{"clips_per_second": v, "data_stall": v / 100, "cores_busy": 1, "peak_memory_gib": v} for v in (5, 9, 1)]
    row = summarize(Source(Path("mjpeg")), rounds)
    assert (row["clips_per_second"], row["lower"], row["upper"], row["peak_memory_gib"]) == (5, 1, 9, 9)
