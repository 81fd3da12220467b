"""The benchmark measures what it says: its check fails for wrong clips, and other loaders give the same whole clips."""

import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_videos import KINDS, LEVELS, encode, read_number, write_shards

from benchmarks.peers import loaders
from benchmarks.peers.loaders import choose_frames, crop_and_scale, decode_from_start, transform
from benchmarks.pipeline_throughput import (
    Case,
    add_relative_speed,
    can_import,
    check_clips,
    file_of,
    list_cases,
    measure,
    parse_arguments,
    prepare_shards,
    time_decoding,
)
from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.sources import decode_frames
from pipeline.planning.plan import PlanRow, TrainingPlan
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice


def test_a_row_of_the_table(tmp_path: Path) -> None:
    write_shards(tmp_path / "h264", [(f"v{i}", encode(20, first=i)) for i in range(4)])
    row = measure(Case("ours", "pyav", "h264", repeats=2), tmp_path, seconds=0.3, device="cpu")
    assert row["clips_per_second"] > 0
    assert row["cores_busy"] < 3
    assert 0.3 < row["frames_decoded_per_delivered"] < 1, "two clips share a decode"
    assert 50 < row["memory_mib"] < 20_000
    slow, fast, common = (
        {**row, "loader": loader, "encode": "original", "clips_per_cpu_second": row["clips_per_cpu_second"] / divisor}
        for loader, divisor in (("decord", 4), ("spdl", 2), ("pyav", 1))
    )
    add_relative_speed(rows := [row, slow, fast, common])
    assert [row["relative_to_reference"] for row in rows] == [2, 0.5, 1, 2], "to the fastest that is strong"
    add_relative_speed(rows := [row, common])
    assert [row["relative_to_reference"] for row in rows] == [1, 1]


