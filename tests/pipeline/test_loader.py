"""Batches hold what the plan says: frames, crops, flips, order, replacements."""

import gc
import json
import mmap
from collections import deque
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loading import (
    CPU,
    RowsPlan,
    check_first,
    check_frames,
    first_batches,
    list_workers,
    open_loader,
    plan_of,
    plan_one_video,
)
from made_videos import KINDS, broken_copy, encode, store, write_shards
from processes import are_asleep, wait_for

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig, Decoder
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.planning.crops import Crop
from adamae.pipeline.planning.plan import EvaluationPlan
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import UNLABELED
from adamae.shard_tools.codecs import CODECS


# The stored videos have 8 frames a second.
@pytest.mark.parametrize(("repeats", "fps"), [(1, 8), (1, 8 / 3), (2, 8), (1, 3), (1, 12)])
@pytest.mark.parametrize(
    ("source", "decoder"), [("short", "pyav"), ("vp9", "dali"), ("jpeg", "dali")]
)
def test_clips_show_the_frames_of_the_plan(
    request: pytest.FixtureRequest, source: str, decoder: Decoder, repeats: int, fps: float
) -> None:
    dataset: ShardDataset = request.getfixturevalue(source)
    config = DataConfig(fps=fps, decoder=decoder, repeats=repeats, num_workers=1)
    batches = first_batches(dataset, config, 6)
    check_frames(batches, plan_of(dataset, config), dataset)
    for batch in batches:
        assert batch.clip.shape == (4, 8, 32, 32, 3)
        assert batch.clip.dtype == torch.uint8
        assert batch.clip.is_contiguous()
        assert batch.labels.tolist() == [expected_label(source, key) for key in batch.keys]


@pytest.mark.parametrize(
    ("source", "decoder"), [("short", "pyav"), ("vp9", "dali"), ("jpeg", "dali")]
)
def test_views_show_their_own_frames_of_one_decode(
    request: pytest.FixtureRequest, source: str, decoder: Decoder
) -> None:
    dataset: ShardDataset = request.getfixturevalue(source)
    config = DataConfig(fps=8, decoder=decoder, repeats=4, views_apart_s=0.5, num_workers=2)
    plan = plan_of(dataset, config)
    assert any(len({row.frames for row in plan.batch(index)}) > 1 for index in range(6))
    counters = check_first(dataset, config, 6)
    assert counters["dali_clips"] == (counters["clips"] if decoder == "dali" else 0)


def expected_label(source: str, key: str) -> int:
    """Return the label of a video: `short` has three classes in turn, the others have none."""
    if source != "short":
        return UNLABELED
    number = int(key.removeprefix("v"))
    return number % 3


def test_several_labels_and_other_fields_come_along_if_asked_for(tmp_path: Path) -> None:
    videos = [(f"v{i}", encode(8, first=i)) for i in range(4)]
    labels = [(0, 2), (), (1,), (0,)]
    fields = [{"caption": "a dog"}, {}, {"caption": "ein Hund", "views": 3}, {}]
    folder = write_shards(tmp_path / "shards", videos, classes=3, labels=labels, fields=fields)
    dataset = ShardDataset.open(folder)
    marks = {"v0": [1, 0, 1], "v1": [0, 0, 0], "v2": [0, 1, 0], "v3": [1, 0, 0]}
    captions = {"v0": "a dog", "v1": None, "v2": "ein Hund", "v3": None}
    config = DataConfig(frame_stride=1, num_workers=1, fields=["caption"])
    for batch in first_batches(dataset, config, 2):
        assert batch.labels.tolist() == [marks[key] for key in batch.keys]
        assert batch.fields == {"caption": [captions[key] for key in batch.keys]}
    assert first_batches(dataset, DataConfig(frame_stride=1, num_workers=1), 1)[0].fields == {}
    with pytest.raises(
        InputError, match=r"has the field text of data\.fields: they have caption, views"
    ):
        first_batches(dataset, DataConfig(frame_stride=1, fields=["text"]), 1)


