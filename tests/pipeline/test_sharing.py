"""Clips are shared between DALI and PyAV as their speeds say: the same clips in the same order, now and later."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_videos import LEVELS, read_number, store, write_shards

from pipeline.config import DataConfig
from pipeline.decoding import sharing
from pipeline.decoding.graph import VideoGraph
from pipeline.decoding.sharing import Balance, Speeds
from pipeline.loader import Batch, ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.shards.dataset import ShardDataset

CPU = torch.device("cpu")


def config_of(**settings: Any) -> DataConfig:
    return DataConfig(**{"frame_stride": 1, "num_threads": 1, "decoder": "hybrid", **settings})


def plan_of(dataset: ShardDataset, config: DataConfig, batch_size: int = 4) -> TrainingPlan:
    return TrainingPlan(dataset, config, num_frames=8, image_size=32, seed=0, batch_size=batch_size)


def batches_of(
    dataset: ShardDataset,
    config: DataConfig,
    share: Path | float,
    count: int = 6,
    first: int = 0,
    batch_size: int = 4,
) -> list[Batch]:
    with ClipLoader(dataset, plan_of(dataset, config, batch_size), CPU, config, None, share) as loader:
        return [batch for batch, _ in zip(loader.batches(first), range(count), strict=False)]


@pytest.fixture(scope="module")
def vp9(tmp_path_factory: pytest.TempPathFactory) -> ShardDataset:
    """With noise in the pictures, of which DALI and PyAV make slightly different ones."""
    videos = [(f"v{i:02d}", store("vp9", 20, first=i)) for i in range(6)]
    return ShardDataset.open(write_shards(tmp_path_factory.mktemp("data") / "vp9", videos))


@pytest.fixture
def mixed(tmp_path: Path) -> ShardDataset:
    """Of every kind: what DALI decodes as videos, as pictures, and not at all on a CPU."""
    codecs = ("vp9", "mjpeg", "h264")
    videos = [(f"v{i:02d}", store(codecs[i % 3], 20, first=i)) for i in range(9)]
    return ShardDataset.open(write_shards(tmp_path / "mixed", videos))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing takes no time."""
    monkeypatch.setattr(sharing, "TIMED_S", 0.0)


@pytest.mark.parametrize("source", ["vp9", "jpeg"])
def test_each_clip_is_made_by_the_decoder_whose_turn_it_is(request: pytest.FixtureRequest, source: str) -> None:
    dataset: ShardDataset = request.getfixturevalue(source)
    alone = {name: batches_of(dataset, config_of(decoder=name), 1.0) for name in ("pyav", "dali")}
    shared = batches_of(dataset, config_of(), 0.4)
    assert batches_of(dataset, config_of(prefetch=1, num_threads=3), 0.4, 2, first=4)[1].keys == shared[5].keys
    turns = []
    for place, batch in enumerate(shared):
        assert batch.keys == alone["pyav"][place].keys
        for clip, ours, theirs in zip(batch.clip, alone["pyav"][place].clip, alone["dali"][place].clip, strict=True):
            assert not torch.equal(ours, theirs)
            turns.append("dali" if torch.equal(clip, theirs) else "pyav")
            assert torch.equal(clip, ours if turns[-1] == "pyav" else theirs)
    assert turns.count("dali") == int(0.4 * 24)
    assert turns[:5].count("dali") == 2, "evenly spread"


def test_all_ways_make_one_batch(mixed: ShardDataset) -> None:
    config = config_of()
    plan = plan_of(mixed, config)
    with ClipLoader(mixed, plan, CPU, config, None) as loader:
        for number, batch in zip(range(12), loader.batches(0), strict=False):
            for row, key, clip in zip(plan.batch(number), batch.keys, batch.clip, strict=True):
                shown = [read_number(frame) for frame in clip.numpy()]
                assert shown == [(frame + int(key[1:])) % LEVELS for frame in row.frames]
        assert loader.counters["rescued_clips"] == 0
        assert set(loader._dali._graphs) == {"videos", "images"}
        assert 0 < loader.counters["dali_clips"] < loader.counters["clips"]


