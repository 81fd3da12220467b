"""Reading from object storage: faults of the store, the cache shared by the processes of a node, and the look-ahead."""

import gc
import multiprocessing
import os
import shutil
import time
from functools import partial
from itertools import islice
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from loading import CPU, plan_of
from made_videos import encode, write_shards
from object_store import S3Server, request, upload
from pebble.concurrent import thread
from processes import wait_for

from adamae.common.errors import InputError
from adamae.common.jsonl import append_line
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.chunks import Chunk
from adamae.pipeline.decoding.decode_worker import DecodeWorker
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.reading import storage
from adamae.pipeline.reading.cache import ShardCache, user_cache_dir
from adamae.pipeline.reading.storage import ObjectStore
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.video_error import VideoError

SHARD = "shard-000001.tar"


@pytest.fixture(scope="module")
def uploaded(s3_server: S3Server, short_shards: Path) -> str:
    return upload(s3_server.url, short_shards, "bucket", "short")


@pytest.fixture
def bucket(short_shards: Path, tmp_path: Path) -> str:
    """The short dataset in a folder that is read as if it were object storage."""
    return f"file://{shutil.copytree(short_shards, tmp_path / 'bucket/data')}"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSE_S", 0)


def make_config(place: str, tmp_path: Path, **settings: object) -> DataConfig:
    defaults = {"frame_stride": 1, "cache_dir": str(tmp_path / "cache"), "num_workers": 2}
    return DataConfig(place, **{**defaults, **settings})  # type: ignore[arg-type]


def make_loader(config: DataConfig, tmp_path: Path, **plan: int) -> ClipLoader:
    dataset = ShardDataset.open(config)
    plan_made = plan_of(dataset, config, num_frames=4, **plan)
    return ClipLoader(dataset, plan_made, CPU, config, tmp_path / "quarantine.jsonl")


def load_clips(
    config: DataConfig, tmp_path: Path, count: int = 3, **plan: int
) -> tuple[torch.Tensor, dict[str, float]]:
    with make_loader(config, tmp_path, **plan) as loader:
        return torch.cat(
            [batch.clip for batch in islice(loader.batches(0), count)]
        ), loader.counters


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name.split("-")[1] for path in tmp_path.glob("**/cache/*/shard-*.tar"))


def fits(short_shards: Path, shards: float) -> float:
    """data.cache_gib for so many shards."""
    return shards * max(path.stat().st_size for path in short_shards.glob("*.tar")) / 2**30


@pytest.fixture(scope="module")
def expected(short_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    folder = tmp_path_factory.mktemp("local")
    return load_clips(make_config(str(short_shards), folder), folder)[0]


@pytest.mark.parametrize(
    ("kind", "times"), [("503", 1), ("cut", 2), ("changed", 1), ("slow", 1), ("silent", 1)]
)
def test_passing_faults_leave_no_trace(
    store: S3Server,
    uploaded: str,
    tmp_path: Path,
    expected: torch.Tensor,
    kind: str,
    times: int,
    no_pauses: None,
) -> None:
    """A download that takes longer than a decode may take is no fault of the video."""
    loader = make_loader(
        make_config(uploaded, tmp_path, decode_timeout_s=2, download_timeout_s=3), tmp_path
    )
    store.inject(kind, SHARD, times=times, rate=10_000)  # type: ignore[arg-type]
    with loader:
        clips = torch.cat([batch.clip for batch in islice(loader.batches(0), 3)])
        counters = loader.counters
    assert torch.equal(clips, expected)
    assert counters["bad_clips"] == counters["timeouts"] == 0
    assert counters["download_seconds"] > 0
    assert not (tmp_path / "quarantine.jsonl").exists()
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("503", r"cannot be read: "),
        ("403", r"cannot be read: no permission"),
        ("cut", r"cannot be read: "),
        (
            "changed",
            r"is not the file that its dataset was made with \(its sha256 differs\): upload",
        ),
        ("silent", r"cannot be read: no answer in 0.3 s \(data.download_timeout_s\)"),
    ],
)
def test_lasting_faults_end_in_one_sentence(
    store: S3Server,
    uploaded: str,
    tmp_path: Path,
    expected: torch.Tensor,
    kind: str,
    says: str,
    no_pauses: None,
) -> None:
    loader = make_loader(make_config(uploaded, tmp_path), tmp_path)
    store.inject(kind, SHARD)  # type: ignore[arg-type]
    client = ObjectStore(uploaded, timeout=0.3)
    in_workers = kind in ("403", "changed")  # which are not tried again: workers would make pauses
    read = (
        partial(list, islice(loader.batches(0), 3))
        if in_workers
        else partial(client.read_range, SHARD, 0, 9)
    )
    with loader, pytest.raises(InputError, match=says) as failure:
        read()
    assert f"{uploaded}/{SHARD}" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not (tmp_path / "quarantine.jsonl").exists()
    assert "000001" not in cached(tmp_path)
    store.heal()
    assert torch.equal(load_clips(make_config(uploaded, tmp_path), tmp_path)[0], expected)


