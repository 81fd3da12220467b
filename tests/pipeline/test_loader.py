"""What the plan says is what the batches hold: frames, crops, flips, order, replacements; and nothing stays behind."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_videos import KINDS, LEVELS, broken_copy, encode, read_number, store, write_shards

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.clip_decoder import ClipDecoder, DecodeJob
from pipeline.decoding.graph import VideoGraph
from pipeline.decoding.policy import DecoderPolicy
from pipeline.decoding.scaling import cut_views
from pipeline.decoding.video import VideoError, decode_frames
from pipeline.decoding.workers import Task
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.crops import Crop, FrameSize
from pipeline.planning.plan import ClipPlan, EvaluationPlan, PlanRow, TrainingPlan
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.gops import VideoSlice
from shard_tools.encoding.codecs import CODECS
from shard_tools.tables import publish

CPU = torch.device("cpu")


def plan_of(dataset: ShardDataset, config: DataConfig, **others: int) -> TrainingPlan:
    settings = {"num_frames": 8, "image_size": 32, "seed": 0, "batch_size": 4, **others}
    return TrainingPlan(dataset, config, **settings)


def first_batches(dataset: ShardDataset, config: DataConfig, count: int, first: int = 0) -> list[Batch]:
    with ClipLoader(dataset, plan_of(dataset, config), CPU, config, None) as loader:
        return [batch for batch, _ in zip(loader.batches(first), range(count), strict=False)]


def numbers_in(clip: torch.Tensor) -> list[int]:
    """Frame numbers that a clip [C, T, H, W] shows."""
    return [read_number(frame) for frame in clip.numpy()]


def check_frames(batches: list[Batch], plan: TrainingPlan) -> None:
    """Each batch is the plan's, and frame k of video i shows number i + k."""
    for index, batch in enumerate(batches):
        assert batch.positions == [row.position for row in plan.batch(index)]
        for row, key, clip in zip(plan.batch(index), batch.keys, batch.clip, strict=True):
            assert numbers_in(clip) == [(frame + int(key[1:])) % LEVELS for frame in row.frames]


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize(("source", "decoder"), [("short", "pyav"), ("vp9", "dali"), ("jpeg", "dali")])
def test_clips_show_the_frames_of_the_plan(
    request: pytest.FixtureRequest, source: str, decoder: str, repeats: int, stride: int
) -> None:
    dataset: ShardDataset = request.getfixturevalue(source)
    config = DataConfig(frame_stride=stride, decoder=decoder, repeats=repeats, num_threads=2)  # type: ignore[arg-type]
    plan = plan_of(dataset, config)
    for index, batch in enumerate(first_batches(dataset, config, 6)):
        rows = plan.batch(index)
        assert batch.clip.shape == (4, 8, 32, 32, 3)
        assert batch.clip.dtype == torch.uint8
        assert batch.positions == [row.position for row in rows]
        assert batch.keys == [dataset.samples[row.sample].key for row in rows]
        for clip, row, key in zip(batch.clip, rows, batch.keys, strict=True):
            assert numbers_in(clip) == [(frame + int(key[1:])) % LEVELS for frame in row.frames]


def test_labels_come_along(short: ShardDataset, vp9: ShardDataset) -> None:
    for batch in first_batches(short, DataConfig(frame_stride=1), 3):
        assert batch.labels.tolist() == [int(key[1:]) % 3 for key in batch.keys]
    assert set(first_batches(vp9, DataConfig(frame_stride=1), 1)[0].labels.tolist()) == {-1}


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize(("codec", "decoder"), [("vp9", "pyav"), ("vp9", "dali"), ("mjpeg", "dali")])
def test_crop_and_flip_are_those_of_the_plan(tmp_path: Path, codec: str, decoder: str, repeats: int) -> None:
    """Red grows from left to right, green from top to bottom: their ends in the clip tell the box."""
    video = store(codec, 8, width=320, height=240, pattern=True)
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)]))
    config = DataConfig(frame_stride=1, decoder=decoder, repeats=repeats)  # type: ignore[arg-type]
    rows = [row for index in range(4) for row in plan_of(dataset, config).batch(index)]
    assert {row.flip for row in rows} == {True, False}
    batches = first_batches(dataset, config, 4)
    clips = [clip.numpy().astype(float) for batch in batches for clip in batch.clip]
    for clip, row in zip(clips, rows, strict=True):
        red, green = clip[0, :, :, 0].mean(0), clip[0, :, :, 1].mean(1)
        left, right = red[0] * 320 / 255, red[-1] * 320 / 255
        if row.flip:
            left, right = right, left
        margin = row.crop.width / 64 + 4
        assert abs(left - row.crop.x) < margin
        assert abs(right - row.crop.x - row.crop.width) < margin
        assert abs(green[0] * 240 / 255 - row.crop.y) < margin
        assert abs(green[-1] * 240 / 255 - row.crop.y - row.crop.height) < margin


