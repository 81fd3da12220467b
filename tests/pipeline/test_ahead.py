"""What is downloaded before it is needed, what the cache keeps for whom, and which files stay open."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from listed import Listed

from pipeline.config import DataConfig
from pipeline.decoding.video_error import VideoError
from pipeline.loader import ClipLoader
from pipeline.planning.plan import EvaluationPlan, TrainingPlan
from pipeline.reading import reader as reading
from pipeline.reading.ahead import LookAhead, Piece, Pieces, check_cache
from pipeline.reading.cache import ShardCache
from pipeline.reading.ledger import NoRoomError
from pipeline.reading.reader import OpenFiles, Reader
from pipeline.shards.dataset import ShardDataset
from tests.pipeline.test_plan import plan_of, table


class Fetched:
    """Shards of 10 bytes in a cache of 100, as the look-ahead asks for them."""

    def __init__(self, plan: Listed, refuses: Callable[[int], bool] = lambda _: False) -> None:
        self.shards: list[int] = []
        self.behind: list[int] = []
        dataset: Any = SimpleNamespace(
            shard_of=np.arange(1000),
            shards=[f"s3://bucket/{number}" for number in range(1000)],
            info=SimpleNamespace(shards=[SimpleNamespace(num_bytes=10, num_samples=1)] * 1000),
        )
        self.refuses = refuses
        self.ahead = LookAhead(plan, Pieces(dataset, None), 100, self._fetch, self._let_go)

    def at(self, batch: int) -> list[int]:
        """All that is fetched from when `batch` is reached."""
        self.shards = []
        self.ahead.reach(batch)
        idle(self.ahead)
        return sorted(self.shards)

    def _let_go(self, pieces: list[Piece]) -> None:
        self.behind += [piece.shard for piece in pieces]

    def _fetch(self, piece: Piece) -> None:
        if self.refuses(piece.shard):
            raise NoRoomError
        self.shards.append(piece.shard)


def idle(ahead: LookAhead) -> None:
    """Wait until it has done what it can."""
    for _ in range(100 * 50):
        if not ahead._working:
            return
        threading.Event().wait(0.01)
    raise AssertionError("still at work")


def test_it_looks_ahead_over_half_of_the_cache() -> None:
    fetched = Fetched(Listed([[number] for number in range(20)]))
    assert fetched.at(0) == [0, 1, 2, 3, 4, 5]
    assert fetched.at(1) == [6]
    assert fetched.at(5) == [7, 8, 9, 10]
    assert fetched.at(2) == [2, 3, 4, 5, 6, 7], "from the beginning"
    fetched.ahead.close()


def test_processes_with_shards_of_their_own_share_that_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for lanes, expected in ((1, 5), (2, 2), (100, 1)):
        fetched = Fetched(Listed([[number] for number in range(20)], lanes=lanes))
        assert fetched.at(0) == list(range(expected + 1))
        fetched.ahead.close()


def test_shards_are_asked_for_once_and_expected_until_their_last_batch() -> None:
    fetched = Fetched(Listed([[1, 2], [2, 3], [1, 3], [3, 1], [4]]))
    assert fetched.at(0) == [1, 2, 3, 4]
    assert fetched.at(1) == []
    assert [shard for shard in range(6) if fetched.ahead.expects(Piece(shard))] == [1, 2, 3, 4]
    assert fetched.behind == []
    assert fetched.at(2) == []
    assert fetched.behind == [2]
    assert [shard for shard in range(6) if fetched.ahead.expects(Piece(shard))] == [1, 3, 4]
    fetched.ahead.close()


def test_what_finds_no_room_is_asked_for_again() -> None:
    for batch, expected in ((0, [2, 3, 4, 5]), (2, [3, 4, 5])):  # unless it is behind by then
        fetched = Fetched(Listed([[1], [2], [3], [4], [5]]), refuses=lambda shard: shard == 2)
        assert fetched.at(0) == [1]
        assert fetched.ahead.expects(Piece(5)), "the rest is looked through"
        fetched.refuses = lambda _: False
        assert fetched.at(batch) == expected
        fetched.ahead.close()


def test_a_plan_that_repeats_itself_is_not_looked_through_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reading.ahead.FURTHEST", 20)
    fetched = Fetched(Listed([[1, 2]] * 10**5))
    assert fetched.at(0) == [1, 2]
    assert fetched.ahead._seen == 20
    fetched.ahead.close()


def test_seconds_are_those_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("pipeline.reading.ahead.time.monotonic", lambda: clock[0])
    fetched = Fetched(Listed([[1], [2], [3]], later={1: 6.0}))
    fetched.at(0)
    assert fetched.ahead.wanted_in(Piece(1)) is None
    clock[0] += 4
    fetched.at(2)
    assert fetched.ahead.wanted_in(Piece(1)) == 12.0
    assert fetched.ahead.wanted_in(Piece(2)) is None
    fetched.ahead.close()


@pytest.fixture
def bucket(short_shards: Path) -> str:
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.put(f"{short_shards}/", "memory://bucket/data", recursive=True)
    return "memory://bucket/data"


def test_files_that_have_been_removed_do_not_stay_open(bucket: str, tmp_path: Path) -> None:
    dataset = ShardDataset.open(bucket, ShardCache(tmp_path))
    reader = Reader(dataset)
    expected = [reader.read(sample) for sample in (0, 5, 9)]
    assert len(reader._files) == 3
    for path in list(tmp_path.rglob("*.tar"))[:2]:
        path.unlink()
    assert [reader.read(sample) for sample in (0, 5, 9)] == expected, "whoever has them open may go on"
    reader._files.add(Piece(99), next(tmp_path.rglob("*.tar")).open("rb"))  # the reader closes it
    assert len(reader._files) == 2


def test_open_files_are_half_of_what_the_process_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.resource, "getrlimit", lambda _: (40, 40))
    files = OpenFiles(lambda _: False, 0)
    (tmp_path / "file").touch()
    opened = [files.add(Piece(number), (tmp_path / "file").open("rb")) for number in range(25)]
    assert len(files) == 20
    assert files.get(Piece(4)) is None
    assert files.get(Piece(5)) is opened[5]
    files.add(Piece(25), (tmp_path / "file").open("rb"))
    assert files.get(Piece(5)) is opened[5], "it was used"
    assert files.get(Piece(6)) is None
    files.close()


def test_what_is_removed_and_stays_open_has_a_bound(tmp_path: Path) -> None:
    """In bytes, those used last before the others, whatever is expected."""
    files = OpenFiles(lambda _: True, 250)
    for number in range(6):
        path = tmp_path / f"{number}"
        path.write_bytes(bytes(100))
        files.add(Piece(number), path.open("rb"))
        if number < 5:
            path.unlink()
        assert files.get(Piece(1)) is not None or number == 0
    assert [number for number in range(6) if files.get(Piece(number))] == [1, 4, 5]
    files.close()


def test_a_disk_that_is_far_away_is_cached_by_its_url(short_shards: Path, tmp_path: Path) -> None:
    """And gives the same clips; a cache that holds two of three shards keeps to that."""
    clips = []
    size = max(path.stat().st_size for path in short_shards.glob("*.tar"))
    for place in (str(short_shards), f"file://{short_shards}"):
        config = DataConfig(
            place, frame_stride=1, cache_dir=str(tmp_path / "nvme"), cache_gib=2.5 * size / 2**30, shuffle_shards=1
        )
        dataset = ShardDataset.open(config)
        plan = TrainingPlan(dataset, config, num_frames=4, image_size=32, seed=0, batch_size=4)
        with ClipLoader(dataset, plan, torch.device("cpu"), config, None) as loader:
            clips.append(torch.stack([batch.clip for batch, _ in zip(loader.batches(0), range(8), strict=False)]))
            kept = [path for path in (tmp_path / "nvme").rglob("*.tar") if path.is_file()]
            assert len(kept) == (2 if "://" in place else 0)
    assert torch.equal(*clips)
    assert not list((tmp_path / "nvme").glob(".*.holder"))


@pytest.mark.parametrize(("lanes", "shuffle_shards", "said"), [(1, 1, ""), (1, 3, "3 shards"), (2, 2, "3 shards")])
def test_a_cache_that_is_too_small_for_the_order_is_said(
    lanes: int, shuffle_shards: int, said: str, bucket: str, tmp_path: Path, short: ShardDataset,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    size = max(path.stat().st_size for path in short.folder.glob("*.tar"))
    config = DataConfig(
        bucket, frame_stride=1, cache_dir=str(tmp_path), cache_gib=2 * size / 2**30, canonical_nodes=lanes,
        shuffle_shards=shuffle_shards,
    )  # fmt: skip
    dataset = ShardDataset.open(config)
    check_cache(dataset, TrainingPlan(dataset, config, num_frames=4, image_size=32, seed=0, batch_size=4))
    notes = capfd.readouterr().err
    assert (f"takes clips from {said} in turns" in notes) if said else not notes


@pytest.mark.parametrize("batches", [[[0], [5], [9]], [[0], [5], [9], [5]]])
def test_what_is_removed_is_closed_when_it_is_behind(
    batches: list[list[int]], bucket: str, short: ShardDataset, tmp_path: Path
) -> None:
    """Of a cache for one shard; what will be read yet is not downloaded again for every clip."""
    size = max(path.stat().st_size for path in short.folder.glob("*.tar"))
    dataset = ShardDataset.open(bucket, ShardCache(tmp_path, max_gib=1.5 * size / 2**30))
    reader, expected = Reader(dataset, Listed(batches)), Reader(short)
    for number, sample in enumerate((0, 5, 9)):
        reader.reach(number)
        assert reader._ahead is not None
        idle(reader._ahead)  # it knows what is behind
        assert reader.read(sample) == expected.read(sample)
    assert len(reader._files) <= 2, "one, and the one that is read"
    assert len(list(tmp_path.rglob("*.tar"))) == 1
    fsspec.filesystem("memory").store.clear()
    for sample in batches[-1]:
        assert reader.read(sample) == expected.read(sample), "from the file that is open"
    reader.close()


@pytest.mark.parametrize("nodes", [1, 6])
def test_few_videos_of_a_shard_come_one_by_one(
    nodes: int, bucket: str, short: ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a subset, or where many nodes read the same shards; and with the same clips."""
    monkeypatch.setattr("pipeline.reading.ahead.REQUEST", 0)
    clips = []
    for place in (str(short.folder), bucket):
        config = DataConfig(place, frame_stride=1, cache_dir=str(tmp_path), subset=5 if nodes == 1 else None)
        dataset = ShardDataset.open(config)
        plan = TrainingPlan(dataset, config, num_frames=4, image_size=32, seed=0, batch_size=2, world_size=nodes)
        with ClipLoader(dataset, plan, torch.device("cpu"), config, None) as loader:
            clips.append(torch.stack([batch.clip for batch, _ in zip(loader.batches(0), range(4), strict=False)]))
    assert torch.equal(*clips)
    files = list(tmp_path.rglob("*.tar"))
    assert files
    assert all("@" in path.name for path in files)
    assert {path.stat().st_size for path in files} <= {sample.size for sample in short.samples}


