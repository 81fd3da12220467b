"""Which decoder takes a video, and that failures of DALI end no run. On the CPU, where DALI decodes VP9 and MJPEG."""

import ctypes
import re
import sys
import threading
import weakref
from collections import Counter
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading import CPU, check_first, check_frames, first_batches, open_loader, plan_of
from made_videos import encode, store, write_shards

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig, Decoder
from adamae.pipeline.decoding import gpu_codecs, gpu_decoder
from adamae.pipeline.decoding.dali_video import DaliGraph, DecodedVideo
from adamae.pipeline.decoding.gpu_codecs import find_gpu_codecs, try_decoding
from adamae.pipeline.decoding.gpu_decoder import GpuDecoder
from adamae.pipeline.decoding.joining import Cut, GpuCodecs
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.crops import Crop
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.gops import VideoSlice

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


def test_dali_takes_whole_batches_where_workers_are_waited_for(
    vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time, and every clip of it; without a step, workers are always behind."""
    monkeypatch.setattr(gpu_decoder, "MIN_WAIT_S", 0)
    alone = {name: first_batches(vp9, config_of(decoder=name), 12) for name in ("pyav", "dali")}
    with open_loader(vp9, config_of(decoder="auto", max_bad_fraction=0)) as (_, loader):
        batches, made_by = loader.batches(0), []
        for by_pyav, by_dali in zip(alone["pyav"], alone["dali"], strict=True):
            clip = next(batches).clip
            assert not torch.equal(by_pyav.clip, by_dali.clip)
            if torch.equal(clip, by_pyav.clip):
                made_by.append("pyav")
            elif torch.equal(clip, by_dali.clip):
                made_by.append("dali")
        assert len(made_by) == 12, "each is one decoder's alone"
        assert made_by[0] == "pyav"
        assert 0 < loader.counters["dali_clips"] < loader.counters["clips"]


def test_who_is_free_gets_the_next_batch(vp9: ShardDataset) -> None:
    def decoder_of(name: Decoder) -> GpuDecoder:
        config = config_of(decoder=name)
        return GpuDecoder(
            CPU, plan_of(vp9, config), config, GpuCodecs(frozenset({"vp9"})), Counter()
        )

    assert all(decoder_of("dali").wants_batch(is_idle=is_idle) for is_idle in (True, False))
    decoder, wants = decoder_of("auto"), []
    # (whose batch it was, seconds for which it was waited)
    for is_own, seconds in [
        (0, 0.0),
        (0, 0.1),
        (1, 5.0),
        (0, 0.1),
        (1, 0.2),
        (0, 0.1),
        (0, 0.3),
        (0, 0.0),
    ]:
        decoder.record_wait(bool(is_own), seconds)
        assert not decoder.wants_batch(is_idle=False), "one batch at a time"
        wants.append(decoder.wants_batch(is_idle=True))
    assert wants == [False, True, True, True, False, False, True, False], (
        "its first one waited for DALI to start"
    )


def test_what_dali_does_not_take_is_decoded_by_pyav(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codecs = ("vp9", "mjpeg", "h264")
    videos = [(f"v{i:02d}", store(codecs[i % 3], 20, first=i)) for i in range(9)]
    mixed = ShardDataset.open(write_shards(tmp_path / "mixed", videos))
    monkeypatch.setattr(GpuDecoder, "wants_batch", lambda *_: True)
    counters = check_first(mixed, config_of(decoder="auto"), 9)
    assert counters["fallback_clips"] == 0
    assert 0 < counters["dali_clips"] < counters["clips"]


def takes(dataset: ShardDataset, device: torch.device, config: DataConfig, sample: int = 0) -> bool:
    """Return whether the GPU decoder takes a video that consists of groups."""
    video = VideoSlice(b"", (0,), 1, in_groups=True)
    return find_gpu_codecs(dataset, device, config).include(dataset.samples[sample], video)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_dali_decodes_where_it_is_asked_to(
    tmp_path: Path, device: torch.device, monkeypatch
) -> None:
    """On a GPU, PyAV decodes videos whose sides are no multiples of 16."""
    monkeypatch.setattr(gpu_codecs, "try_decoding", lambda *_: "")
    sides = {(352, 256): True, (342, 256): device == CPU, (640, 360): device == CPU}
    videos = [
        (f"v{i}", encode(2, width=width, height=height)) for i, (width, height) in enumerate(sides)
    ]
    dataset = ShardDataset.open(write_shards(tmp_path / "data", videos))
    assert [takes(dataset, device, DataConfig(decoder="dali"), i) for i in range(3)] == [
        *sides.values()
    ]
    asked = ({}, {"decoder": "auto"}, {"decoder": "dali"}, {"decoder": "pyav"})
    assert [takes(dataset, device, DataConfig(**settings)) for settings in asked] == [
        False,
        True,
        True,
        False,
    ]


def test_a_codec_that_the_gpu_lacks_is_decoded_by_pyav(
    short: ShardDataset, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Several videos are tried: one may be corrupt."""
    tried: list[object] = []
    monkeypatch.setattr(
        gpu_codecs, "try_decoding", lambda *given: tried.append(given) or "no such engine"
    )
    assert not takes(short, CUDA, DataConfig(num_workers=3, decoder="auto"))
    assert len(tried) == gpu_codecs.MAX_PROBES
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: DALI cannot decode h264 on cuda (no such engine), which ")
    assert line.endswith("PyAV decodes it, in 3 processes")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not takes(short, CUDA, DataConfig(decoder="auto"))
    assert capfd.readouterr().err == "", "once per node"
    with pytest.raises(InputError, match=r"no such engine.*set data\.decoder to auto"):
        takes(short, CUDA, DataConfig(decoder="dali"))


def test_copied_videos_are_decoded_by_pyav(tmp_path: Path) -> None:
    video = encode(20, codec="libvpx-vp9", container="webm")
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)], container="webm"))
    assert check_first(dataset, config_of(), 1)["dali_clips"] == 0


