"""Which decoder takes a video, and that failures of DALI end no run.

All of it runs on the CPU, where DALI decodes VP9 and MJPEG.
"""

import ctypes
import re
import sys
import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading import CPU, check_first, check_frames, first_batches, open_loader, plan_of
from made_videos import encode, store, write_shards

from adamae.common.errors import InputError
from adamae.pipeline import upload
from adamae.pipeline.config import DataConfig, Decoder
from adamae.pipeline.decoding import gpu_codecs, gpu_decoder
from adamae.pipeline.decoding.dali_video import DaliGraph, DecodedVideo
from adamae.pipeline.decoding.encoded import GpuCodecs
from adamae.pipeline.decoding.gpu_codecs import find_gpu_codecs, try_decoding
from adamae.pipeline.decoding.gpu_decoder import GpuDecoder
from adamae.pipeline.decoding.joining import Cut
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.crops import Crop
from adamae.pipeline.planning.plan import PlanRow
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.gops import VideoSlice

CUDA = torch.device("cuda", 0)


def config_of(**settings: Any) -> DataConfig:
    """Return a configuration that leaves decoding to DALI, unless `settings` say otherwise."""
    return DataConfig(**{"frame_stride": 1, "decoder": "dali", **settings})


def load_clips(dataset: ShardDataset, config: DataConfig) -> torch.Tensor:
    batches = first_batches(dataset, config, 4)
    return torch.cat([batch.clip for batch in batches])


@pytest.mark.parametrize("codec", ["vp9", "mjpeg"])
def test_both_decoders_see_the_same(tmp_path: Path, codec: str) -> None:
    """Within 2 gray levels on average, without a bias, at every crop."""
    video = store(codec, 8, width=192, height=144, pattern=True)
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)]))
    pyav = load_clips(dataset, config_of(decoder="pyav", crop="random_resized")).float()
    dali = load_clips(dataset, config_of(decoder="dali", crop="random_resized")).float()
    assert (pyav - dali).abs().mean(dim=(1, 2, 3, 4)).max() < 2
    assert (pyav - dali).mean().abs() < 0.5, "FFmpeg's default rounding is 1.3 to 2.4 too dark"


