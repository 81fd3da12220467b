"""The end-to-end benchmark trains on the videos that it is given, and counts what it says."""

import json
from pathlib import Path

import torch

from adamae.benchmarks import end_to_end
from adamae.benchmarks.end_to_end import Source, make_rows, open_clips
from adamae.model.config import ModelConfig


def test_training_from_shards_is_measured_beside_a_cached_batch(
    tmp_path: Path, synthetic_videos: Path, monkeypatch
) -> None:
    monkeypatch.setattr(end_to_end, "in_fresh_process", lambda function, *given: function(*given))
    few = ["--size=tiny", "--batch-size=2", "--steps=1", "--rounds=1", "--encodes=h264"]
    end_to_end.main(
        [str(synthetic_videos), *few, f"--work={tmp_path / 'work'}", f"--output={tmp_path}"]
    )
    found = json.loads((tmp_path / "end_to_end.json").read_text())
    assert (found["about"]["videos"], found["about"]["batch_size"]) == (16, 2)
    assert found["rows"][0]["data_stall"] < 0.01, "nothing is waited for"
    for row in found["rows"][1:]:
        assert 0 < row["data_stall"] < 1
    with open_clips(
        Source(tmp_path / "work/h264", 2), ModelConfig("tiny"), 2, torch.device("cpu")
    ) as clips:
        assert next(clips).shape == (2, 16, 224, 224, 3)


def test_the_middle_round_counts() -> None:
    def measured(*speeds: int) -> list[dict[str, float]]:
        return [
            {"clips_per_second": v, "data_stall": v / 100, "cores_busy": 1, "peak_memory_gib": 9}
            for v in speeds
        ]

    mjpeg = Path("mjpeg")
    cached, one, two = make_rows(
        {
            Source(None): measured(10, 10),
            Source(mjpeg): measured(5, 9, 1),
            Source(mjpeg, 2): measured(20),
        }
    )
    assert [row["batches"] for row in (cached, one, two)] == [
        "cached batch",
        "mjpeg shards",
        "mjpeg shards, 2 clips per decoded video",
    ]
    assert (one["clips_per_second"], one["lower"], one["upper"], one["peak_memory_gib"]) == (
        5,
        1,
        9,
        9,
    )
    assert [row["relative_to_cached"] for row in (cached, one, two)] == [1, 0.5, 2]