def test_wrong_clips_stop_the_benchmark(tmp_path: Path) -> None:
    video = encode(80, width=320, height=240, pattern=True)
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)]))
    plan = TrainingPlan(dataset, DataConfig(), num_frames=16, image_size=224, seed=0, batch_size=1)
    with pytest.raises(InputError, match="clips are what the plan says"):
        check_clips(dataset, plan, np.zeros((1, 16, 224, 224, 3), np.uint8))


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Shards of five videos, and these as files."""
    work = tmp_path_factory.mktemp("work")
    videos = [(f"v{i}", encode(LEVELS, width=320, height=240, pattern=True)) for i in range(5)]
    dataset = ShardDataset.open(write_shards(work / "h264", videos))
    (work / "h264" / "files").mkdir()
    for index in range(len(videos)):
        file_of(work / "h264", dataset, index).write_bytes(Reader(dataset).read(index))
    return work


def cut_with_ours(source: bytes, row: PlanRow, late: int = 0) -> torch.Tensor:
    """Stands for another library, which need not be installed; `late`: frames off."""
    frames = decode_frames(source, [min(number + late, LEVELS - 1) for number in row.frames])
    return crop_and_scale(torch.from_numpy(frames), row)


def test_another_library_cuts_the_same_clips(shards: Path, monkeypatch) -> None:
    monkeypatch.setitem(loaders.STRONG, "spdl", cut_with_ours)
    row = measure(Case("spdl", "spdl", "h264", batch_size=2), shards, seconds=0.1, device="cpu")
    assert row["clips_per_second"] > 0
    assert row["videos_left_out"] == []


def test_videos_that_another_library_reads_wrong_are_left_out(shards: Path, monkeypatch, capsys) -> None:
    def cut(source: bytes, row: PlanRow) -> torch.Tensor:
        if row.sample == 3:
            raise RuntimeError("cannot seek")
        return cut_with_ours(source, row, late=int(row.sample == 1))

    monkeypatch.setitem(loaders.STRONG, "spdl", cut)
    row = measure(Case("spdl", "spdl", "h264", batch_size=2), shards, seconds=0.1, device="cpu")
    assert sorted(row["videos_left_out"]) == ["v1", "v3"]
    said = capsys.readouterr().err
    assert "v1: has the frames beside the right ones\n" in said
    assert "v3: RuntimeError: cannot seek\n" in said
    monkeypatch.setitem(loaders.STRONG, "spdl", lambda source, row: cut_with_ours(source, row)[1:])
    with pytest.raises(InputError, match="spdl reads most videos right"):
        measure(Case("spdl", "spdl", "h264"), shards, seconds=0.1, device="cpu")


@pytest.mark.parametrize("loader", ["decoding", "planes"])
def test_the_bound_is_decoding_alone(shards: Path, loader: str) -> None:
    row = measure(Case(loader, "pyav", "h264", threads=3), shards, seconds=0.1, device="cpu")
    assert row["clips_per_second"] == pytest.approx(3 * row["clips_per_cpu_second"])
    assert row["videos_left_out"] == []


@pytest.mark.parametrize("kind", ["h264 with B-frames", "h264 with open GOPs", "hevc with open GOPs", "vp9"])
def test_decoding_alone_gives_every_frame(kind: str) -> None:
    video = encode(40, **KINDS[kind])
    for numbers in ((0, 4, 8), (10, 13), (29, 30), (39,)):
        seconds = time_decoding(VideoSlice(video, numbers, 40))
        assert seconds is not None
        assert seconds > 0
    assert time_decoding(VideoSlice(video, (41,), 42)) is None, "more frames than timestamps"


def test_the_common_way_gives_whole_clips() -> None:
    frames = decode_from_start(encode(70), 4)
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
    both = by_pyav | {("pyav", "h264", 2), ("pyav", "mjpeg", 2)}
    assert our_cases("cpu") == both | {("dali", "mjpeg", 1)}
    assert our_cases("cuda") == both | {("dali", "h264", 1)}
    assert ("dali", "hevc-size", 1) in our_cases("cuda", "--encodes", "hevc-size")
    cases = list_cases(parse_arguments(["."]), torch.device("cpu"))
    for loader in (*loaders.STRONG, "pyav"):
        assert {case.encode for case in cases if case.loader == loader} == {"original", "h264", "mjpeg"}
    for loader in ("webdataset", "planes", "decoding"):
        assert {case.encode for case in cases if case.loader == loader} == {"h264", "mjpeg", "copy"}
    settings = ["--loaders", "ours", "--encodes", "h264", "--threads", "1", "2", "--prefetch", "1", "3"]
    cases = list_cases(parse_arguments([".", *settings]), torch.device("cpu"))
    assert {(case.threads, case.prefetch) for case in cases} == {(1, 1), (1, 3), (2, 1), (2, 3)}
    assert {case.loader for case in cases} == {"ours"}


def test_an_encode_may_name_its_tune(tmp_path: Path, monkeypatch) -> None:
    commands: list[list[str]] = []
    done = SimpleNamespace(returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or done)
    for name in ("hevc-size", "h264"):
        with pytest.raises(InputError, match="making shards"):
            prepare_shards(tmp_path, tmp_path, [name])
    assert commands[0][-5:] == ["--encode", "hevc", "--tune", "size", "--unlabeled"]
    assert commands[1][-3:] == ["--encode", "h264", "--unlabeled"]


def test_a_peer_that_cannot_be_imported_is_skipped_with_a_sentence(tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "broken.py").write_text("raise OSError('libavutil.so.60 is missing')")
    for package in ("broken", "json"):
        (tmp_path / f"{package}-1.0.dist-info").mkdir()
        (tmp_path / f"{package}-1.0.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
        monkeypatch.setitem(loaders.IMPORTS, package, f"import {package}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not can_import("broken")
    said = "skipping broken: it is installed, but cannot be imported (OSError: libavutil.so.60 is missing)\n"
    assert capfd.readouterr().err == said
    assert not can_import("no_such_peer")
    assert can_import("json")
