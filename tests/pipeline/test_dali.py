"""Which decoder takes a video, and that failures of DALI end no run. On the CPU, where DALI decodes VP9 and MJPEG."""

import ctypes
import re
import sys
import threading
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import CPU, check_first, check_frames, first_batches, open_loader, plan_of
from made_videos import encode, store, write_shards

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding import dali
from pipeline.decoding.dali import DaliGraph, adjust_share, choose_policy, try_decoding
from pipeline.decoding.joining import is_in_share
from pipeline.loader import ClipLoader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice

CUDA = torch.device("cuda", 0)


def config_of(**settings: Any) -> DataConfig:
    return DataConfig(**{"frame_stride": 1, "decoder": "dali", **settings})


@pytest.mark.parametrize("codec", ["vp9", "mjpeg"])
def test_both_decoders_see_the_same(tmp_path: Path, codec: str) -> None:
    """Within 2 gray levels on average, without a bias, at every crop: also odd ones, where chroma lies between."""
    video = store(codec, 8, width=192, height=144, pattern=True)
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)]))
    pyav, dali = (
        torch.cat([batch.clip for batch in first_batches(dataset, config, 4)]).float()
        for config in (config_of(decoder=name, crop="random_resized") for name in ("pyav", "dali"))
    )
    assert (pyav - dali).abs().mean(dim=(1, 2, 3, 4)).max() < 2
    assert (pyav - dali).mean().abs() < 0.5, "FFmpeg's default rounding is 1.3 to 2.4 too dark"


def test_dali_decodes_its_share_of_the_clips(vp9: ShardDataset) -> None:
    """Evenly spread, and the same clips wherever the loader starts."""
    alone = {name: first_batches(vp9, config_of(decoder=name), 6) for name in ("pyav", "dali")}
    shared = first_batches(vp9, config_of(dali_share=0.4), 6)
    assert torch.equal(first_batches(vp9, config_of(dali_share=0.4, prefetch=1), 2, first=4)[1].clip, shared[5].clip)
    decoders = []
    for batch, by_pyav, by_dali in zip(shared, alone["pyav"], alone["dali"], strict=True):
        assert batch.keys == by_pyav.keys
        for clip, *known in zip(batch.clip, by_pyav.clip, by_dali.clip, strict=True):
            assert not torch.equal(*known)
            (made_by,) = [name for name, made in zip(("pyav", "dali"), known, strict=True) if torch.equal(clip, made)]
            decoders.append(made_by)
    assert decoders.count("dali") == int(0.4 * 24)
    assert decoders[:5].count("dali") == 2, "evenly spread"


def test_a_share_follows_who_is_waited_for() -> None:
    share, chunks = 0.0, []
    for waits in [(0.1, 0.0)] * 20 + [(0.0, 0.0)] * 20 + [(0.1, 0.2)] * 8 + [(0.0, 0.0)] * 20:
        share = adjust_share(share, *waits)
        chunks.append(sum(is_in_share(share, number) for number in range(16)))
    assert chunks == [*range(1, 17), *[16] * 24, *range(15, 7, -1), *[8] * 20]


def test_dali_helps_where_workers_are_behind(vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "MIN_WAIT_S", 0)  # without a step, workers are always behind
    with open_loader(vp9, config_of(decoder="auto", dali_share="auto", max_bad_fraction=0)) as (plan, loader):
        check_frames(list(takewhile(lambda _: loader.counters["dali_clips"] <= 8, loader.batches(0))), plan, vp9)
        assert loader.counters["dali_clips"] < loader.counters["clips"]


def test_what_dali_does_not_take_is_decoded_by_pyav(tmp_path: Path) -> None:
    codecs = ("vp9", "mjpeg", "h264")
    videos = [(f"v{i:02d}", store(codecs[i % 3], 20, first=i)) for i in range(9)]
    mixed = ShardDataset.open(write_shards(tmp_path / "mixed", videos))
    counters = check_first(mixed, config_of(decoder="auto", dali_share=1.0), 9)
    assert counters["fallback_clips"] == 0
    assert 0 < counters["dali_clips"] < counters["clips"]


def decides(dataset: ShardDataset, device: torch.device, config: DataConfig, sample: int = 0) -> bool:
    video = VideoSlice(b"", (0,), 1, in_groups=True)
    return choose_policy(dataset, device, config).suits_dali(dataset.samples[sample], 0, video)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_dali_decodes_where_it_is_asked_to(tmp_path: Path, device: torch.device, monkeypatch) -> None:
    """On a GPU, PyAV decodes videos whose sides are no multiples of 16."""
    monkeypatch.setattr(dali, "try_decoding", lambda *_: "")
    sides = {(352, 256): True, (342, 256): device == CPU, (640, 360): device == CPU}
    videos = [(f"v{i}", encode(2, width=width, height=height)) for i, (width, height) in enumerate(sides)]
    dataset = ShardDataset.open(write_shards(tmp_path / "data", videos))
    assert [decides(dataset, device, DataConfig(dali_share=1.0), i) for i in range(3)] == [*sides.values()]
    asked = ({}, {"dali_share": 1.0}, {"decoder": "dali"}, {"decoder": "pyav", "dali_share": 1.0})
    assert [decides(dataset, device, DataConfig(**settings)) for settings in asked] == [False, True, True, False]
    with pytest.raises(InputError, match=r"data\.dali_share is 2"):
        DataConfig(dali_share=2)