def test_crop_and_flip_are_those_of_the_plan(tmp_path: Path) -> None:
    """Red grows from left to right, green from top to bottom, so a clip's borders tell its box."""
    video = store("vp9", 8, width=320, height=240, pattern=True)
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)]))
    config = DataConfig(frame_stride=1, repeats=2, num_workers=1)
    rows = [row for index in range(4) for row in plan_of(dataset, config).batch(index)]
    assert {row.flip for row in rows} == {True, False}
    batches = first_batches(dataset, config, 4)
    clips = torch.cat([batch.clip for batch in batches]).numpy().astype(float)
    for clip, row in zip(clips, rows, strict=True):
        red = clip[0, :, :, 0].mean(0) * 320 / 255
        green = clip[0, :, :, 1].mean(1) * 240 / 255
        x, y, width, height = row.crop
        left, right = (red[-1], red[0]) if row.flip else (red[0], red[-1])
        borders = np.array([left, right, green[0], green[-1]])
        # The centers of the outer ones of 32 pixels lie width / 64 inside the box. The 4 is for
        # compression and for rounding: a level of red is 1.25 stored pixels wide.
        assert np.abs(borders - [x, x + width, y, y + height]).max() < width / 64 + 4


@pytest.mark.parametrize(
    ("source", "decoder"), [("short", "pyav"), ("vp9", "dali"), ("jpeg", "dali")]
)
def test_clips_do_not_depend_on_workers_prefetch_start_or_size_of_the_batch(
    request: pytest.FixtureRequest, source: str, decoder: Decoder
) -> None:
    """Also vary DALI's pipelines (one per worker on a CPU) and joining.

    In batches of two clips, none are joined.
    """
    dataset = request.getfixturevalue(source)

    def clips(first: int, count: int, workers: int, prefetch: int, size: int = 4) -> torch.Tensor:
        config = DataConfig(
            frame_stride=1, repeats=2, decoder=decoder, num_workers=workers, prefetch=prefetch
        )
        batches = first_batches(dataset, config, count, first, batch_size=size)
        return torch.cat([batch.clip for batch in batches])

    whole = clips(0, 9, workers=1, prefetch=1)
    assert torch.equal(clips(0, 9, workers=4, prefetch=3), whole)
    assert torch.equal(clips(3, 6, workers=2, prefetch=2), whole[12:])
    assert torch.equal(clips(0, 2, workers=1, prefetch=2, size=18), whole)
    assert torch.equal(clips(0, 18, workers=2, prefetch=2, size=2), whole)


@pytest.mark.parametrize("decoder", ["pyav", "dali"])
def test_a_step_reads_its_own_positions(vp9: ShardDataset, decoder: Decoder) -> None:
    """Steps in a row read on from one stream; any other step starts a new one."""
    config = DataConfig(frame_stride=1, decoder=decoder)
    with open_loader(vp9, config, batch_size=2, global_batch=6) as (plan, loader):
        assert plan.microbatches_per_step == 3
        for step in (5, 6, 2, 3):
            batches = list(loader.microbatches(step))
            check_frames(batches, plan, vp9, first=step * 3)
            positions = [*batches[0].positions, *batches[1].positions, *batches[2].positions]
            assert positions == list(range(step * 6, step * 6 + 6))
            assert [batch.is_last for batch in batches] == [False, False, True]
        assert loader.counters["clips"] == 24


def test_an_evaluation_plan_ends(short: ShardDataset) -> None:
    config = DataConfig(frame_stride=1)
    settings = {"num_frames": 8, "image_size": 32, "num_temporal": 2, "num_spatial": 3}
    # 12 videos × 2 temporal × 3 spatial views are 72 clips: 8 batches of 9, and half of them for
    # this rank.
    plan = EvaluationPlan(short, config, batch_size=9, rank=1, world_size=2, **settings)
    with ClipLoader(short, plan, CPU, config, None) as loader:
        batches = list(loader.batches(0))
    assert len(batches) == 4
    for index, batch in enumerate(batches):
        assert batch.positions == [row.position for row in plan.batch(index)]
    # The last batch has what remains of the 72 clips.
    plan = EvaluationPlan(short, config, batch_size=27, **settings)
    with ClipLoader(short, plan, CPU, config, None) as loader:
        assert [len(batch.keys) for batch in loader.batches(0)] == [27, 27, 18]