def test_downloads_are_resumed(
    store: S3Server, tmp_path: Path, monkeypatch, no_pauses: None
) -> None:
    """After a failed request, and by the process that comes after one that was killed."""
    monkeypatch.setattr(storage, "BLOCK", 2**20)
    content = os.urandom(3 * 2**20 + 5)
    request(store.url, "PUT", "/bucket")
    request(store.url, "PUT", "/bucket/large/file.tar", content)
    bucket = ObjectStore("s3://bucket/large", timeout=5)
    (tmp_path / "partial").write_bytes(content[: 2**20 + 7])
    store.inject("cut", "file.tar", times=2)
    bucket.append_range("file.tar", tmp_path / "partial", len(content))
    assert (tmp_path / "partial").read_bytes() == content
    assert bucket.read_range("file.tar", 500_000, 509_000) == content[500_000:509_000]
    with pytest.raises(InputError, match=r"file\.tar cannot be read"):
        bucket.read_range("file.tar", len(content) - 5, len(content) + 5)
    with pytest.raises(InputError, match=r"other\.tar cannot be read: it does not exist"):
        bucket.read_range("other.tar", 0, 5)
    with pytest.raises(InputError, match=r"nosuchprotocol://bucket cannot be opened"):
        ObjectStore("nosuchprotocol://bucket")


def test_nobody_waits_for_a_silent_store_when_the_loader_closes(
    store: S3Server, uploaded: str, tmp_path: Path
) -> None:
    loader = make_loader(make_config(uploaded, tmp_path), tmp_path)
    store.inject("silent", ".tar")
    asking = thread(lambda: next(loader.batches(0)))()
    assert wait_for(lambda: any(line.endswith(".tar") for line in store.requests), 30)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 20, "the store would be silent for ever"
    assert not asking.done() or asking.exception()


def test_remote_shards_give_the_same_clips_and_come_once(
    bucket: str, tmp_path: Path, expected: torch.Tensor
) -> None:
    config = make_config(bucket, tmp_path)
    for _ in range(2):
        clips, counters = load_clips(config, tmp_path)
        assert torch.equal(clips, expected)
        assert counters["cache_hits"] >= 12
    assert cached(tmp_path) == ["000000", "000001", "000002"]
    (tmp_path / "bucket/data/shard-000000.tar").unlink()
    assert torch.equal(load_clips(config, tmp_path)[0], expected), "from the cache alone"


