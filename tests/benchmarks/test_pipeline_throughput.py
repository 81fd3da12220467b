"""The benchmark measures what it says: its check is red for wrong clips, and its baselines give whole clips."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from made_videos import LEVELS, encode, read_number, write_shards

from benchmarks.harness import write_results
from benchmarks.peers.loaders import chosen, transformed, with_pyav
from benchmarks.pipeline_throughput import Case, can_take_part, check, make_cases, measure
from benchmarks.reports.pipeline_plot import draw
from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.planning.plan import TrainingPlan
from pipeline.shards.dataset import ShardDataset


def test_a_line_of_the_table(tmp_path: Path) -> None:
    write_shards(tmp_path / "h264", [(f"v{i}", encode(20, first=i)) for i in range(4)])
    row = measure(Case("ours", "pyav", "h264", repeats=2), tmp_path, seconds=0.3, threads=1, device="cpu")
    assert row["clips_per_second"] > 0
    assert row["cores_busy"] < 3
    assert 0.3 < row["frames_decoded_per_delivered"] < 1, "two clips share a decode"
    assert 50 < row["memory_mib"] < 20_000
    rows = [{**row, "times_reference": 1.0}, {**row, "loader": "decord", "times_reference": 2.0}]
    write_results(tmp_path, "pipeline_throughput", rows, {}, [])
    draw(rows, tmp_path / "pipeline_throughput.png")
    assert (tmp_path / "pipeline_throughput.png").stat().st_size > 5000


def test_wrong_clips_stop_the_benchmark(tmp_path: Path) -> None:
    video = encode(80, width=320, height=240, pattern=True)
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)]))
    plan = TrainingPlan(dataset, DataConfig(), num_frames=16, image_size=224, seed=0, batch_size=1)
    with pytest.raises(InputError, match="clips show what the plan says"):
        check(dataset, plan, np.zeros((1, 16, 224, 224, 3), np.uint8))


def test_baselines_give_whole_clips(tmp_path: Path) -> None:
    data = encode(70)
    frames = with_pyav(data, 4)
    numbers = [read_number(frame) for frame in frames]
    assert {(b - a) % LEVELS for a, b in pairwise(numbers)} == {4}
    assert transformed(frames).shape == (16, 3, 224, 224)
    assert chosen(10, 4) == [0, 4, 8, *[9] * 13]


def test_every_loader_meets_every_encode() -> None:
    cases = make_cases(["h264", "mjpeg", "copy"], torch.device("cpu"))
    ours = {(case.decoder, case.encode, case.repeats) for case in cases if case.loader == "ours"}
    assert ours == {
        ("pyav", "h264", 1), ("auto", "h264", 2), ("pyav", "mjpeg", 1), ("dali", "mjpeg", 1), ("auto", "mjpeg", 2),
        ("pyav", "copy", 1),
    }  # fmt: skip
    assert {case.encode for case in cases if case.loader == "pyav"} == {"original", "h264", "mjpeg"}


def test_a_peer_that_cannot_be_imported_is_left_out_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_peer.py").write_text("raise OSError('libavutil.so.60 is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not can_take_part("broken_peer")
    said = "broken_peer is left out: it is installed, but cannot be imported (OSError: libavutil.so.60 is missing)\n"
    assert capfd.readouterr().err == said
    assert not can_take_part("no_such_peer")
    assert can_take_part("json")


def test_on_a_gpu_dali_takes_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cases() -> set[tuple[str, str, int]]:
        found = make_cases(["h264", "mjpeg", "copy"], torch.device("cuda"))
        return {(case.decoder, case.encode, case.repeats) for case in found if case.loader == "ours"}

    pyav = {("pyav", encode, 1) for encode in ("h264", "mjpeg", "copy")} | {("auto", "h264", 2), ("auto", "mjpeg", 2)}
    assert cases() == pyav | {("dali", "h264", 1), ("auto", "copy", 1)}
    monkeypatch.setattr("benchmarks.pipeline_throughput.dali_is_installed", lambda: False)
    assert cases() == pyav
    assert "DALI is left out" in capsys.readouterr().err
