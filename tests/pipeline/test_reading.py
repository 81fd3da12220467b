"""Reading from object storage: faults of the store, the cache of a node, and the look-ahead."""

import errno
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
from object_store import Kind, S3Server, request, upload
from pebble.concurrent import thread
from processes import wait_for

from adamae.common.errors import BAD_INPUT, UNAVAILABLE, InputError
from adamae.common.jsonl import append_line
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.chunks import Chunk
from adamae.pipeline.decoding.decode_worker import DecodeWorker
from adamae.pipeline.loader import ClipLoader
from adamae.pipeline.reading import storage
from adamae.pipeline.reading.cache import ShardCache, user_cache_dir
from adamae.pipeline.reading.storage import ObjectStore, StorageError
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


def make_config(shards: str, tmp_path: Path, **settings: object) -> DataConfig:
    defaults = {"frame_stride": 1, "cache_dir": str(tmp_path / "cache"), "num_workers": 2}
    return DataConfig(shards, **{**defaults, **settings})  # type: ignore[arg-type]


def make_loader(config: DataConfig, tmp_path: Path, **settings: int) -> ClipLoader:
    dataset = ShardDataset.open(config)
    plan = plan_of(dataset, config, num_frames=4, **settings)
    return ClipLoader(dataset, plan, CPU, config, tmp_path / "quarantine.jsonl")


def take_clips(loader: ClipLoader, num_batches: int = 3) -> torch.Tensor:
    """Return the clips of the first batches; three are an epoch of the short dataset."""
    return torch.cat([batch.clip for batch in islice(loader.batches(0), num_batches)])


def load_clips(
    config: DataConfig, tmp_path: Path, num_batches: int = 3, **settings: int
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the clips of the first batches, and the loader's counters."""
    with make_loader(config, tmp_path, **settings) as loader:
        return take_clips(loader, num_batches), loader.counters


def list_cached(tmp_path: Path) -> list[str]:
    """Return the numbers of the shards in the caches, such as 000000."""
    copies = tmp_path.glob("**/cache/*/shard-*.tar")
    return sorted(copy.name.split("-")[1] for copy in copies)


def gib_of_shards(short_shards: Path, num_shards: float) -> float:
    """Return data.cache_gib for so many shards of the short dataset."""
    largest = max(path.stat().st_size for path in short_shards.glob("*.tar"))
    return num_shards * largest / 2**30


@pytest.fixture(scope="module")
def expected(short_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    folder = tmp_path_factory.mktemp("local")
    clips, _ = load_clips(make_config(str(short_shards), folder), folder)
    return clips


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("kind", "times"), [("503", 1), ("cut", 2), ("changed", 1), ("slow", 1), ("silent", 1)]
)
def test_passing_faults_leave_no_trace(
    store: S3Server, uploaded: str, tmp_path: Path, expected: torch.Tensor, kind: Kind, times: int
) -> None:
    """A download that takes longer than a decode may take is no fault of the video."""
    config = make_config(uploaded, tmp_path, decode_timeout_s=2, download_timeout_s=3)
    loader = make_loader(config, tmp_path)
    store.inject(kind, SHARD, times=times, rate=10_000)
    with loader:
        clips = take_clips(loader)
        counters = loader.counters
    assert torch.equal(clips, expected)
    assert counters["bad_clips"] == counters["timeouts"] == 0
    assert counters["download_seconds"] > 0
    assert not (tmp_path / "quarantine.jsonl").exists()
    assert not list(tmp_path.rglob("*.partial"))


# These faults are not tried again, so that decode workers, which make pauses, end at once.
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("403", r"cannot be read: no permission"),
        (
            "changed",
            r"is not the file that its dataset was made with \(its sha256 differs\): upload",
        ),
    ],
)
def test_lasting_faults_end_a_run_in_one_sentence(
    store: S3Server, uploaded: str, tmp_path: Path, expected: torch.Tensor, kind: Kind, says: str
) -> None:
    loader = make_loader(make_config(uploaded, tmp_path), tmp_path)
    store.inject(kind, SHARD)
    with loader, pytest.raises(InputError, match=says) as failure:
        take_clips(loader)
    assert f"{uploaded}/{SHARD}" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not (tmp_path / "quarantine.jsonl").exists()
    assert "000001" not in list_cached(tmp_path)
    store.heal()
    clips, _ = load_clips(make_config(uploaded, tmp_path), tmp_path)
    assert torch.equal(clips, expected)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("503", r"cannot be read: "),
        ("cut", r"cannot be read: "),
        ("silent", r"cannot be read: no answer in 0.3 s \(data.download_timeout_s\)"),
    ],
)
def test_lasting_faults_end_a_read_in_one_sentence(
    store: S3Server, uploaded: str, kind: Kind, says: str
) -> None:
    patient = ObjectStore(uploaded)
    content = patient.read_range(SHARD, 0, 9)
    # The client of S3 repeats some requests by itself, for minutes.
    client = ObjectStore(uploaded, timeout=0.3)
    store.inject(kind, SHARD)
    with pytest.raises(InputError, match=says) as failure:
        client.read_range(SHARD, 0, 9)
    assert f"{uploaded}/{SHARD}" in str(failure.value)
    assert "\n" not in str(failure.value)
    store.heal()
    assert patient.read_range(SHARD, 0, 9) == content


