"""The benchmark of data loading: its check fails for wrong clips, and peers give the same clips."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_videos import LEVELS, encode, write_shards

from adamae.benchmarks import pipeline_throughput
from adamae.benchmarks.peers import loaders
from adamae.benchmarks.peers.loaders import CutClip, crop_and_scale
from adamae.benchmarks.pipeline_throughput import (
    Case,
    copy_planes,
    find_faults,
    list_cases,
    make_plan,
    make_rows,
    measure,
    prepare_shards,
    write_files,
)
from adamae.common.cpus import count_cpus
from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.dataset import ShardDataset


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make shards of five equal videos in a folder h264, and write their videos as files."""
    work = tmp_path_factory.mktemp("work")
    video = encode(LEVELS, width=320, height=240, pattern=True)
    write_shards(work / "h264", [(f"v{index}", video) for index in range(5)])
    write_files(work / "h264")
    return work


def test_rows_are_relative_to_the_fastest_peer_on_the_original_files(shards: Path) -> None:
    measured = measure(shards, 0.3, "cpu", Case("adamae", "pyav", "h264", repeats=2))
    assert measured["clips_per_second"] > 0
    assert 0 < measured["cores_busy"] < count_cpus() + 1
    for part in ("decoding", "planes"):
        measured_part = measure(shards, 0.1, "cpu", Case(part, "pyav", "h264"))
        assert measured_part["videos_left_out"] == []

    speed = measured["clips_per_cpu_second"]
    own = Case("adamae", "pyav", "h264")
    results = {
        own: [measured],
        Case("decord", "decord", "original"): [measured | {"clips_per_cpu_second": speed / 4}],
        Case("spdl", "spdl", "original"): [measured | {"clips_per_cpu_second": speed / 2}],
    }
    assert [row["relative_to_reference"] for row in make_rows(results)] == [2, 0.5, 1]
    # Without peers, the first row is the reference.
    assert [row["relative_to_reference"] for row in make_rows({own: [measured]})] == [1]

    rounds = [measured | {"clips_per_cpu_second": value} for value in (7.0, 3.0, 4.0)]
    (row,) = make_rows({own: rounds})
    assert (row["clips_per_cpu_second"], row["lower"], row["upper"], row["rounds"]) == (4, 3, 7, 3)