def test_speeds_are_found_once_and_kept(
    mixed: ShardDataset, tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    file = tmp_path / "decoders.jsonl"
    clips = [batch.clip for batch in batches_of(mixed, config_of(), file)]
    (line,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert line["speeds"]["dali"] > 0 < line["speeds"]["pyav"]
    assert line["speeds"]["suited"] == pytest.approx(2 / 3, abs=0.1)
    (note,) = capfd.readouterr().err.splitlines()
    assert note.startswith("note: DALI makes ")
    assert "on 1 CPU threads" in note

    with monkeypatch.context() as patch:
        patch.setattr(ClipLoader, "_clips_per_second", lambda *_: pytest.fail("timed again"))
        again = [batch.clip for batch in batches_of(mixed, config_of(), file)]
    assert all(map(torch.equal, clips, again))
    assert capfd.readouterr().err == ""
    batches_of(mixed, config_of(dali_threads=3), file, count=1)
    assert len(file.read_text().splitlines()) == 2, "under other conditions it is found anew"


def test_speeds_of_another_process_or_that_make_no_sense_do_not_count(
    vp9: ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "decoders.jsonl"
    speeds = iter([30.0, 10.0] * 9)
    monkeypatch.setattr(ClipLoader, "_clips_per_second", lambda *_: next(speeds))

    def share() -> float:
        config = config_of()
        with ClipLoader(vp9, plan_of(vp9, config), CPU, config, None, file) as loader:
            return loader._policy.share

    assert share() == 0.75
    monkeypatch.setenv("RANK", "1")
    assert share() == 0.75
    assert [json.loads(line)["rank"] for line in file.read_text().splitlines()] == [0, 1]
    for damage in ('"dali": NaN', '"dali": -1', '"dali": "x"', '"dallas": 1'):
        file.write_text(file.read_text().replace('"dali": 30.0', damage) + "{")
        assert share() == 0.75
    found = json.loads(file.read_text().splitlines()[-1])
    moved = {"rank": 1, "conditions": found["conditions"], "batch_size": 4}
    for damaged in ({"share": 0.5, "from_batch": float("inf")}, {"share": 1.5, "from_batch": 3}, {"share": 0.5}):
        with file.open("a") as opened:
            opened.write(json.dumps(moved | damaged) + "\n")
        assert share() == 0.75
    assert share() == 0.75


@pytest.mark.parametrize(
    ("speeds", "share"),
    [
        (Speeds(dali=300, pyav=100, suited=1), 0.75),
        (Speeds(dali=300, pyav=100, suited=0.9), 0.75 / 0.9),
        (Speeds(dali=300, pyav=100, suited=0.5), 1),
        (Speeds(dali=0, pyav=100, suited=1), 0),
        (Speeds(dali=0, pyav=100, suited=0), 0),
    ],
)
def test_the_share(speeds: Speeds, share: float) -> None:
    assert speeds.share == share


def test_where_there_is_no_choice_nothing_is_timed(
    short: ShardDataset, vp9: ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClipLoader, "_clips_per_second", lambda *_: pytest.fail("timed"))
    file = tmp_path / "decoders.jsonl"
    batches_of(short, config_of(decoder="auto"), file, count=1)
    batches_of(vp9, config_of(decoder="auto"), file, count=1)
    batches_of(vp9, config_of(decoder="pyav"), file, count=1)
    batches_of(vp9, config_of(decoder="dali"), file, count=1)
    assert not file.exists()


@pytest.mark.parametrize("failures", [1, 10**6])
def test_what_dali_fails_at_when_it_is_timed_is_not_its_own(
    vp9: ShardDataset, tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """One bad video does not cost it all others; if it makes none, it gets none."""
    numbers, plain = itertools.count(), VideoGraph.take

    def take(graph: VideoGraph) -> torch.Tensor:
        if next(numbers) < failures:
            raise RuntimeError("Critical error in pipeline")
        return plain(graph)

    monkeypatch.setattr(VideoGraph, "take", take)
    config = config_of()
    with ClipLoader(vp9, plan_of(vp9, config), CPU, config, None, tmp_path / "decoders.jsonl") as loader:
        next(loader.batches(0))
        assert loader._policy.without_dali == (failures > 1)
        assert loader.counters["rescued_clips"] == 0


@pytest.mark.parametrize("failing", ["one", "all"])
def test_a_run_that_goes_on_keeps_from_dali_what_it_has_failed_at(
    vp9: ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Also where DALI would not fail again: its pixels are not quite PyAV's."""
    plain = VideoGraph.feed

    def feed(graph: VideoGraph, batch: Any) -> None:
        if failing == "all" or any(row.sample == 3 for _, rows in batch for row in rows):
            raise RuntimeError("what only PyAV decodes")
        plain(graph, batch)

    file, config = tmp_path / "decoders.jsonl", config_of(decoder="dali", prefetch=2)
    with monkeypatch.context() as patch:
        patch.setattr(VideoGraph, "feed", feed)
        whole = batches_of(vp9, config, file, count=18, batch_size=1)
    again = batches_of(vp9, config, file, count=18, batch_size=1)
    assert all(torch.equal(a.clip, b.clip) for a, b in zip(whole, again, strict=True))
    by_dali = batches_of(vp9, config, 1.0, count=18, batch_size=1)
    kept = {a.keys[0] for a, b in zip(again, by_dali, strict=True) if not torch.equal(a.clip, b.clip)}
    assert kept == ({vp9.samples[3].key} if failing == "one" else {sample.key for sample in vp9.samples})


class Simulated:
    """Two decoders with batches ahead, and a step; all in seconds a batch, on a clock of their own."""

    def __init__(self, pyav: float, dali: float, step: float, prefetch: int = 3) -> None:
        self.pyav, self.dali, self.step, self.prefetch = pyav, dali, step, prefetch
        self.now, self.number = 0.0, 0
        self.pyav_done, self.dali_done = [0.0], [0.0]  # when each is done with a batch

    def go(self, balance: Balance, batches: int) -> int:
        """How often the share was moved."""
        moves, asked = 0, [self.now] * self.prefetch
        first = self.number
        share = balance.share
        for self.number in range(first, first + batches):
            begun = max(asked[-self.prefetch], 0.0)  # a batch is begun when one before it goes out
            self.pyav_done.append(max(self.pyav_done[-1], begun) + self.pyav * (1 - share))
            self.dali_done.append(max(self.dali_done[-1], begun) + self.dali * share)
            for_pyav = max(0.0, self.pyav_done[-1] - self.now)
            for_dali = max(0.0, self.dali_done[-1] - self.now - for_pyav)
            self.now += for_pyav + for_dali
            moves += balance.waited(self.number, for_pyav, for_dali, self.number + 1)
            share = balance.share
            asked.append(self.now)
            self.now += self.step
        self.number += 1
        return moves


def simulated(monkeypatch: pytest.MonkeyPatch, pyav: float, dali: float, step: float) -> Simulated:
    decoders = Simulated(pyav, dali, step)
    monkeypatch.setattr(sharing, "time", SimpleNamespace(perf_counter=lambda: decoders.now))
    return decoders


@pytest.mark.parametrize("start", [0.05, 0.3, 0.5, 0.75, 0.97, 1.0])
def test_the_share_moves_to_where_both_are_done_together(monkeypatch: pytest.MonkeyPatch, start: float) -> None:
    decoders = simulated(monkeypatch, pyav=0.10, dali=0.15, step=0.001)
    balance = Balance([(0, start)])
    assert decoders.go(balance, 600) < 60
    began = decoders.now
    assert decoders.go(balance, 5000) < 50, "each is a line in a file"
    assert balance.share == pytest.approx(0.10 / (0.10 + 0.15), abs=0.02)
    assert 5000 / (decoders.now - began) > 0.99 * (1 / 0.10 + 1 / 0.15), "neither ever waits"


def test_a_run_that_has_turned_thousands_of_times_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = simulated(monkeypatch, pyav=0.10, dali=0.15, step=0.001)
    found = [(number, 0.40 + 0.005 * (number % 2)) for number in range(5000)]
    decoders.number = 5000
    decoders.go(balance := Balance(found), 1000)
    assert balance.share == pytest.approx(0.40, abs=0.02)


def swing(decoders: Simulated, balance: Balance) -> float:
    shares = []
    for _ in range(200):
        decoders.go(balance, 1)
        shares.append(balance.share)
    return max(shares) - min(shares)


def test_a_run_that_goes_on_does_not_swing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = simulated(monkeypatch, pyav=0.10, dali=0.15, step=0.001)
    before = Balance(found := [(0, 0.3)])
    while decoders.number < 1000:
        if decoders.go(before, 1):
            found.append((decoders.number, before.share))
    anew, going_on = Balance(found[-1:]), Balance(found)
    assert swing(decoders, going_on) < 0.02 < swing(decoders, anew)


def test_a_decoder_that_is_always_late_keeps_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = simulated(monkeypatch, pyav=1e-6, dali=0.15, step=0.001)
    balance = Balance([(0, 1.0)])
    assert 0 < decoders.go(balance, 2000) < 70
    assert balance.share == sharing.SMALLEST
    assert decoders.go(balance, 100) == 0


def test_where_nothing_is_waited_for_or_no_batch_is_new_the_share_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated(monkeypatch, pyav=0.10, dali=0.15, step=1.0).go(Balance([(0, 0.9)]), 100) == 0
    decoders = simulated(monkeypatch, pyav=0.10, dali=0.15, step=0.0)
    assert decoders.go(Balance([(0, 0.5), (100, 0.9)]), 100) == 0, "these have been shared before"
    assert decoders.go(Balance([(0, 0.5), (100, 0.9)]), 100) > 0


def test_a_run_that_goes_on_shares_every_batch_as_before(
    vp9: ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, config = tmp_path / "decoders.jsonl", config_of()
    for name, value in {"FIRST_WATCH": 1, "NO_WAIT": 0.0, "BALANCED": 0.0}.items():
        monkeypatch.setattr(sharing, name, value)
    speeds = iter([30.0, 10.0])
    monkeypatch.setattr(ClipLoader, "_clips_per_second", lambda *_: next(speeds))
    whole = batches_of(vp9, config, file, count=40)
    moved = [json.loads(line)["from_batch"] for line in file.read_text().splitlines()[1:]]
    assert len(moved) > 2
    assert moved == sorted(set(moved))
    monkeypatch.setattr(Balance, "waited", lambda *_: False)
    for first in (0, moved[1], 39):
        again = batches_of(vp9, config, file, count=40 - first, first=first)
        assert all(torch.equal(a.clip, b.clip) for a, b in zip(whole[first:], again, strict=True))
    unmoved = batches_of(vp9, config, 0.75, count=40)
    assert not all(torch.equal(a.clip, b.clip) for a, b in zip(whole, unmoved, strict=True))
    with ClipLoader(vp9, plan_of(vp9, config, batch_size=2), CPU, config, None, file) as loader:
        assert loader._policy.share == 0.75, "batches of another size have other numbers"