@pytest.mark.parametrize(("source", "decoder"), [("short", "pyav"), ("vp9", "dali")])
def test_bad_videos_are_replaced_and_recorded(
    request: pytest.FixtureRequest, tmp_path: Path, source: str, decoder: Decoder
) -> None:
    bad = {"v02", "v05"}
    dataset = broken_copy(Path(request.getfixturevalue(source).folder), tmp_path / "broken", bad)
    config = DataConfig(frame_stride=1, decoder=decoder, max_bad_fraction=0.9)
    report = tmp_path / "quarantine.jsonl"
    # The second time is a resumed run, which does not record them again.
    for _ in range(2):
        with open_loader(dataset, config, report) as (plan, loader):
            batches = list(islice(loader.batches(0), 6))
            num_replaced = check_frames(batches, plan, dataset, bad=bad)
            assert 0 < num_replaced <= loader.counters["bad_clips"]
        lines = [json.loads(line) for line in report.read_text().splitlines()]
        assert sorted(line["key"] for line in lines) == sorted(bad), "each once"
        for line in lines:
            assert "changed since the shard was made" in line["reason"]
            assert "shard-" in line["where"]


def test_in_an_evaluation_every_bad_video_is_an_error(short_shards: Path, tmp_path: Path) -> None:
    dataset = broken_copy(short_shards, tmp_path / "broken", {"v07"})
    config = DataConfig(frame_stride=1, max_bad_fraction=0.9)
    plan = EvaluationPlan(dataset, config, num_frames=8, image_size=32, batch_size=4)
    with (
        pytest.raises(InputError, match="v07 cannot be decoded"),
        ClipLoader(dataset, plan, CPU, config, None) as loader,
    ):
        list(loader.batches(0))


@pytest.mark.parametrize(
    ("settings", "size"), [({"prefetch": 2}, 32), ({"prefetch": 50, "prefetch_mib": 4}, 128)]
)
def test_the_next_two_batches_are_made_while_the_step_runs(
    short: ShardDataset, settings: dict[str, int], size: int
) -> None:
    """As many as there may be, or as many as fit into memory: 4 × 8 × 128×128 take 1.5 MiB."""
    config = DataConfig(frame_stride=1, num_workers=1, **settings)
    with open_loader(short, config, image_size=size) as (_, loader):
        batches = loader.batches(0)
        next(batches)
        with mmap.mmap(loader.memory.fileno(), 0) as memory:
            # Where the last frame of each batch begins: the eighth of the fourth clip.
            last_frame = (3 * 8 + 7) * size**2 * 3
            starts = [number * loader.memory.block_bytes + last_frame for number in (1, 2)]

            def are_written() -> bool:
                return all(memory[start : start + 9] != bytes(9) for start in starts)

            assert wait_for(are_written, 120)
            assert wait_for(lambda: are_asleep(list_workers()), 120)
        next(batches)
        assert loader.counters["batches_ready"] == 2, "and no more"


