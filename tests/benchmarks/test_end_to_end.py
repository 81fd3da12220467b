"""The end-to-end benchmark trains on the given videos and reports what it measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adamae.benchmarks import end_to_end
from adamae.benchmarks.end_to_end import Source, make_rows, open_clips
from adamae.benchmarks.harness import Row
from adamae.model.config import ModelConfig


def test_training_from_shards_is_measured_beside_a_cached_batch(
    tmp_path: Path, synthetic_videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call_here(function: Callable[..., Row], *arguments: Any) -> Row:
        return function(*arguments)

    # A process for each of the three measurements would only take time.
    monkeypatch.setattr(end_to_end, "in_fresh_process", call_here)
    small = ["--size=tiny", "--batch-size=2", "--steps=1", "--rounds=1", "--encodes=h264"]
    folders = [f"--work={tmp_path / 'work'}", f"--output={tmp_path}"]
    end_to_end.main([str(synthetic_videos), *small, *folders])

    report = json.loads((tmp_path / "end_to_end.json").read_text())
    assert report["about"]["videos"] == 16
    assert report["about"]["batch_size"] == 2
    cached, *from_shards = report["rows"]
    assert cached["data_stall"] < 0.01, "nothing is waited for"
    assert len(from_shards) == 2
    for row in from_shards:
        assert 0 < row["data_stall"] < 1

    source = Source(tmp_path / "work/h264", repeats=2)
    with open_clips(source, ModelConfig("tiny"), 2, torch.device("cpu")) as clips:
        assert next(clips).shape == (2, 16, 224, 224, 3)


def make_rounds(*speeds: int) -> list[Row]:
    rounds = []
    for speed in speeds:
        measured: Row = {"clips_per_second": speed, "data_stall": speed / 100}
        rounds.append(measured | {"cores_busy": 1, "peak_memory_gib": 9})
    return rounds


def test_the_median_round_counts() -> None:
    mjpeg = Path("mjpeg")
    cached, one, two = make_rows(
        {
            Source(None): make_rounds(10, 10),
            Source(mjpeg): make_rounds(5, 9, 1),
            Source(mjpeg, repeats=2): make_rounds(20),
        }
    )
    assert cached["batches"] == "cached batch"
    assert one["batches"] == "mjpeg shards"
    assert two["batches"] == "mjpeg shards, 2 clips per decoded video"
    assert one["clips_per_second"] == 5
    assert one["lower"] == 1
    assert one["upper"] == 9
    assert one["peak_memory_gib"] == 9
    assert [row["relative_to_cached"] for row in (cached, one, two)] == [1, 0.5, 2]
