"""The benchmark measures what it says: its check fails for wrong clips, and its baselines give whole clips."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from made_videos import LEVELS, encode, read_number, write_shards

from benchmarks.peers.loaders import choose_frames, transform, with_pyav
from benchmarks.pipeline_throughput import (
    Case,
    add_relative_speed,
    can_import,
    check_clips,
    list_cases,
    measure,
    parse_arguments,
)
from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.planning.plan import TrainingPlan
from pipeline.shards.dataset import ShardDataset


def test_a_row_of_the_table(tmp_path: Path) -> None:
    write_shards(tmp_path / "h264", [(f"v{i}", encode(20, first=i)) for i in range(4)])
    row = measure(Case("ours", "pyav", "h264", repeats=2), tmp_path, seconds=0.3, device="cpu")
    assert row["clips_per_second"] > 0
    assert row["cores_busy"] < 3
    assert 0.3 < row["frames_decoded_per_delivered"] < 1, "two clips share a decode"
    assert 50 < row["memory_mib"] < 20_000
    decord = {**row, "loader": "decord", "encode": "original", "clips_per_cpu_second": row["clips_per_cpu_second"] / 2}
    add_relative_speed(rows := [row, decord])
    assert [row["relative_to_reference"] for row in rows] == [2, 1]


def test_wrong_clips_stop_the_benchmark(tmp_path: Path) -> None:
    video = encode(80, width=320, height=240, pattern=True)
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)]))
    plan = TrainingPlan(dataset, DataConfig(), num_frames=16, image_size=224, seed=0, batch_size=1)
    with pytest.raises(InputError, match="clips are what the plan says"):
        check_clips(dataset, plan, np.zeros((1, 16, 224, 224, 3), np.uint8))


def test_baselines_give_whole_clips() -> None:
    frames = with_pyav(encode(70), 4)
    numbers = [read_number(frame) for frame in frames]
    assert {(b - a) % LEVELS for a, b in pairwise(numbers)} == {4}
    assert transform(frames).shape == (16, 3, 224, 224)
    assert choose_frames(10, 4) == [0, 4, 8, *[9] * 13]


def our_cases(device: str, *arguments: str) -> set[tuple[str, str, int]]:
    cases = list_cases(parse_arguments([".", *arguments]), torch.device(device))
    return {(case.decoder, case.encode, case.repeats) for case in cases if case.loader == "ours"}


def test_every_loader_meets_every_encode(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.pipeline_throughput.can_import", lambda name: True)
    by_pyav = {("pyav", encode, 1) for encode in ("h264", "mjpeg", "copy")}
    both = by_pyav | {("auto", "h264", 2), ("auto", "mjpeg", 2)}
    assert our_cases("cpu") == both | {("dali", "mjpeg", 1)}
    assert our_cases("cuda") == both | {("dali", "h264", 1), ("auto", "copy", 1)}
    cases = list_cases(parse_arguments(["."]), torch.device("cpu"))
    assert {case.encode for case in cases if case.loader == "pyav"} == {"original", "h264", "mjpeg"}
    settings = ["--loaders", "ours", "--encodes", "h264", "--threads", "1", "2", "--prefetch", "1", "3"]
    cases = list_cases(parse_arguments([".", *settings]), torch.device("cpu"))
    assert {(case.threads, case.prefetch) for case in cases} == {(1, 1), (1, 3), (2, 1), (2, 3)}
    assert {case.loader for case in cases} == {"ours"}


def test_a_peer_that_cannot_be_imported_is_skipped_with_a_sentence(tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "broken_peer.py").write_text("raise OSError('libavutil.so.60 is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not can_import("broken_peer")
    said = "skipping broken_peer: it is installed, but cannot be imported (OSError: libavutil.so.60 is missing)\n"
    assert capfd.readouterr().err == said
    assert not can_import("no_such_peer")
    assert can_import("json")