@pytest.mark.parametrize("gpu_is_done", [False, True])
def test_a_wait_counts_if_the_gpu_has_nothing_left_to_do(
    short: ShardDataset, gpu_is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_step = SimpleNamespace(query=lambda: gpu_is_done)
    monkeypatch.setattr(ClipLoader, "_record_queued_work", lambda _: last_step)
    with open_loader(short, DataConfig(frame_stride=1, num_workers=1)) as (_, loader):
        next(loader.batches(0))
        counters = loader.counters
    assert (counters["wait_seconds"] > 0) == gpu_is_done
    assert counters["worker_wait_seconds"] > 0
    assert counters["dali_wait_seconds"] == 0


def test_clips_leave_no_garbage_behind(short: ShardDataset) -> None:
    """A type with a shape, made for every clip, was 2 MiB a minute until garbage was collected."""
    with open_loader(short, DataConfig(frame_stride=1, num_workers=1)) as (_, loader):
        batches = loader.batches(0)
        deque(islice(batches, 3), maxlen=0)
        gc.collect()
        gc.disable()
        try:
            deque(islice(batches, 10), maxlen=0)
            assert gc.collect() < 10
        finally:
            gc.enable()


# test_video.py has all kinds on a CPU.
EXACT = [
    ("h264 with B-frames", "cpu", "pyav"),
    ("av1 with hidden frames", "cpu", "pyav"),
    *(pytest.param(kind, "cuda", "pyav", marks=pytest.mark.gpu) for kind in KINDS),
]


def load_one_video(
    video: bytes, length: int, device: str, decoder: Decoder, tmp_path: Path, container: str = "mp4"
) -> tuple[ShardDataset, RowsPlan, dict[str, float]]:
    """Check that every frame of clips from anywhere in a video is the one asked for."""
    folder = write_shards(tmp_path / "shards", [("v0", video)], container=container)
    dataset = ShardDataset.open(folder)
    sample = dataset.samples[0]
    plan = plan_one_video(length, Crop(0, 0, sample.width, sample.height))
    config = DataConfig(decoder=decoder, num_workers=1)
    with ClipLoader(dataset, plan, torch.device(device), config, None) as loader:
        for index, batch in enumerate(loader.batches(0)):
            check_frames([batch], plan, dataset, first=index)
        assert loader.counters["clips"] == len(plan.rows)
        assert loader.counters["fallback_clips"] == 0
        return dataset, plan, loader.counters


def side_lengths(device: str) -> tuple[int, int]:
    """Return width and height of videos for a device: NVDEC takes no small ones."""
    return (192, 160) if device == "cuda" else (64, 48)


@pytest.mark.parametrize(("kind", "device", "decoder"), EXACT)
def test_every_frame_is_the_one_asked_for(
    kind: str, device: str, decoder: Decoder, tmp_path: Path
) -> None:
    """From videos as others have encoded them."""
    width, height = side_lengths(device)
    video = encode(50, width=width, height=height, **KINDS[kind])  # type: ignore[arg-type]
    container = str(KINDS[kind].get("container", "mp4"))
    load_one_video(video, 50, device, decoder, tmp_path, container)


GOPS = [
    *((codec, "cpu", "pyav") for codec in CODECS),
    *((codec, "cpu", "dali") for codec in ("vp9", "mjpeg")),
    *(pytest.param(codec, "cuda", "pyav", marks=pytest.mark.gpu) for codec in CODECS),
    *(
        pytest.param(codec, "cuda", "dali", marks=pytest.mark.gpu)
        for codec in ("h264", "hevc", "vp9", "mjpeg")
    ),
]


@pytest.mark.parametrize(("codec", "device", "decoder"), GOPS)
def test_only_the_gops_of_a_clip_are_read_and_decoded(
    codec: str, device: str, decoder: Decoder, tmp_path: Path
) -> None:
    width, height = side_lengths(device)
    # The last group has one frame: where groups are joined, two key frames follow each other.
    video = store(codec, 33, width=width, height=height)
    dataset, plan, counters = load_one_video(video, 33, device, decoder, tmp_path)
    gops = dataset.gops[0]
    assert gops is not None

    def read(offset: int, size: int) -> bytes:
        return video[offset : offset + size]

    slices = [gops.slice_video(row.frames, read) for row in plan.rows]
    num_bytes = sum(len(part.data) for part in slices)
    assert counters["bytes_read"] == num_bytes < len(plan.rows) * len(video)
    assert counters["frames_decoded"] <= sum(part.num_frames for part in slices)
    assert counters["dali_clips"] == (counters["clips"] if decoder == "dali" else 0)
    assert (counters["decode_seconds"] == 0) == (decoder == "dali"), "it is PyAV's"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("codec", "decoder"), [("h264", "pyav"), ("h264", "dali"), ("mjpeg", "dali")]
)
def test_the_gpu_gives_what_the_cpu_gives(tmp_path: Path, codec: str, decoder: Decoder) -> None:
    videos = [(f"v{i:02d}", store(codec, 33, first=i, width=192, height=160)) for i in range(6)]
    dataset = ShardDataset.open(write_shards(tmp_path / "data", videos))
    expected = first_batches(dataset, DataConfig(frame_stride=1, repeats=2), 6)
    config = DataConfig(frame_stride=1, repeats=2, decoder=decoder)
    plan = plan_of(dataset, config)
    with ClipLoader(dataset, plan, torch.device("cuda"), config, None) as loader:
        for batch, cpu in zip(loader.batches(0), expected, strict=False):
            assert batch.clip.device.type == "cuda"
            # The step is still running when the next batch is asked for.
            torch.cuda._sleep(50_000_000)
            copy = batch.clip.clone()
            assert batch.keys == cpu.keys
            assert (copy.cpu().float() - cpu.clip.float()).abs().mean() < 2
        num_clips = loader.counters["clips"]
        assert loader.counters["dali_clips"] == (num_clips if decoder == "dali" else 0)
        assert loader.counters["fallback_clips"] == 0