def test_planes_of_another_library_are_checked(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ShardDataset.open(shards / "h264")
    case = Case("planes", "torchcodec", "h264")

    def copy_right(path: str, row: PlanRow) -> torch.Tensor:
        assert Path(path).is_file()
        return copy_planes(dataset, row)

    monkeypatch.setattr(pipeline_throughput, "copy_planes_with_torchcodec", copy_right)
    assert measure(shards, 0.1, "cpu", case)["clips_per_second"] > 0
    # One gray level off, or a frame too few.
    for fault in (lambda planes: planes + 1, lambda planes: planes[:-1]):

        def copy_wrong(path: str, row: PlanRow, fault: Any = fault) -> torch.Tensor:
            return fault(copy_planes(dataset, row))

        monkeypatch.setattr(pipeline_throughput, "copy_planes_with_torchcodec", copy_wrong)
        with pytest.raises(InputError, match="planes are those of PyAV"):
            measure(shards, 0.1, "cpu", case)


def test_wrong_clips_are_found(shards: Path) -> None:
    dataset = ShardDataset.open(shards / "h264")
    rows = make_plan(dataset, DataConfig(), 1).batch(0)

    def cut_black_clip(row: PlanRow) -> torch.Tensor:
        return torch.zeros(16, 224, 224, 3, dtype=torch.uint8)

    (fault,) = find_faults(dataset, rows, cut_black_clip).values()
    assert fault.endswith(" off")


# The following functions stand for other libraries, which need not be installed.


def cut_bytes(video: bytes, row: PlanRow, num_frames_late: int = 0) -> torch.Tensor:
    """Cut a clip right, or so many frames too late, without going beyond the last one."""
    numbers = [min(number + num_frames_late, LEVELS - 1) for number in row.frames]
    return crop_and_scale(torch.from_numpy(decode_frames(video, numbers)), row)


def cut_file(path: str, row: PlanRow) -> torch.Tensor:
    return cut_bytes(Path(path).read_bytes(), row)


def cut_two_videos_wrong(path: str, row: PlanRow) -> torch.Tensor:
    if row.sample == 1:
        return cut_bytes(Path(path).read_bytes(), row, num_frames_late=1)
    if row.sample == 3:
        raise RuntimeError("cannot seek")
    return cut_file(path, row)


def cut_without_first_frame(path: str, row: PlanRow) -> torch.Tensor:
    return cut_file(path, row)[1:]


@pytest.mark.parametrize(
    ("cut", "left_out", "messages"),
    [
        (cut_file, [], []),
        (
            cut_two_videos_wrong,
            ["v1", "v3"],
            ["v1 has the frames beside the right ones\n", "v3 RuntimeError: cannot seek\n"],
        ),
    ],
)
def test_videos_that_another_library_reads_wrong_are_left_out(
    cut: CutClip,
    left_out: list[str],
    messages: list[str],
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(loaders.FILE_PEERS, "spdl", cut)
    row = measure(shards, 0.1, "cpu", Case("spdl", "spdl", "h264", batch_size=2))
    assert row["clips_per_second"] > 0
    assert sorted(row["videos_left_out"]) == left_out
    printed = capsys.readouterr().err
    for message in messages:
        assert message in printed


def test_a_library_that_reads_most_videos_wrong_is_not_measured(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loaders.FILE_PEERS, "spdl", cut_without_first_frame)
    with pytest.raises(InputError, match="spdl reads most videos right"):
        measure(shards, 0.1, "cpu", Case("spdl", "spdl", "h264", batch_size=2))


def test_webdataset_streams_the_shards(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loaders, pipeline_throughput):
        monkeypatch.setattr(module, "cut_with_torchcodec", cut_bytes)
    # No worker processes, in which the function would not be replaced.
    monkeypatch.setattr(loaders, "count_cpus", lambda: 0)
    row = measure(shards, 0.1, "cpu", Case("webdataset", "torchcodec", "h264", batch_size=2))
    assert row["clips_per_second"] > 0
    assert row["videos_left_out"] == []


def test_every_loader_meets_every_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if all peers were installed.
    monkeypatch.setattr(pipeline_throughput, "find_spec", lambda name: True)
    cases = list_cases(["h264", "mjpeg", "copy"], ["pyav", "dali"], 64)

    def list_encodes(loader: str) -> set[str]:
        return {case.encode for case in cases if case.loader == loader}

    for peer in loaders.PEERS:
        assert list_encodes(peer) == {"original", "h264", "mjpeg"}
    for loader in ("adamae", "decoding"):
        assert list_encodes(loader) == {"h264", "mjpeg", "copy"}
    assert list_encodes("planes") == {"h264", "mjpeg"}
    assert {case.decoder for case in cases if case.loader == "planes"} == {"pyav", "torchcodec"}
    own = {case for case in cases if case.loader == "adamae" and case.encode == "h264"}
    assert own == {
        Case("adamae", "pyav", "h264", repeats=1, batch_size=64),
        Case("adamae", "pyav", "h264", repeats=2, batch_size=64),
        Case("adamae", "dali", "h264", repeats=1, batch_size=64),
        Case("adamae", "dali", "h264", repeats=2, batch_size=64),
    }


def test_an_encode_may_name_its_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def fail(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", fail)
    for name in ("hevc-size", "h264"):
        with pytest.raises(InputError, match="making shards"):
            prepare_shards(tmp_path, tmp_path, [name])
    assert commands[0][-5:] == ["--encode", "hevc", "--tune", "size", "--unlabeled"]
    assert commands[1][-3:] == ["--encode", "h264", "--unlabeled"]