def test_a_codec_that_the_gpu_lacks_is_decoded_by_pyav(
    short: ShardDataset, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Several videos are tried: one may be corrupt."""
    tried: list[object] = []
    monkeypatch.setattr(dali, "try_decoding", lambda *given: tried.append(given) or "no such engine")
    assert not decides(short, CUDA, DataConfig(num_workers=3, dali_share=1.0))
    assert len(tried) == dali.PROBES
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: DALI cannot decode h264 on cuda (no such engine), which ")
    assert line.endswith("PyAV decodes it, in 3 processes")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not decides(short, CUDA, DataConfig(dali_share=1.0))
    assert capfd.readouterr().err == "", "once per node"
    with pytest.raises(InputError, match=r"no such engine.*set data\.decoder to auto"):
        decides(short, CUDA, DataConfig(decoder="dali"))


def test_copied_videos_are_decoded_by_pyav(tmp_path: Path) -> None:
    video = encode(20, codec="libvpx-vp9", container="webm")
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)], container="webm"))
    assert check_first(dataset, config_of(), 1)["dali_clips"] == 0


def test_why_dali_cannot_decode_is_said(short: ShardDataset, jpeg: ShardDataset, monkeypatch) -> None:
    def miss(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", miss)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # imports of it fail, as where it lacks a package
    for dataset, device, says in (
        (short, CPU, r"h264 on cpu \(import of nvidia\.dali halted"),
        (jpeg, CUDA, r"mjpeg on cuda \(no NVDEC decodes mjpeg\)"),
        (short, CUDA, r"h264 on cuda \(libnvcuvid\.so\.1: cannot open .*; containers have it with NVIDIA_DRIVER_CAPA"),
    ):
        try_decoding.cache_clear()
        with pytest.raises(InputError, match=rf"DALI cannot decode {says}"):
            decides(dataset, device, config_of())
    monkeypatch.undo()
    try_decoding.cache_clear()
    with pytest.raises(InputError, match=r"h264 on cpu \(Assert on .*Failed to create video decoder"):
        ClipLoader(short, plan_of(short, config_of()), CPU, config_of(), None)


def test_an_error_of_dali_is_found_and_survived(tmp_path: Path) -> None:
    """A video that was broken before it was stored: its checksums do not help, the decoder has to say it. It costs the
    clips of this video, and not those that it is joined with."""
    videos = [(f"v{i:02d}", store("vp9", 20, first=i)) for i in range(6)]
    broken = re.sub(b"mdat.{40}", b"mdat" + bytes(40), videos[3][1], flags=re.DOTALL)
    dataset = ShardDataset.open(write_shards(tmp_path / "broken", videos, broken={"v03": broken}))
    config, report = config_of(max_bad_fraction=0.9, prefetch=3), tmp_path / "quarantine.jsonl"
    with open_loader(dataset, config, report, batch_size=8) as (plan, loader):
        assert check_frames(list(islice(loader.batches(0), 6)), plan, dataset, bad=["v03"]) > 0
        assert loader.counters["fallback_clips"] > 0
    assert report.read_text().count("\n") == report.read_text().count('"key": "v03"') == 1


def test_where_dali_hangs_pyav_takes_over(
    vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is given up: what hangs keeps its memory."""
    release, numbers, plain = threading.Event(), count(), DaliGraph.take

    def take_or_hang(graph: DaliGraph) -> list[torch.Tensor]:
        if next(numbers) == 1:
            release.wait(20)
        return plain(graph)

    monkeypatch.setattr(DaliGraph, "take", take_or_hang)
    counters = check_first(vp9, config_of(decode_timeout_s=1.0), 4)
    release.set()
    assert (counters["timeouts"], counters["bad_clips"]) == (1, 0)
    assert counters["fallback_clips"] >= 4
    (note,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    assert (
        "DALI has failed with 'no answer in 1 s (data.decode_timeout_s)': PyAV decodes everything from now on, in "
        in note
    )


@pytest.mark.parametrize("method", ["feed", "take", "__init__"])
def test_a_dali_that_always_fails_is_given_up(
    vp9: ShardDataset, method: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failures = count()

    def fail(*_: object, **__: object) -> None:
        next(failures)
        raise RuntimeError("Critical error in pipeline:\n  dlopen failed")

    monkeypatch.setattr(DaliGraph, method, fail)
    assert check_first(vp9, config_of(), 12)["bad_clips"] == 0
    assert next(failures) <= 9, "three batches, each fed once read, while another is out, and when it is due"
    (note,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    assert "'Critical error in pipeline: dlopen failed': PyAV decodes everything from now on" in note