REQUESTS = {
    "listed": lambda client, path: client.sizes(),
    "read": lambda client, path: client.fetch("new", path),
    "written to": lambda client, path: client.upload(path, "new"),
    "removed": lambda client, path: client.remove("new"),
}


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("action", REQUESTS)
@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        ("silent", "", r"no answer in 0.2 s \(data.download_timeout_s\)"),
        ("403", "ExpiredToken", r"no permission \(ExpiredToken\); renew the credentials"),
        ("403", "RequestTimeTooSkewed", r"no permission \(Req.*\); set this machine's clock"),
        ("403", "SignatureDoesNotMatch", r"no permission \(Sig.*\); check the secret key"),
        ("403", "AccessDenied", r"no permission \(AccessDenied\)$"),
    ],
)
def test_every_request_has_a_limit_in_time_and_says_the_code_of_the_store(
    store: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    kind: Kind,
    code: str,
    says: str,
) -> None:
    monkeypatch.setattr(storage, "MAX_ATTEMPTS", 2)
    request(store.url, "PUT", "/bucket")
    client = ObjectStore("s3://bucket/new", timeout=0.2 if kind == "silent" else 60)
    (tmp_path / "file").write_bytes(b"content")
    store.inject(kind, code=code)
    message = rf"s3://bucket/new.* cannot be {action}: {says}"
    with pytest.raises(StorageError, match=message) as failure:
        REQUESTS[action](client, tmp_path / "file")
    # Where the store has refused, the same command fails again.
    assert failure.value.exit_code == (BAD_INPUT if kind == "403" else UNAVAILABLE)


def test_a_bucket_that_does_not_exist_is_no_missing_file(store: S3Server) -> None:
    request(store.url, "PUT", "/bucket")
    assert ObjectStore("s3://bucket/new").read("none") is None
    client = ObjectStore("s3://no-such-bucket/new")
    for call in (client.sizes, partial(client.read, "none"), partial(client.size, "none")):
        with pytest.raises(StorageError, match=r"NoSuchBucket: .*; check the name of the bucket"):
            call()


@pytest.mark.usefixtures("no_pauses")
def test_a_large_file_is_uploaded_in_parts_and_is_visible_when_it_is_complete(
    store: S3Server, tmp_path: Path
) -> None:
    request(store.url, "PUT", "/bucket")
    client = ObjectStore("s3://bucket/parts")
    content = os.urandom(2 * storage.BLOCK + 5)
    (tmp_path / "file").write_bytes(content)
    # The first request begins the upload, the next ones send parts.
    store.inject("403", "file", skipped=2, times=1)
    with pytest.raises(StorageError, match="AccessDenied"):
        client.upload(tmp_path / "file", "file")
    assert store.requests[-1].startswith("DELETE ")
    assert client.sizes() == {}
    client.upload(tmp_path / "file", "file")
    assert client.read("file") == content