def test_why_dali_cannot_decode_is_said(
    short: ShardDataset, jpeg: ShardDataset, monkeypatch
) -> None:
    def miss(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", miss)
    monkeypatch.setitem(
        sys.modules, "nvidia.dali", None
    )  # imports of it fail, as where it lacks a package
    for dataset, device, says in (
        (short, CPU, r"h264 on cpu \(import of nvidia\.dali halted"),
        (jpeg, CUDA, r"mjpeg on cuda \(no NVDEC decodes mjpeg\)"),
        (
            short,
            CUDA,
            r"h264 on cuda \(libnvcuvid\.so\.1: cannot open .*; containers have it with NVIDIA_DRIVER_CAPA",
        ),
    ):
        try_decoding.cache_clear()
        with pytest.raises(InputError, match=rf"DALI cannot decode {says}"):
            takes(dataset, device, config_of())
    monkeypatch.undo()
    try_decoding.cache_clear()
    with pytest.raises(
        InputError, match=r"h264 on cpu \(Assert on .*Failed to create video decoder"
    ):
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
    vp9: ShardDataset,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    failures = count()

    def fail(*_: object, **__: object) -> None:
        next(failures)
        raise RuntimeError("Critical error in pipeline:\n  dlopen failed")

    monkeypatch.setattr(DaliGraph, method, fail)
    assert check_first(vp9, config_of(), 12)["bad_clips"] == 0
    assert next(failures) <= 9, (
        "three batches, each fed once read, while another is out, and when it is due"
    )
    (note,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    assert (
        "'Critical error in pipeline: dlopen failed': PyAV decodes everything from now on" in note
    )


def test_memory_of_dali_is_kept_until_it_has_been_copied(
    vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where frames repeat: the copies on a GPU begin long after they were asked for."""
    copied = SimpleNamespace(query=lambda: is_copied, synchronize=lambda: None)
    monkeypatch.setattr(
        "torch.cuda.current_stream", lambda _: SimpleNamespace(record_event=lambda: copied)
    )
    config, released = config_of(), []
    decoder = GpuDecoder(CUDA, plan_of(vp9, config), config, GpuCodecs(), Counter())

    def copy(order: list[int]) -> torch.Tensor:
        frames = (
            torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).repeat(1, 4, 4, 3)[: max(order) + 1]
        )
        weakref.finalize(frames, released.append, order)
        row = PlanRow(0, 0, tuple(order), Crop(0, 0, 4, 4), flip=False)
        clips = torch.full((2, len(order), 4, 4, 3), 9, dtype=torch.uint8)
        decoder.copy_clips([DecodedVideo(frames, [Cut(1, row, 0, order)])], clips)
        assert clips[0].unique().tolist() == [9]
        return clips[1, :, 0, 0, 0]

    is_copied = False
    assert copy([0, 1, 2]).tolist() == [0, 1, 2]
    assert copy([0, 1, 1, 2, 2]).tolist() == [0, 1, 1, 2, 2]
    assert released == []
    is_copied = True
    copy([0])
    assert released == [[0, 1, 2], [0, 1, 1, 2, 2]]