def test_shards_that_find_no_room_are_streamed(
    bucket: str,
    short_shards: Path,
    tmp_path: Path,
    expected: torch.Tensor,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_config(bucket, tmp_path, cache_gib=fits(short_shards, 1.5))
    kept = []
    for _ in range(2):
        assert torch.equal(load_clips(config, tmp_path)[0], expected)
        kept.append(cached(tmp_path))
    assert kept[0] == kept[1], "what came first"
    assert len(kept[0]) == 1
    dataset = ShardDataset.open(config)
    assert all(dataset.read_video(sample) for sample in range(12))
    assert dataset.cache.take_counts() == {"cache_hits": 4, "streamed_clips": 8}
    assert "is full" in capfd.readouterr().err


def test_each_worker_downloads_its_shards_ahead(bucket: str, tmp_path: Path) -> None:
    with make_loader(make_config(bucket, tmp_path), tmp_path) as loader:
        setup, memory = loader._pool._setup, loader.memory
    for worker, expected in ((1, ["000001"]), (0, ["000000", "000001", "000002"])):
        DecodeWorker(setup._replace(number=worker), memory, Pipe()[0]).read_ahead(Chunk(0, 0, 0, 0))
        assert wait_for(lambda expected=expected: cached(tmp_path) == expected, 30)


def test_copies_nobody_needs_make_room(bucket: str, short_shards: Path, tmp_path: Path) -> None:
    """Those of datasets that nobody has open."""
    other = write_shards(tmp_path / "other", [(f"w{i}", encode(9)) for i in range(2)], per_shard=2)
    gib = fits(short_shards, 2.2)
    load_clips(make_config(f"file://{other}", tmp_path, cache_gib=gib), tmp_path)
    gc.collect()  # a dataset is open for as long as its object exists
    assert len(list(tmp_path.rglob("cache/*/*.tar"))) == 1
    load_clips(make_config(bucket, tmp_path, cache_gib=gib), tmp_path)
    assert len(cached(tmp_path)) == 2


def test_damaged_copies_are_replaced_by_the_store(bucket: str, tmp_path: Path) -> None:
    config = make_config(bucket, tmp_path)
    dataset = ShardDataset.open(config)
    before = dataset.read_video(5)
    [copy] = tmp_path.rglob("shard-000001-*.tar")
    for damage in (
        lambda data: data.replace(before, before[:-9] + bytes(9)),
        lambda data: data[:100],
    ):
        copy.write_bytes(damage(copy.read_bytes()))
        assert dataset.read_video(5) == before
        assert not copy.exists()
        assert dataset.read_video(5) == before
    stored = tmp_path / "bucket/data/shard-000001.tar"
    content = bytearray(stored.read_bytes())
    content[dataset.samples[5].offset + 100] ^= 1
    stored.write_bytes(content)
    os.truncate(copy, 100)
    with pytest.raises(VideoError, match="sha256 differs"):
        dataset.read_video(5)


def test_shards_that_were_uploaded_again_are_downloaded_again(bucket: str, tmp_path: Path) -> None:
    config = make_config(bucket, tmp_path)
    before = ShardDataset.open(config).read_video(0)
    again = write_shards(tmp_path / "again", [("v00", encode(9))], per_shard=4)
    shutil.copytree(again, tmp_path / "bucket/data", dirs_exist_ok=True)
    assert (
        ShardDataset.open(config).read_video(0) == ShardDataset.open(again).read_video(0) != before
    )


def test_a_subset_is_read_in_place(bucket: str, short_shards: Path, tmp_path: Path) -> None:
    configs = [make_config(place, tmp_path, subset=5) for place in (str(short_shards), bucket)]
    (local, _), (remote, counters) = (
        load_clips(config, tmp_path, batch_size=2) for config in configs
    )
    assert torch.equal(local, remote)
    assert counters["cache_hits"] == 0
    assert not cached(tmp_path)


def test_processes_of_a_node_download_each_shard_once(
    short: ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, read_range = multiprocessing.get_context("fork"), ObjectStore.read_range
    barrier, log = fork.Barrier(3), tmp_path / "log"

    def read_and_log(store: ObjectStore, name: str, start: int, end: int) -> bytes:
        append_line(log, f"{name}\n")
        return read_range(store, name, start, end)

    def fetch_all() -> None:
        barrier.wait()
        cache = ShardCache(tmp_path / "cache")
        assert all(
            cache.fetch(f"file://{short.folder}/{x.name}", x.sha256, x.num_bytes)
            for x in short.info.shards
        )

    monkeypatch.setattr(ObjectStore, "read_range", read_and_log)
    processes = [fork.Process(target=fetch_all) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert sorted(log.read_text().split()) == [shard.name for shard in short.info.shards]


def test_a_full_disk_is_a_full_cache(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    dataset = ShardDataset.open(make_config(bucket, tmp_path))
    size = dataset.samples[5].size
    monkeypatch.setattr(ObjectStore, "append_range", full)
    assert len(dataset.read_video(5)) == size
    assert not list(tmp_path.rglob("*.partial"))


def test_locks_follow_no_links(bucket: str, short: ShardDataset, tmp_path: Path) -> None:
    shard = short.info.shards[0]
    copy = ShardCache(tmp_path).path(f"{bucket}/{shard.name}", shard.sha256)
    copy.parent.mkdir()
    (tmp_path / "victim").write_text("dear")
    copy.with_name(f".{copy.name}.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match=r"\.lock is a link: remove it"):
        ShardCache(tmp_path).fetch(f"{bucket}/{shard.name}", shard.sha256, shard.num_bytes)
    assert (tmp_path / "victim").read_text() == "dear"


@pytest.mark.parametrize(("canonical", "most"), [(False, 9), (True, 5)])
def test_canonical_nodes_download_about_their_own_part(
    bucket: str, tmp_path: Path, canonical: bool, most: int
) -> None:
    """At the cuts alone, two nodes share a shard; otherwise every node downloads everything."""
    for rank in range(3):
        place, nodes = tmp_path / str(rank), 3 if canonical else 1
        config = make_config(bucket, place, canonical_nodes=nodes, shuffle_shards=1, cache_gib=1)
        load_clips(config, tmp_path, count=6, batch_size=2, rank=rank, world_size=3)
    assert len(cached(tmp_path)) <= most
    assert canonical or len(cached(tmp_path)) == most


@pytest.mark.parametrize(
    ("home", "xdg", "expected"),
    [
        ("home", "", "home/.cache/adamae"),
        ("home", "{}/xdg", "xdg/adamae"),
        ("home", "relative", "home/.cache/adamae"),  # to be ignored, says the standard
        ("file", "", "adamae-cache-{}"),  # there is no home: a private one
    ],
)
def test_the_cache_is_in_the_users_home(
    tmp_path: Path, monkeypatch, home: str, xdg: str, expected: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.setenv("XDG_CACHE_HOME", xdg.format(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert user_cache_dir() == tmp_path / expected.format(os.getuid())
    assert user_cache_dir().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["link", "open to others", "a file", "foreign"])
def test_a_cache_that_others_could_have_made_is_refused(
    tmp_path: Path, monkeypatch, trap: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "adamae"
    {"link": lambda: folder.symlink_to(tmp_path), "a file": folder.touch}.get(trap, folder.mkdir)()
    folder.chmod(0o777 if trap == "open to others" else 0o700)
    if trap == "foreign":
        monkeypatch.setattr("os.getuid", lambda: 4711)
    with pytest.raises(
        InputError, match=r"adamae, where downloads are kept, is a link, another user's, or others"
    ):
        user_cache_dir()


def test_local_shards_do_not_need_a_cache(
    short_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    ShardDataset.open(short_shards).read_video(0)