@pytest.mark.usefixtures("no_pauses")
def test_downloads_are_resumed(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed request, and by the process that comes after one that was killed."""
    monkeypatch.setattr(storage, "BLOCK", 2**20)
    content = os.urandom(3 * 2**20 + 5)
    request(store.url, "PUT", "/bucket")
    request(store.url, "PUT", "/bucket/large/file.tar", content)
    bucket = ObjectStore("s3://bucket/large")
    copy = tmp_path / "partial"
    copy.write_bytes(content[: 2**20 + 7])
    store.inject("cut", "file.tar", times=2)
    bucket.append_range("file.tar", copy, len(content))
    assert copy.read_bytes() == content
    assert bucket.read_range("file.tar", 500_000, 509_000) == content[500_000:509_000]
    with pytest.raises(InputError, match=r"file\.tar cannot be read"):
        bucket.read_range("file.tar", len(content) - 5, len(content) + 5)
    with pytest.raises(InputError, match=r"other\.tar cannot be read: it does not exist"):
        bucket.read_range("other.tar", 0, 5)


def test_a_protocol_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(InputError, match=r"nosuchprotocol://bucket cannot be opened"):
        ObjectStore("nosuchprotocol://bucket")


def test_nobody_waits_for_a_silent_store_when_the_loader_closes(
    store: S3Server, uploaded: str, tmp_path: Path
) -> None:
    loader = make_loader(make_config(uploaded, tmp_path, download_timeout_s=1000), tmp_path)
    store.inject("silent", ".tar")
    batch = thread(lambda: next(loader.batches(0)))()
    assert wait_for(lambda: any(line.endswith(".tar") for line in list(store.requests)), 120)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 100, "the store would be silent for ever"
    assert not batch.done() or batch.exception()


def test_remote_shards_give_the_same_clips_and_come_once(
    bucket: str, tmp_path: Path, expected: torch.Tensor
) -> None:
    config = make_config(bucket, tmp_path)
    for _ in range(2):
        clips, counters = load_clips(config, tmp_path)
        assert torch.equal(clips, expected)
        assert counters["cache_hits"] >= 12
    assert list_cached(tmp_path) == ["000000", "000001", "000002"]
    (tmp_path / "bucket/data/shard-000000.tar").unlink()
    assert torch.equal(load_clips(config, tmp_path)[0], expected), "from the cache alone"


def test_shards_that_find_no_room_are_streamed(
    bucket: str,
    short_shards: Path,
    tmp_path: Path,
    expected: torch.Tensor,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_config(bucket, tmp_path, cache_gib=gib_of_shards(short_shards, 1.5))
    clips, _ = load_clips(config, tmp_path)
    assert torch.equal(clips, expected)
    first_copies = list_cached(tmp_path)
    assert len(first_copies) == 1
    clips, _ = load_clips(config, tmp_path)
    assert torch.equal(clips, expected)
    assert list_cached(tmp_path) == first_copies
    dataset = ShardDataset.open(config)
    assert all(dataset.read_video(sample) for sample in range(12))
    assert dataset.cache.take_counts() == {"cache_hits": 4, "streamed_clips": 8}
    assert "is full" in capfd.readouterr().err


@pytest.mark.parametrize("finished_after", [".*.partial", "[!.]*"])
def test_a_download_that_ends_while_copies_are_listed_keeps_its_room(
    finished_after: str,
    bucket: str,
    short_shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was in neither of the two lists, and a cache for one shard took two."""
    cache = ShardCache(tmp_path / "cache", gib_of_shards(short_shards, 1.5))
    dataset = ShardDataset.open(make_config(bucket, tmp_path))
    infos = [dataset.info.shards[shard] for shard in range(2)]
    finished = cache.fetch(dataset.shards[0], infos[0].sha256, infos[0].num_bytes)
    assert finished is not None
    unfinished = finished.with_name(f".{finished.name}.{infos[0].num_bytes}.partial")
    finished.rename(unfinished)

    def glob(folder: Path, pattern: str) -> list[Path]:
        found = list(original(folder, pattern))
        if pattern.endswith(f"/{finished_after}") and unfinished.exists():
            unfinished.rename(finished)
        return found

    original = Path.glob
    monkeypatch.setattr(Path, "glob", glob)
    assert cache.fetch(dataset.shards[1], infos[1].sha256, infos[1].num_bytes) is None
    assert finished.exists()


def test_each_worker_downloads_its_shards_ahead(bucket: str, tmp_path: Path) -> None:
    with make_loader(make_config(bucket, tmp_path), tmp_path) as loader:
        setup = loader._pool._setup
        memory = loader.memory
    for number, shards in ((1, ["000001"]), (0, ["000000", "000001", "000002"])):
        connection, _ = Pipe()
        worker = DecodeWorker(setup._replace(number=number), memory, connection)
        worker.read_ahead(Chunk(0, 0, 0, 0))
        assert wait_for(lambda shards=shards: list_cached(tmp_path) == shards, 120)


def test_copies_nobody_needs_make_room(bucket: str, short_shards: Path, tmp_path: Path) -> None:
    """Those of datasets that nobody has open."""
    videos = [(f"w{i}", encode(9)) for i in range(2)]
    closed = write_shards(tmp_path / "closed", videos, per_shard=2)
    gib = gib_of_shards(short_shards, 2.2)
    load_clips(make_config(f"file://{closed}", tmp_path, cache_gib=gib), tmp_path)
    # A dataset is open for as long as its object exists.
    gc.collect()
    assert len(list(tmp_path.rglob("cache/*/*.tar"))) == 1
    load_clips(make_config(bucket, tmp_path, cache_gib=gib), tmp_path)
    assert len(list_cached(tmp_path)) == 2


@pytest.mark.parametrize("is_cut", [False, True])
def test_damaged_copies_are_replaced_by_the_store(
    bucket: str, tmp_path: Path, is_cut: bool
) -> None:
    dataset = ShardDataset.open(make_config(bucket, tmp_path))
    video = dataset.read_video(5)
    (copy,) = tmp_path.rglob("shard-000001-*.tar")
    content = copy.read_bytes()
    if is_cut:
        copy.write_bytes(content[:100])
    else:
        copy.write_bytes(content.replace(video, video[:-9] + bytes(9)))
    assert dataset.read_video(5) == video
    assert not copy.exists()
    assert dataset.read_video(5) == video


def test_a_video_that_is_damaged_in_the_store_is_an_error(bucket: str, tmp_path: Path) -> None:
    dataset = ShardDataset.open(make_config(bucket, tmp_path))
    dataset.read_video(5)
    (copy,) = tmp_path.rglob("shard-000001-*.tar")
    os.truncate(copy, 100)
    stored = tmp_path / "bucket/data/shard-000001.tar"
    content = bytearray(stored.read_bytes())
    content[dataset.samples[5].offset + 100] ^= 1
    stored.write_bytes(content)
    with pytest.raises(VideoError, match="sha256 differs"):
        dataset.read_video(5)


def test_shards_that_were_uploaded_again_are_downloaded_again(bucket: str, tmp_path: Path) -> None:
    config = make_config(bucket, tmp_path)
    first_video = ShardDataset.open(config).read_video(0)
    changed = write_shards(tmp_path / "changed", [("v00", encode(9))], per_shard=4)
    shutil.copytree(changed, tmp_path / "bucket/data", dirs_exist_ok=True)
    video = ShardDataset.open(config).read_video(0)
    assert video == ShardDataset.open(changed).read_video(0)
    assert video != first_video


def test_a_subset_is_read_in_place(bucket: str, short_shards: Path, tmp_path: Path) -> None:
    local_config = make_config(str(short_shards), tmp_path, subset=5)
    local_clips, _ = load_clips(local_config, tmp_path, batch_size=2)
    remote_config = make_config(bucket, tmp_path, subset=5)
    remote_clips, counters = load_clips(remote_config, tmp_path, batch_size=2)
    assert torch.equal(remote_clips, local_clips)
    assert counters["cache_hits"] == 0
    assert not list_cached(tmp_path)


def test_processes_of_a_node_download_each_shard_once(
    short: ShardDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(3)
    log = tmp_path / "log"
    read_range = ObjectStore.read_range

    def read_and_log(store: ObjectStore, name: str, start: int, end: int) -> bytes:
        append_line(log, f"{name}\n")
        return read_range(store, name, start, end)

    def fetch_all() -> None:
        barrier.wait()
        cache = ShardCache(tmp_path / "cache")
        for shard in short.info.shards:
            url = f"file://{short.folder}/{shard.name}"
            assert cache.fetch(url, shard.sha256, shard.num_bytes)

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
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    dataset = ShardDataset.open(make_config(bucket, tmp_path))
    size = dataset.samples[5].size
    monkeypatch.setattr(ObjectStore, "append_range", fail)
    assert len(dataset.read_video(5)) == size
    assert not list(tmp_path.rglob("*.partial"))


def test_locks_follow_no_links(bucket: str, short: ShardDataset, tmp_path: Path) -> None:
    shard = short.info.shards[0]
    url = f"{bucket}/{shard.name}"
    cache = ShardCache(tmp_path)
    copy = cache.path(url, shard.sha256)
    copy.parent.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("dear")
    copy.with_name(f".{copy.name}.lock").symlink_to(victim)
    with pytest.raises(InputError, match=r"\.lock is a link: remove it"):
        cache.fetch(url, shard.sha256, shard.num_bytes)
    assert victim.read_text() == "dear"


def count_downloads(bucket: str, tmp_path: Path, canonical_nodes: int) -> int:
    """Return how many shards three nodes of one process download together."""
    for rank in range(3):
        config = make_config(
            bucket,
            tmp_path / str(rank),
            canonical_nodes=canonical_nodes,
            shuffle_shards=1,
            cache_gib=1,
        )
        load_clips(config, tmp_path, num_batches=6, batch_size=2, rank=rank, world_size=3)
    return len(list_cached(tmp_path))


def test_canonical_nodes_download_about_their_own_part(bucket: str, tmp_path: Path) -> None:
    # Only at the two cuts, two nodes share one of the three shards.
    assert count_downloads(bucket, tmp_path, canonical_nodes=3) <= 3 + 2


def test_without_canonical_nodes_every_node_downloads_everything(
    bucket: str, tmp_path: Path
) -> None:
    assert count_downloads(bucket, tmp_path, canonical_nodes=1) == 3 * 3


@pytest.mark.parametrize(
    ("home", "xdg", "expected"),
    [
        ("home", "", "home/.cache/adamae"),
        ("home", "{}/xdg", "xdg/adamae"),
        # The standard says that relative paths are to be ignored.
        ("home", "relative", "home/.cache/adamae"),
        # Without a home, a private temporary one.
        ("file", "", "adamae-cache-{}"),
    ],
)
def test_the_cache_is_in_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, xdg: str, expected: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.setenv("XDG_CACHE_HOME", xdg.format(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert user_cache_dir() == tmp_path / expected.format(os.getuid())
    assert user_cache_dir().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["link", "open to others", "a file", "foreign"])
def test_a_cache_that_others_could_have_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "adamae"
    if trap == "link":
        folder.symlink_to(tmp_path)
    elif trap == "a file":
        folder.touch()
    else:
        folder.mkdir()
    folder.chmod(0o777 if trap == "open to others" else 0o700)
    if trap == "foreign":
        monkeypatch.setattr("os.getuid", lambda: 4711)
    says = r"adamae, where downloads are kept, is a link, another user's, or others"
    with pytest.raises(InputError, match=says):
        user_cache_dir()


def test_local_shards_do_not_need_a_cache(
    short_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    ShardDataset.open(short_shards).read_video(0)