def test_where_many_are_read_the_shard_is_cheaper(short: ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request counts as 4 MiB: here, 20 of 200 videos cost as much as all of them."""
    info = SimpleNamespace(num_samples=200, num_bytes=100 * 2**20)
    dataset: Any = SimpleNamespace(shard_of=np.zeros(1, int), shards=["s3://a"], info=SimpleNamespace(shards=[info]))
    plan = Listed([])
    for share, comes in ((0.1, Piece(0, 0)), (0.12, Piece(0)), (1.0, Piece(0))):
        monkeypatch.setattr(plan, "share", lambda _, share=share: share)
        assert Pieces(dataset, plan).of(0) == comes
    dataset.shards = ["/local"]
    assert Pieces(dataset, plan).of(0) is None


def test_a_video_that_is_another_one_in_the_store_is_a_bad_video(
    bucket: str, short: ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.reading.ahead.REQUEST", 0)
    dataset, plan = ShardDataset.open(bucket, ShardCache(tmp_path)), Listed([[0, 1]])
    monkeypatch.setattr(plan, "share", lambda _: 0.5)
    content = fsspec.filesystem("memory").store["/bucket/data/shard-000000.tar"].getbuffer()
    content[short.samples[1].offset + 100] ^= 1
    reader = Reader(dataset, plan)
    assert reader.read(0) == Reader(short).read(0)
    with pytest.raises(VideoError, match="sha256 differs"):
        reader.read(1)
    reader.close()


def test_how_much_of_a_shard_a_node_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the clips of its lanes, of those that take part."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    shape: Any = {"batch_size": 4, "global_batch": 24, "world_size": 6, "rank": 3}
    dataset = table([6, 6, 6, 6])
    for lanes, share in ((1, 1 / 3), (2, 1 / 3), (3, 1), (6, 1)):
        config = DataConfig(frame_stride=1, canonical_nodes=lanes)
        assert plan_of(dataset, config, **shape).share(0) == pytest.approx(share)
    subset = DataConfig(frame_stride=1, subset=6)
    shares = [plan_of(dataset, subset, **shape).share(shard) for shard in range(4)]
    assert sum(shares) == pytest.approx(6 / 6 / 3)
    views = EvaluationPlan(dataset, subset, num_frames=2, image_size=8, batch_size=1, rank=3, world_size=6)
    assert [views.share(shard) for shard in range(4)] == shares
