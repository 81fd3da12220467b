"""The benchmark measures what it says: its check fails for wrong clips, and other loaders give the same whole clips."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_videos import LEVELS, encode, write_shards

from benchmarks.peers import loaders
from benchmarks.peers.loaders import crop_and_scale
from benchmarks.pipeline_throughput import (
    Case,
    add_relative_speed,
    check_clips,
    file_of,
    list_cases,
    measure,
    parse_arguments,
    prepare_shards,
)
from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.sources import decode_frames
from pipeline.planning.plan import PlanRow, TrainingPlan
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset


def test_a_row_of_the_table(tmp_path: Path) -> None:
    write_shards(tmp_path / "h264", [(f"v{i}", encode(20, first=i)) for i in range(4)])
    row = measure(Case("adamae", "pyav", "h264", repeats=2), tmp_path, seconds=0.3, device="cpu")
    assert row["clips_per_second"] > 0
    assert row["cores_busy"] < 3
    slow, fast = (
        {**row, "loader": loader, "encode": "original", "clips_per_cpu_second": row["clips_per_cpu_second"] / divisor}
        for loader, divisor in (("decord", 4), ("spdl", 2))
    )
    add_relative_speed(rows := [row, slow, fast])
    assert [row["relative_to_reference"] for row in rows] == [2, 0.5, 1], "to the fastest peer on the original files"
    add_relative_speed(rows := [row, row])
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


def cut_with_pyav(source: bytes, row: PlanRow, late: int = 0) -> torch.Tensor:
    """Stands for another library, which need not be installed; `late`: frames off."""
    frames = decode_frames(source, [min(number + late, LEVELS - 1) for number in row.frames])
    return crop_and_scale(torch.from_numpy(frames), row)


def test_another_library_cuts_the_same_clips(shards: Path, monkeypatch) -> None:
    monkeypatch.setitem(loaders.PEERS, "spdl", cut_with_pyav)
    row = measure(Case("spdl", "spdl", "h264", batch_size=2), shards, seconds=0.1, device="cpu")
    assert row["clips_per_second"] > 0
    assert row["videos_left_out"] == []


def test_videos_that_another_library_reads_wrong_are_left_out(shards: Path, monkeypatch, capsys) -> None:
    def cut(source: bytes, row: PlanRow) -> torch.Tensor:
        if row.sample == 3:
            raise RuntimeError("cannot seek")
        return cut_with_pyav(source, row, late=int(row.sample == 1))

    monkeypatch.setitem(loaders.PEERS, "spdl", cut)
    row = measure(Case("spdl", "spdl", "h264", batch_size=2), shards, seconds=0.1, device="cpu")
    assert sorted(row["videos_left_out"]) == ["v1", "v3"]
    said = capsys.readouterr().err
    assert "v1: has the frames beside the right ones\n" in said
    assert "v3: RuntimeError: cannot seek\n" in said
    monkeypatch.setitem(loaders.PEERS, "spdl", lambda source, row: cut_with_pyav(source, row)[1:])
    with pytest.raises(InputError, match="spdl reads most videos right"):
        measure(Case("spdl", "spdl", "h264"), shards, seconds=0.1, device="cpu")


def test_the_bound_is_decoding_alone(shards: Path) -> None:
    row = measure(Case("decoding", "pyav", "h264", threads=3), shards, seconds=0.1, device="cpu")
    assert row["clips_per_second"] > 0
    assert row["videos_left_out"] == []


def test_every_loader_meets_every_encode(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.pipeline_throughput.is_installed", lambda name: True)
    cases = list_cases(parse_arguments([".", "--decoders", "pyav", "dali"]), on_gpu=True)
    for loader in loaders.PEERS:
        assert {case.encode for case in cases if case.loader == loader} == {"original", "h264", "mjpeg"}
    for loader in ("adamae", "decoding"):
        assert {case.encode for case in cases if case.loader == loader} == {"h264", "mjpeg", "copy"}
    own = {(case.decoder, case.repeats, case.batch_size) for case in cases if case.loader == "adamae"}
    assert own == {(decoder, repeats, 64) for decoder in ("pyav", "dali") for repeats in (1, 2)}
    few = list_cases(parse_arguments([".", "--loaders", "adamae", "--encodes", "vp9", "--threads", "3"]), on_gpu=False)
    assert [(case.encode, case.threads, case.batch_size) for case in few] == [("vp9", 3, 8)] * 2


def test_an_encode_may_name_its_tune(tmp_path: Path, monkeypatch) -> None:
    commands: list[list[str]] = []
    done = SimpleNamespace(returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or done)
    for name in ("hevc-size", "h264"):
        with pytest.raises(InputError, match="making shards"):
            prepare_shards(tmp_path, tmp_path, [name])
    assert commands[0][-5:] == ["--encode", "hevc", "--tune", "size", "--unlabeled"]
    assert commands[1][-3:] == ["--encode", "h264", "--unlabeled"]
