"""The benchmark measures what it says: its check fails for wrong clips, and other loaders give the same whole clips."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made_videos import LEVELS, encode, write_shards

from adamae.benchmarks import pipeline_throughput
from adamae.benchmarks.peers import loaders
from adamae.benchmarks.peers.loaders import crop_and_scale
from adamae.benchmarks.pipeline_throughput import (
    Case,
    find_faults,
    list_cases,
    make_plan,
    make_rows,
    measure,
    prepare_shards,
    write_files,
)
from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.sources import decode_frames
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.dataset import ShardDataset


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Shards of five videos, and these as files."""
    work = tmp_path_factory.mktemp("work")
    videos = [(f"v{i}", encode(LEVELS, width=320, height=240, pattern=True)) for i in range(5)]
    write_shards(work / "h264", videos)
    write_files(work / "h264")
    return work


def test_rows_are_relative_to_the_fastest_peer_on_the_original_files(shards: Path) -> None:
    measured = measure(shards, 0.3, "cpu", Case("adamae", "pyav", "h264", repeats=2))
    assert measured["clips_per_second"] > 0
    assert measured["cores_busy"] < 3
    assert measure(shards, 0.1, "cpu", Case("decoding", "pyav", "h264"))["videos_left_out"] == []
    speed = measured["clips_per_cpu_second"]
    slow, fast = ({**measured, "clips_per_cpu_second": speed / divisor} for divisor in (4, 2))
    own, decord, spdl = (
        Case("adamae", "pyav", "h264"),
        *(Case(name, name, "original") for name in ("decord", "spdl")),
    )
    rows = make_rows({own: [measured], decord: [slow], spdl: [fast]})
    assert [row["relative_to_reference"] for row in rows] == [2, 0.5, 1]
    assert [row["relative_to_reference"] for row in make_rows({own: [measured]})] == [1]


def test_wrong_clips_are_found(shards: Path) -> None:
    dataset = ShardDataset.open(shards / "h264")
    rows = make_plan(dataset, DataConfig(), 1).batch(0)
    (fault,) = find_faults(
        dataset, rows, lambda row: torch.zeros(16, 224, 224, 3, dtype=torch.uint8)
    ).values()
    assert fault.endswith(" off")


def cut_with_pyav(path: str, row: PlanRow, late: int = 0) -> torch.Tensor:
    """Stands for another library, which need not be installed; `late`: frames off."""
    frames = decode_frames(
        Path(path).read_bytes(), [min(number + late, LEVELS - 1) for number in row.frames]
    )
    return crop_and_scale(torch.from_numpy(frames), row)


def test_videos_that_another_library_reads_wrong_are_left_out(
    shards: Path, monkeypatch, capsys
) -> None:
    def cut(path: str, row: PlanRow) -> torch.Tensor:
        if row.sample == 3:
            raise RuntimeError("cannot seek")
        return cut_with_pyav(path, row, late=int(row.sample == 1))

    case = Case("spdl", "spdl", "h264", batch_size=2)
    for library, left_out in ((cut_with_pyav, []), (cut, ["v1", "v3"])):
        monkeypatch.setitem(loaders.FILE_PEERS, "spdl", library)
        row = measure(shards, 0.1, "cpu", case)
        assert row["clips_per_second"] > 0
        assert sorted(row["videos_left_out"]) == left_out
    said = capsys.readouterr().err
    assert "v1 has the frames beside the right ones\n" in said
    assert "v3 RuntimeError: cannot seek\n" in said
    monkeypatch.setitem(loaders.FILE_PEERS, "spdl", lambda path, row: cut_with_pyav(path, row)[1:])
    with pytest.raises(InputError, match="spdl reads most videos right"):
        measure(shards, 0.1, "cpu", case)


def test_webdataset_streams_the_shards(shards: Path, monkeypatch) -> None:
    def cut(video: bytes, row: PlanRow) -> torch.Tensor:
        frames = decode_frames(video, list(row.frames))
        return crop_and_scale(torch.from_numpy(frames), row)

    for module in (loaders, pipeline_throughput):
        monkeypatch.setattr(module, "cut_with_torchcodec", cut)
    # In this process, for the sake of the replaced function.
    monkeypatch.setattr(loaders, "count_cpus", lambda: 0)
    row = measure(shards, 0.1, "cpu", Case("webdataset", "torchcodec", "h264", batch_size=2))
    assert row["clips_per_second"] > 0
    assert row["videos_left_out"] == []


def test_every_loader_meets_every_encode(monkeypatch) -> None:
    monkeypatch.setattr(pipeline_throughput, "find_spec", lambda name: True)
    cases = list_cases(["h264", "mjpeg", "copy"], ["pyav", "dali"], 64)
    for loader in loaders.PEERS:
        assert {case.encode for case in cases if case.loader == loader} == {
            "original",
            "h264",
            "mjpeg",
        }
    for loader in ("adamae", "decoding"):
        assert {case.encode for case in cases if case.loader == loader} == {"h264", "mjpeg", "copy"}
    own = {
        (case.decoder, case.repeats, case.batch_size) for case in cases if case.loader == "adamae"
    }
    assert own == {(decoder, repeats, 64) for decoder in ("pyav", "dali") for repeats in (1, 2)}


def test_an_encode_may_name_its_tune(tmp_path: Path, monkeypatch) -> None:
    commands: list[list[str]] = []
    done = SimpleNamespace(returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or done)
    for name in ("hevc-size", "h264"):
        with pytest.raises(InputError, match="making shards"):
            prepare_shards(tmp_path, tmp_path, [name])
    assert commands[0][-5:] == ["--encode", "hevc", "--tune", "size", "--unlabeled"]
    assert commands[1][-3:] == ["--encode", "h264", "--unlabeled"]