@pytest.mark.parametrize("codec", ["libvpx-vp9", "mjpeg", "pictures"])
def test_both_decoders_see_the_same(tmp_path: Path, codec: str) -> None:
    """Within 2 grey levels on average, without a bias, at every crop: also odd ones, where chroma lies between."""
    container = {"mjpeg": "avi", "libvpx-vp9": "webm"}.get(codec, "mp4")
    if codec == "pictures":
        video = store("mjpeg", 8, width=176, height=128, pattern=True)
    else:
        video = encode(8, codec=codec, container=container, width=181, height=135, pattern=True)
    dataset = ShardDataset.open(write_shards(tmp_path / "data", [("v0", video)], container=container))
    clips = {}
    for decoder in ("pyav", "dali"):
        config = DataConfig(frame_stride=1, decoder=decoder, crop="random_resized")  # type: ignore[arg-type]
        clips[decoder] = torch.cat([batch.clip for batch in first_batches(dataset, config, 4)]).float()
    difference = clips["pyav"] - clips["dali"]
    assert difference.abs().mean(dim=(1, 2, 3, 4)).max() < 2
    assert difference.mean().abs() < 0.5, "FFmpeg's default rounding is 1.3 to 2.4 too dark"


@pytest.mark.parametrize("decoder", ["pyav", "dali"])
def test_batches_are_bitwise_the_same_whatever_the_threads_and_wherever_one_starts(
    short: ShardDataset, vp9: ShardDataset, decoder: str
) -> None:
    dataset = vp9 if decoder == "dali" else short

    def clips(first: int, count: int, threads: int, prefetch: int) -> torch.Tensor:
        config = DataConfig(frame_stride=1, decoder=decoder, num_threads=threads, prefetch=prefetch)  # type: ignore[arg-type]
        return torch.stack([batch.clip for batch in first_batches(dataset, config, count, first)])

    whole = clips(0, 7, threads=1, prefetch=1)
    assert torch.equal(clips(0, 7, threads=4, prefetch=3), whole)
    assert torch.equal(clips(3, 4, threads=2, prefetch=2), whole[3:])


@pytest.mark.parametrize("decoder", ["pyav", "dali"])
def test_another_iterator_starts_afresh(vp9: ShardDataset, decoder: str) -> None:
    config = DataConfig(frame_stride=1, decoder=decoder)  # type: ignore[arg-type]
    with ClipLoader(vp9, plan_of(vp9, config), CPU, config, None) as loader:
        first = [batch.clip for batch, _ in zip(loader.batches(0), range(3), strict=False)]
        again = [batch.clip for batch, _ in zip(loader.batches(1), range(2), strict=False)]
    assert all(torch.equal(a, b) for a, b in zip(first[1:], again, strict=True))