def test_dali_takes_whole_batches_where_workers_are_waited_for(
    vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time, and every clip of it; without a step, workers are always behind."""
    monkeypatch.setattr(gpu_decoder, "MIN_WAIT_S", 0)
    pyav = first_batches(vp9, config_of(decoder="pyav"), 12)
    dali = first_batches(vp9, config_of(decoder="dali"), 12)
    with open_loader(vp9, config_of(decoder="auto", max_bad_fraction=0)) as (_, loader):
        batches = loader.batches(0)
        made_by = []
        for by_pyav, by_dali in zip(pyav, dali, strict=True):
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
    codecs = GpuCodecs(frozenset({"vp9"}))

    def decoder_of(name: Decoder) -> GpuDecoder:
        config = config_of(decoder=name)
        return GpuDecoder(CPU, plan_of(vp9, config), config, codecs, Counter())

    assert decoder_of("dali").wants_batch(is_idle=True)
    assert decoder_of("dali").wants_batch(is_idle=False)
    decoder = decoder_of("auto")
    # Whether a batch was DALI's, the seconds for which it was waited, and whether DALI wants the
    # next.
    waits = [
        (False, 0.0, False),
        (False, 0.1, True),
        # The first batch of DALI waits for its start, which does not count.
        (True, 5.0, True),
        (False, 0.1, True),
        (True, 0.2, False),
        (False, 0.1, False),
        (False, 0.3, True),
        (False, 0.0, False),
    ]
    for is_own, seconds, wants_next in waits:
        decoder.record_wait(is_own, seconds)
        assert not decoder.wants_batch(is_idle=False), "one batch at a time"
        assert decoder.wants_batch(is_idle=True) == wants_next


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
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, PyAV decodes videos whose sides are no multiples of 16."""
    monkeypatch.setattr(gpu_codecs, "try_decoding", lambda *_: "")
    videos = [
        ("v0", encode(2, width=352, height=256)),
        ("v1", encode(2, width=342, height=256)),
        ("v2", encode(2, width=640, height=360)),
    ]
    dataset = ShardDataset.open(write_shards(tmp_path / "data", videos))
    dali = DataConfig(decoder="dali")
    assert takes(dataset, device, dali, sample=0)
    assert takes(dataset, device, dali, sample=1) == (device == CPU)
    assert takes(dataset, device, dali, sample=2) == (device == CPU)
    assert takes(dataset, device, DataConfig(decoder="auto"))
    assert not takes(dataset, device, DataConfig(decoder="pyav"))
    assert not takes(dataset, device, DataConfig())


def test_a_codec_that_the_gpu_lacks_is_decoded_by_pyav(
    short: ShardDataset, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Several videos are tried: one may be corrupt."""
    num_probes = count()

    def fail(*_: object) -> str:
        next(num_probes)
        return "no such engine"

    monkeypatch.setattr(gpu_codecs, "try_decoding", fail)
    assert not takes(short, CUDA, DataConfig(num_workers=3, decoder="auto"))
    assert next(num_probes) == gpu_codecs.MAX_PROBES
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
    short: ShardDataset, jpeg: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def miss(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", miss)
    # Imports of it fail, as where it lacks a package.
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    for dataset, device, reason in (
        (short, CPU, r"h264 on cpu \(import of nvidia\.dali halted"),
        (jpeg, CUDA, r"mjpeg on cuda \(import of nvidia\.dali halted"),
        (
            short,
            CUDA,
            r"h264 on cuda \(libnvcuvid\.so\.1: .*; containers have it with NVIDIA_DRIVER_CA",
        ),
    ):
        try_decoding.cache_clear()
        with pytest.raises(InputError, match=f"DALI cannot decode {reason}"):
            takes(dataset, device, config_of())
    monkeypatch.undo()
    try_decoding.cache_clear()
    reason = r"h264 on cpu \(Assert on .*Failed to create video decoder"
    with pytest.raises(InputError, match=reason):
        ClipLoader(short, plan_of(short, config_of()), CPU, config_of(), None)


def test_an_error_of_dali_is_found_and_survived(tmp_path: Path) -> None:
    """A video that was broken before it was stored has valid checksums; the decoder has to find it.

    It costs the clips of this video, and not those that it is joined with.
    """
    videos = [(f"v{i:02d}", store("vp9", 20, first=i)) for i in range(6)]
    broken = re.sub(b"mdat.{40}", b"mdat" + bytes(40), videos[3][1], flags=re.DOTALL)
    dataset = ShardDataset.open(write_shards(tmp_path / "broken", videos, broken={"v03": broken}))
    config = config_of(max_bad_fraction=0.9, prefetch=3)
    report = tmp_path / "quarantine.jsonl"
    with open_loader(dataset, config, report, batch_size=8) as (plan, loader):
        batches = list(islice(loader.batches(0), 6))
        assert check_frames(batches, plan, dataset, bad=["v03"]) > 0
        assert loader.counters["fallback_clips"] > 0
    (line,) = report.read_text().splitlines()
    assert '"key": "v03"' in line


def test_where_dali_hangs_pyav_takes_over(
    vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is given up: what hangs keeps its memory."""
    release = threading.Event()
    numbers = count()
    take = DaliGraph.take

    def take_or_hang(graph: DaliGraph) -> list[torch.Tensor]:
        if next(numbers) == 1:
            release.wait(120)
        return take(graph)

    monkeypatch.setattr(DaliGraph, "take", take_or_hang)
    counters = check_first(vp9, config_of(decode_timeout_s=3.0), 4)
    release.set()
    assert counters["timeouts"] == 1
    assert counters["bad_clips"] == 0
    assert counters["fallback_clips"] >= 4
    note = read_note(capfd)
    assert "DALI has failed with 'no answer in 3 s (data.decode_timeout_s)': PyAV decodes" in note
    assert "decodes everything from now on, in " in note


def read_note(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the only note that was printed."""
    (note,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    return note


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

    # Before that, DALI works: what it decodes is remembered.
    assert takes(vp9, CPU, config_of())
    monkeypatch.setattr(DaliGraph, method, fail)
    assert check_first(vp9, config_of(), 12)["bad_clips"] == 0
    # Three batches: each is fed once it has been read, while another one is out, and when it is
    # due.
    assert next(failures) <= 9
    message = "'Critical error in pipeline: dlopen failed': PyAV decodes everything from now on"
    assert message in read_note(capfd)


def test_graphs_are_built_with_the_loader(
    vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training they would cost a step a second. On a GPU, their threads then wait asleep."""
    flags: list[int] = []

    def set_flags(flag: int) -> int:
        flags.append(flag)
        return 0

    runtime = SimpleNamespace(cudaSetDeviceFlags=set_flags)
    monkeypatch.setattr(gpu_decoder, "load_cuda_runtime", lambda: runtime)
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())
    built: list[tuple[torch.device, list[int]]] = []

    class Graphs:
        def __init__(self, device: torch.device, *_: object) -> None:
            built.append((device, list(flags)))

    monkeypatch.setattr(gpu_decoder, "VideoGraphs", Graphs)
    config = config_of(decoder="auto")
    for device in (CPU, CUDA):
        decoder = GpuDecoder(
            device, plan_of(vp9, config), config, GpuCodecs(frozenset({"vp9"})), Counter()
        )
        # As every iteration over the batches begins.
        decoder.reset()
    assert built == [(CPU, []), (CUDA, [gpu_decoder.SCHEDULE_BLOCKING_SYNC])]


def test_encoded_videos_are_not_uploaded(
    vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI does that by itself; clips are the same with planes being uploaded beside them."""
    sizes = []

    def copy_chunks(*arguments: Any) -> Any:
        memory, image_starts = copy(*arguments)
        sizes.append(len(memory))
        return memory, image_starts

    copy = upload._copy_chunks
    monkeypatch.setattr(upload, "_copy_chunks", copy_chunks)
    config = config_of()
    plan = plan_of(vp9, config)
    with ClipLoader(vp9, plan, CPU, config, None, upload_planes=True) as loader:
        batches = list(islice(loader.batches(0), 3))
    check_frames(batches, plan, vp9)
    assert sizes == [0, 0, 0]


def test_memory_of_dali_is_kept_until_it_has_been_copied(
    vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where frames repeat: the copies on a GPU begin long after they were asked for."""
    copied = SimpleNamespace(query=lambda: is_copied, synchronize=lambda: None)
    stream = SimpleNamespace(record_event=lambda: copied)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: stream)
    config = config_of()
    released: list[list[int]] = []
    decoder = GpuDecoder(CUDA, plan_of(vp9, config), config, GpuCodecs(), Counter())

    def copy(order: list[int]) -> torch.Tensor:
        """Copy frames that show 0, 1, …, and return what the clip of these frames shows."""
        num_frames = max(order) + 1
        frames = torch.arange(num_frames, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 4, 4, 3)
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