def test_a_clip_does_not_hang_on_the_batch_it_is_in(short: ShardDataset) -> None:
    config = DataConfig(frame_stride=1)
    by_size = {}
    for size in (2, 3, 6):
        with ClipLoader(short, plan_of(short, config, batch_size=size), CPU, config, None) as loader:
            batches = [batch for batch, _ in zip(loader.batches(0), range(12 // size), strict=False)]
        by_size[size] = torch.cat([batch.clip for batch in batches])
    assert torch.equal(by_size[2], by_size[3])
    assert torch.equal(by_size[2], by_size[6])


def test_a_test_plan_ends(short: ShardDataset) -> None:
    config = DataConfig(frame_stride=1)
    plan = EvaluationPlan(
        short, config, num_frames=8, image_size=32, batch_size=9, num_temporal=2, num_spatial=3, rank=1, world_size=2
    )
    with ClipLoader(short, plan, CPU, config, None) as loader:
        batches = list(loader.batches(0))
    assert [batch.positions for batch in batches] == [[r.position for r in plan.batch(index)] for index in range(4)]
    assert [len(batch.keys) for batch in batches] == [9, 9, 9, 9]
    last = EvaluationPlan(short, config, num_frames=8, image_size=32, batch_size=27, num_temporal=2, num_spatial=3)
    with ClipLoader(short, last, CPU, config, None) as loader:
        assert [len(batch.keys) for batch in loader.batches(0)] == [27, 27, 18]


@pytest.mark.parametrize(("source", "decoder"), [("short_shards", "pyav"), ("vp9_shards", "dali")])
def test_bad_videos_are_replaced_and_written_down(
    request: pytest.FixtureRequest, tmp_path: Path, source: str, decoder: str
) -> None:
    bad = {"v02", "v05"}
    dataset = broken_copy(request.getfixturevalue(source), tmp_path / "broken", bad)
    config = DataConfig(frame_stride=1, decoder=decoder, max_bad_fraction=0.9)  # type: ignore[arg-type]
    plan, report = plan_of(dataset, config), tmp_path / "quarantine.jsonl"
    with ClipLoader(dataset, plan, CPU, config, report) as loader:
        batches = [batch for batch, _ in zip(loader.batches(0), range(6), strict=False)]
        counters = loader.counters
    replaced = 0
    for index, batch in enumerate(batches):
        for row, key, clip in zip(plan.batch(index), batch.keys, batch.clip, strict=True):
            shown, attempt = row, 0
            while dataset.samples[shown.sample].key in bad:
                attempt += 1
                shown = plan.replacement(row, attempt)
            replaced += attempt > 0
            assert key == dataset.samples[shown.sample].key
            assert numbers_in(clip) == [(frame + int(key[1:])) % LEVELS for frame in shown.frames]
    assert replaced > 0
    assert counters["bad_clips"] >= replaced
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert sorted(line["key"] for line in lines) == sorted(bad), "each once"
    assert all("sha256" in line["reason"] and "shard-" in line["where"] for line in lines)

    with ClipLoader(dataset, plan, CPU, config, report) as loader:
        again = [batch for batch, _ in zip(loader.batches(0), range(6), strict=False)]
    assert all(torch.equal(a.clip, b.clip) for a, b in zip(batches, again, strict=True))
    assert len(report.read_text().splitlines()) == 2, "a resumed run does not write them again"


def undecodable(source: Path, folder: Path, keys: set[str]) -> ShardDataset:
    """A copy whose tables agree with the broken bytes: the hash does not help, the decoder has to say it."""
    dataset = broken_copy(source, folder, keys, start=0.0)
    for index, sample in enumerate(dataset.samples):
        if sample.key in keys:
            with open(dataset.shard_path(index), "rb") as shard:
                shard.seek(sample.offset)
                digest = hashlib.sha256(shard.read(sample.size)).hexdigest()
            tables = folder.glob("*.samples.jsonl")
            for table in tables:
                table.write_text(table.read_text().replace(sample.sha256, digest))
    publish(folder, dataset.info)
    return ShardDataset.open(folder)


def test_an_error_of_dali_is_found_and_survived(vp9_shards: Path, tmp_path: Path) -> None:
    dataset = undecodable(vp9_shards, tmp_path / "broken", {"v03"})
    config = DataConfig(frame_stride=1, decoder="dali", max_bad_fraction=0.9, prefetch=3)
    plan, report = plan_of(dataset, config), tmp_path / "quarantine.jsonl"
    with ClipLoader(dataset, plan, CPU, config, report) as loader:
        batches = [batch for batch, _ in zip(loader.batches(0), range(8), strict=False)]
        assert loader.counters["rescued_clips"] > 0
    for index, batch in enumerate(batches):
        for row, key, clip in zip(plan.batch(index), batch.keys, batch.clip, strict=True):
            if dataset.samples[row.sample].key != "v03":
                assert numbers_in(clip) == [(frame + int(key[1:])) % LEVELS for frame in row.frames]
            assert key != "v03"
    assert [json.loads(line)["key"] for line in report.read_text().splitlines()] == ["v03"]


def test_too_many_bad_videos_end_the_run(short_shards: Path, tmp_path: Path) -> None:
    dataset = broken_copy(short_shards, tmp_path / "broken", {f"v{i:02d}" for i in range(6)})
    config = DataConfig(frame_stride=1, max_bad_fraction=0.05)
    with (
        pytest.raises(InputError, match=r"more than data\.max_bad_fraction = 0\.05"),
        ClipLoader(dataset, plan_of(dataset, config), CPU, config, None) as loader,
    ):
        for _ in loader.batches(0):
            pass


def test_in_a_test_every_bad_video_is_an_error(short_shards: Path, tmp_path: Path) -> None:
    dataset = broken_copy(short_shards, tmp_path / "broken", {"v07"})
    config = DataConfig(frame_stride=1, max_bad_fraction=0.9)
    plan = EvaluationPlan(dataset, config, num_frames=8, image_size=32, batch_size=4)
    with (
        pytest.raises(InputError, match="v07 cannot be decoded"),
        ClipLoader(dataset, plan, CPU, config, None) as loader,
    ):
        list(loader.batches(0))


def test_a_hung_decode_is_given_up(short: ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    stuck = short.samples[3].sha256

    def cut_or_hang(cut: VideoSlice, sample: object, *others: object) -> int:
        if sample.sha256 == stuck and not release.is_set():  # type: ignore[attr-defined]
            release.wait(20)
        return cut_views(cut, sample, *others)  # type: ignore[arg-type]

    monkeypatch.setattr("pipeline.decoding.scaling.cut_views", cut_or_hang)
    config = DataConfig(frame_stride=1, decode_timeout_s=2.0, num_threads=2, max_bad_fraction=0.9)
    plan, report = plan_of(short, config), tmp_path / "quarantine.jsonl"
    with ClipLoader(short, plan, CPU, config, report) as loader:
        batches = [batch for batch, _ in zip(loader.batches(0), range(3), strict=False)]
        assert loader.counters["hung"] == 1
        release.set()
    assert "v03" not in [key for batch in batches for key in batch.keys]
    (line,) = [json.loads(line) for line in report.read_text().splitlines()]
    assert line["key"] == "v03"
    assert "took more than 2 s" in line["reason"]
    for index, batch in enumerate(batches):
        for row, key, clip in zip(plan.batch(index), batch.keys, batch.clip, strict=True):
            shown = row if short.samples[row.sample].key != "v03" else plan.replacement(row, 1)
            assert numbers_in(clip) == [(frame + int(key[1:])) % LEVELS for frame in shown.frames]


@pytest.fixture
def hanging_dali(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """DALI hangs at the takes whose numbers are in `takes`, until `release` is set."""
    state, numbers, plain = SimpleNamespace(takes=[], release=threading.Event()), count(), VideoGraph.take

    def take_or_hang(graph: VideoGraph) -> torch.Tensor:
        if next(numbers) in state.takes:
            state.release.wait(20)
        return plain(graph)

    monkeypatch.setattr(VideoGraph, "take", take_or_hang)
    return state


def test_where_dali_hangs_pyav_goes_on(vp9: ShardDataset, hanging_dali: SimpleNamespace, tmp_path: Path) -> None:
    hanging_dali.takes = [1]
    config = DataConfig(frame_stride=1, decoder="dali", decode_timeout_s=1.0)
    plan, report = plan_of(vp9, config), tmp_path / "quarantine.jsonl"
    with ClipLoader(vp9, plan, CPU, config, report) as loader:
        batches = [batch for batch, _ in zip(loader.batches(0), range(4), strict=False)]
        assert loader.counters["hung"] == 1
        assert loader.counters["rescued_clips"] == 4
        hanging_dali.release.set()
    check_frames(batches, plan)
    assert not report.exists(), "no video is known to be bad"


def test_a_dali_that_hangs_again_and_again_is_left(
    vp9: ShardDataset, hanging_dali: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    hanging_dali.takes = range(10)
    config = DataConfig(frame_stride=1, decoder="dali", decode_timeout_s=0.3)
    plan = plan_of(vp9, config)
    with ClipLoader(vp9, plan, CPU, config, None) as loader:
        check_frames([batch for batch, _ in zip(loader.batches(0), range(8), strict=False)], plan)
        assert loader.counters["hung"] == 3, "the user has waited often enough"
        assert next(loader.batches(8)).positions == [row.position for row in plan.batch(8)]
        hanging_dali.release.set()
    (note,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    assert "no answer for 0.3 s to one of" in note
    assert "PyAV decodes all from now on" in note


@pytest.mark.parametrize("method", ["feed", "take", "__init__"])
def test_a_dali_that_always_fails_is_left(
    vp9: ShardDataset, method: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where the driver lacks a part: each graph is built, fed or read in vain, and the run goes on all the same."""
    failures = count()

    def fail(*_: object) -> None:
        next(failures)
        raise RuntimeError("Critical error in pipeline:\n  dlopen failed")

    monkeypatch.setattr(VideoGraph, method, fail)
    config = DataConfig(frame_stride=1, decoder="dali")
    plan = plan_of(vp9, config)
    with ClipLoader(vp9, plan, CPU, config, None) as loader:
        check_frames([batch for batch, _ in zip(loader.batches(0), range(12), strict=False)], plan)
        assert loader.counters["bad_clips"] == 0
    assert next(failures) <= 9, "three batches, each offered once it is read, while another is out, and when it is due"
    (note,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]
    assert "'Critical error in pipeline: dlopen failed': PyAV decodes all from now on" in note


def test_dali_begins_with_a_batch_of_which_pyav_has_cut_nothing(
    vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_is_fed, feeds = threading.Event(), count(1)
    feed, cut = VideoGraph.feed, ClipDecoder._cut

    def seen_feed(graph: VideoGraph, *batch: object) -> None:
        feed(graph, *batch)  # type: ignore[arg-type]
        if next(feeds) == 2:
            second_is_fed.set()

    def late_cut(maker: ClipDecoder, task: Task, group: DecodeJob, *others: object) -> None:
        assert group.batch == 0 or second_is_fed.wait(20)
        cut(maker, task, group, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(VideoGraph, "feed", seen_feed)
    monkeypatch.setattr(ClipDecoder, "_cut", late_cut)
    config = DataConfig(frame_stride=1, decoder="hybrid", num_threads=1)
    plan = plan_of(vp9, config)
    with ClipLoader(vp9, plan, CPU, config, None, 0.5) as loader:
        check_frames(list(islice(loader.batches(0), 4)), plan)
        assert loader.counters["dali_clips"] == 8


def test_an_error_met_early_waits_for_its_turn(vp9: ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI refuses a batch while others are under way: all of them come out, in order, and by DALI."""
    numbers, plain = count(), VideoGraph.feed

    def feed_or_fail(graph: VideoGraph, *batch: object) -> None:
        if next(numbers) == 2:
            raise RuntimeError("an earlier batch has failed")
        plain(graph, *batch)  # type: ignore[arg-type]

    monkeypatch.setattr(VideoGraph, "feed", feed_or_fail)
    config = DataConfig(frame_stride=1, decoder="dali", prefetch=4)
    plan = plan_of(vp9, config)
    with ClipLoader(vp9, plan, CPU, config, None) as loader:
        batches = []
        for batch, _ in zip(loader.batches(0), range(8), strict=False):
            batches.append(batch)
            time.sleep(0.2)  # the step, in which the next batches are read
        assert loader.counters["rescued_clips"] == 0
    check_frames(batches, plan)


@pytest.mark.parametrize("share", ["all", "some"])
def test_what_dali_lent_is_kept_while_the_batch_is_in_use(
    vp9: ShardDataset, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the batch is a copy of it: on a GPU that copy is only queued when the batch is given out."""
    lent: list[weakref.ref[torch.Tensor]] = []
    plain = VideoGraph.take

    def take(graph: VideoGraph) -> torch.Tensor:
        clips = plain(graph)
        lent.append(weakref.ref(clips))
        return clips

    monkeypatch.setattr(VideoGraph, "take", take)
    config = DataConfig(frame_stride=1, decoder="dali")
    with ClipLoader(vp9, plan_of(vp9, config), CPU, config, None) as loader:
        if share == "some":
            loader._maker.policy.ban_from_dali([0], failed=-1, since=0)
        for number, batch in zip(range(6), loader.batches(0), strict=False):
            assert len(batch.keys) == 4
            del batch
            assert [kept() is not None for kept in lent] == [False] * number + [True]


def test_the_next_batches_are_made_while_the_step_runs(short: ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    config, release = DataConfig(frame_stride=1, prefetch=2), threading.Event()
    with ClipLoader(short, plan_of(short, config), CPU, config, None) as loader:
        batches = loader.batches(0)
        next(batches)
        deadline = time.monotonic() + 30
        while loader.counters["videos_read"] < 3 * 4 and time.monotonic() < deadline:
            time.sleep(0.01)  # the step
        time.sleep(0.2)
        assert loader.counters["videos_read"] == 3 * 4, "two batches ahead, and no more"
        monkeypatch.setattr(loader._maker, "make", lambda *_: release.wait(60))  # from here on nothing is made
        assert [next(batches).positions[0], next(batches).positions[0]] == [4, 8]
        release.set()


def test_large_batches_are_not_prefetched_beyond_the_bound(short: ShardDataset) -> None:
    config = DataConfig(frame_stride=1, prefetch=50, prefetch_mib=1)
    with ClipLoader(short, plan_of(short, config, image_size=128), CPU, config, None) as loader:
        next(loader.batches(0))
        time.sleep(0.3)
        assert loader.counters["videos_read"] <= 3 * 4


def test_memory_threads_and_files_do_not_grow(vp9: ShardDataset, short: ShardDataset) -> None:
    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def run(batches: Iterator[Batch], count: int) -> tuple[float, int, int]:
        for _ in range(count):
            next(batches)
        return resident_mib(), threading.active_count(), len(os.listdir("/proc/self/fd"))

    for dataset, decoder in ((short, "pyav"), (vp9, "dali")):
        config = DataConfig(frame_stride=1, decoder=decoder, num_threads=2)  # type: ignore[arg-type]
        with ClipLoader(dataset, plan_of(dataset, config), CPU, config, None) as loader:
            batches = loader.batches(0)
            memory, threads, files = run(batches, 100)
            later = run(batches, 200)
            assert later[0] < memory * 1.02 + 2, decoder
            assert later[1] == threads, decoder
            assert later[2] <= files, decoder  # fewer: what another test left open was collected meanwhile


def test_closing_takes_no_time_and_leaves_no_thread(short: ShardDataset) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("clips-")]

    config = DataConfig(frame_stride=1, num_threads=3)

    def failing_step() -> None:
        with ClipLoader(short, plan_of(short, config), CPU, config, None) as loader:
            next(loader.batches(0))
            assert len(threads()) == 3
            raise ZeroDivisionError

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert time.monotonic() - started < 10, "the plan is endless"
    assert threads() == []


PROGRAM = """
import sys, time, torch
from pathlib import Path
from pipeline.config import DataConfig
from pipeline.shards.dataset import ShardDataset
from pipeline.loader import ClipLoader
from pipeline.planning.plan import TrainingPlan
config = DataConfig(frame_stride=1, decoder=sys.argv[2], num_threads=2)
dataset = ShardDataset.open(sys.argv[1])
plan = TrainingPlan(dataset, config, num_frames=8, image_size=32, seed=0, batch_size=4)
loader = ClipLoader(dataset, plan, torch.device("cpu"), config, None)
for index, batch in enumerate(loader.batches(0)):
    if index == 3:
        print("running", flush=True)
        if sys.argv[3] == "leave":
            sys.exit(7)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("ending", ["SIGINT", "SIGTERM", "SIGKILL", "leave"])
def test_nothing_stays_behind_however_the_program_ends(vp9_shards: Path, ending: str) -> None:
    decoder = "dali" if ending in ("SIGINT", "leave") else "pyav"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(vp9_shards), decoder, ending],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stdout.readline() == "running\n"
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    assert children == [], "no process but this one"
    assert "/dev/shm" not in Path(f"/proc/{program.pid}/maps").read_text(), "and no shared memory"
    if ending != "leave":
        program.send_signal(getattr(signal, ending))
    _, errors = program.communicate(timeout=60)
    expected = {"leave": 7, "SIGINT": -signal.SIGINT}.get(ending, -getattr(signal, ending, 0))
    assert program.returncode in (expected, 1 if ending == "SIGINT" else expected), errors
    assert "terminate called" not in errors
    assert "core dumped" not in errors


def test_decoder_dali_says_which_codec_it_does_not_know(short: ShardDataset) -> None:
    config = DataConfig(frame_stride=1, decoder="dali")
    with pytest.raises(InputError, match="does not decode h264 on cpu"):
        ClipLoader(short, plan_of(short, config), CPU, config, None)


class Chosen(ClipPlan):
    """A plan of one video's clips at every start and stride, also over its last frames."""

    views, num_frames, frame_size, batch_size = 1, 4, FrameSize(32, 32), 20

    def __init__(self, length: int, crop: Crop) -> None:
        clips = [
            tuple(range(start, start + 4 * stride, stride))
            for stride in (1, 2, 3, 5, 7)
            for start in range(length - 3 * stride)
        ]
        clips += [(length - 1,) * 4, (length - 2, length - 1, length - 1, length - 1), (0, 0, length - 1, length - 1)]
        self.rows = [PlanRow(place, 0, 0, frames, crop, flip=False) for place, frames in enumerate(clips)]

    def batch(self, number: int) -> list[PlanRow]:
        return self.rows[number * self.batch_size : (number + 1) * self.batch_size]


EXACT = [
    *((kind, "cpu", "pyav") for kind in KINDS),
    *((kind, "cpu", "dali") for kind in ("vp8", "vp9", "mjpeg")),
    *(pytest.param(kind, "cuda", "auto", marks=pytest.mark.gpu) for kind in KINDS),
]


@pytest.mark.parametrize(("kind", "device", "decoder"), EXACT)
def test_every_frame_is_the_one_asked_for(kind: str, device: str, decoder: str, tmp_path: Path) -> None:
    """From videos as others have encoded them, large enough for NVDEC, which takes no small ones."""
    video = encode(50, width=192, height=160, **KINDS[kind])  # type: ignore[arg-type]
    container = str(KINDS[kind].get("container", "mp4"))
    dataset = ShardDataset.open(write_shards(tmp_path / "shards", [("v", video)], container=container))
    dataset, plan = replace(dataset, holds_copies=True), Chosen(50, Crop(0, 0, 192, 160))
    config = DataConfig(decoder=decoder)  # type: ignore[arg-type]
    with ClipLoader(dataset, plan, torch.device(device), config, None) as loader:  # type: ignore[arg-type]
        for index, batch in enumerate(loader.batches(0)):
            for row, clip in zip(plan.batch(index), batch.clip.cpu(), strict=True):
                assert numbers_in(clip) == [number % LEVELS for number in row.frames]
        assert loader.counters["clips"] == len(plan.rows)
        assert loader.counters["rescued_clips"] == 0
        assert (loader.counters["decode_seconds"] == 0) == (decoder == "dali") or device == "cuda", "it is PyAV's"


CUT = [
    *((codec, "cpu", "pyav") for codec in CODECS),
    *((codec, "cpu", "dali") for codec in ("vp9", "mjpeg")),
    *(pytest.param(codec, "cuda", "auto", marks=pytest.mark.gpu) for codec in CODECS),
]


@pytest.mark.parametrize(("codec", "device", "decoder"), CUT)
def test_no_more_is_read_and_decoded_than_the_groups_of_a_clip(
    codec: str, device: str, decoder: str, tmp_path: Path
) -> None:
    """Every frame is the one asked for, wherever the clip begins."""
    width, height = (192, 160) if device == "cuda" else (64, 48)  # NVDEC takes no small ones
    video, plan = store(codec, 34, width=width, height=height), Chosen(34, Crop(0, 0, width, height))
    dataset = ShardDataset.open(write_shards(tmp_path / "shards", [("v", video)]))
    groups = dataset.gops(0)
    assert groups is not None
    with ClipLoader(dataset, plan, torch.device(device), DataConfig(decoder=decoder), None) as loader:  # type: ignore[arg-type]
        for index, batch in enumerate(loader.batches(0)):
            for row, clip in zip(plan.batch(index), batch.clip.cpu(), strict=True):
                assert numbers_in(clip) == [number % LEVELS for number in row.frames]
        counters = loader.counters
    assert counters["rescued_clips"] == 0
    cut = [groups.slice_video(row.frames, lambda offset, size: video[offset : offset + size]) for row in plan.rows]
    assert counters["bytes_read"] == sum(len(part.data) for part in cut) < len(plan.rows) * len(video)
    assert counters["frames_decoded"] <= sum(part.num_frames for part in cut)


def test_only_what_a_clip_needs_is_checked(tmp_path: Path) -> None:
    """A group that has changed costs the clips that it is in, and no others."""
    dataset = ShardDataset.open(write_shards(tmp_path / "shards", [("v", store("h264", 50))]))
    groups, config = dataset.gops(0), DataConfig(max_bad_fraction=0.9)
    assert groups is not None
    with open(dataset.shard_path(0), "r+b") as shard:
        shard.seek(dataset.samples[0].offset + int(groups.rows["offset"][3]) + 150)  # of frames 16 to 23
        shard.write(b"changed")
    plan, report = Chosen(50, Crop(0, 0, 64, 48)), tmp_path / "quarantine.jsonl"
    plan.rows = [row for row in plan.rows if not {*range(16, 24)} & {*row.frames}]
    assert len(plan.rows) > 50
    with ClipLoader(dataset, plan, CPU, config, report) as loader:
        for index, batch in enumerate(loader.batches(0)):
            for row, clip in zip(plan.batch(index), batch.clip, strict=True):
                assert numbers_in(clip) == [number % LEVELS for number in row.frames]
    assert not report.exists()
    with pytest.raises(VideoError, match="group 3 has changed since the shard was made"):
        Reader(dataset).clip(0, (15, 16))


@pytest.mark.gpu
def test_the_gpu_gives_what_the_cpu_gives(short: ShardDataset) -> None:
    config = DataConfig(frame_stride=1, repeats=2)
    device = torch.device("cuda")
    expected = first_batches(short, config, 6)
    with ClipLoader(short, plan_of(short, config), device, config, None) as loader:
        for batch, cpu in zip(loader.batches(0), expected, strict=False):
            assert batch.clip.device.type == "cuda"
            torch.cuda._sleep(50_000_000)  # the step is still running when the next batch is asked for
            copy = batch.clip.clone()
            assert batch.keys == cpu.keys
            assert (copy.cpu().float() - cpu.clip.float()).abs().mean() < 2
        assert loader.counters["rescued_clips"] == 0


def test_decode_frames_and_loader_agree(short: ShardDataset) -> None:
    """The full frame, uncropped and at its own size, is what decode_frames gives."""
    plan = EvaluationPlan(short, DataConfig(frame_stride=1), num_frames=4, image_size=48, batch_size=1)
    config = DataConfig(frame_stride=1)
    with ClipLoader(short, plan, CPU, config, None) as loader:
        batch = next(loader.batches(0))
    row = plan.batch(0)[0]
    sample = short.samples[row.sample]
    data = short.shard_path(row.sample).read_bytes()[sample.offset : sample.offset + sample.size]
    frames = decode_frames(data, row.frames)[:, :, row.crop.x : row.crop.x + 48]
    assert np.abs(frames.astype(int) - batch.clip[0].numpy()).max() <= 2


def test_without_dali_pyav_decodes_all(
    short: ShardDataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.decoding.policy.dali_is_installed", lambda: False)
    assert DecoderPolicy(short, torch.device("cuda"), DataConfig()).without_dali
    assert "since nvidia-dali is not installed" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"nvidia-dali is not installed.*set data.decoder to auto"):
        DecoderPolicy(short, CPU, DataConfig(decoder="dali"))
