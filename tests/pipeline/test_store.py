"""An object store that fails, hangs, crawls or gives something else: the run waits or ends, and no video is blamed."""

import os
import shutil
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from object_store import Proxy, request, upload

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.loader import ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.reading import download
from pipeline.reading.cache import ShardCache, user_cache_dir
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset

SHARD = "shard-000001.tar"


@pytest.fixture(scope="module")
def uploaded(s3_proxy: Proxy, short_shards: Path) -> str:
    return upload(s3_proxy.url, short_shards, "bucket", "short")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once."""
    monkeypatch.setattr(download.Download, "_pause", lambda *_: None)


def loader_of(url: str, tmp_path: Path, **settings: float) -> ClipLoader:
    config = DataConfig(url, frame_stride=1, cache_dir=str(tmp_path / "cache"), num_threads=2, **settings)  # type: ignore[arg-type]
    dataset = ShardDataset.open(config)
    plan = TrainingPlan(dataset, config, num_frames=4, image_size=32, seed=0, batch_size=4)
    return ClipLoader(dataset, plan, torch.device("cpu"), config, tmp_path / "quarantine.jsonl")


def clips_of(url: str, tmp_path: Path, **settings: float) -> tuple[torch.Tensor, dict[str, float]]:
    with loader_of(url, tmp_path, **settings) as loader:
        clips = [batch.clip for batch, _ in zip(loader.batches(0), range(3), strict=False)]
        return torch.cat(clips), loader.counters


@pytest.fixture(scope="module")
def expected(short_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return clips_of(str(short_shards), tmp_path_factory.mktemp("local"))[0]


@pytest.mark.parametrize(("kind", "times"), [("503", 1), ("cut", 2), ("changed", 1), ("slow", 9), ("silent", 1)])
def test_what_passes_leaves_no_trace(
    store: Proxy, uploaded: str, tmp_path: Path, expected: torch.Tensor, kind: str, times: int, impatient: None
) -> None:
    """A shard that takes longer to come than a video may take to decode is no fault of the video's."""
    loader = loader_of(uploaded, tmp_path, decode_timeout_s=1.5, download_timeout_s=2)
    store.lay(kind, SHARD, times=times, rate=15_000)  # type: ignore[arg-type]
    with loader:
        clips = torch.cat([batch.clip for batch, _ in zip(loader.batches(0), range(3), strict=False)])
        counters = loader.counters
    assert torch.equal(clips, expected)
    assert counters["bad_clips"] == counters["timeouts"] == 0
    assert not (tmp_path / "quarantine.jsonl").exists()
    assert counters["download_seconds"] > 0
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("kind", "timeout", "says"),
    [
        ("503", 0.3, r"cannot be read: "),
        ("403", 60, r"cannot be read: Forbidden"),
        ("cut", 60, r"cannot be read: "),
        (
            "changed",
            60,
            r"is not the file that its dataset was made with \(its sha256 differs\): upload that one again",
        ),
        ("slow", 0.3, r"brought less than 1 MiB in 0.3 s \(data.download_timeout_s\)"),
        ("silent", 0.3, r"brought less than 1 MiB in 0.3 s \(data.download_timeout_s\)"),
    ],
)
def test_what_lasts_ends_in_one_sentence(
    store: Proxy,
    uploaded: str,
    tmp_path: Path,
    expected: torch.Tensor,
    kind: str,
    timeout: float,
    says: str,
    impatient: None,
) -> None:
    loader = loader_of(uploaded, tmp_path, decode_timeout_s=0.2, download_timeout_s=timeout)
    store.lay(kind, SHARD, rate=10_000)  # type: ignore[arg-type]
    with loader, pytest.raises(InputError, match=says) as failure:
        list(zip(loader.batches(0), range(3), strict=False))
    assert f"{uploaded}/{SHARD}" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not (tmp_path / "quarantine.jsonl").exists()
    assert not list(tmp_path.rglob(SHARD))
    store.heal()
    assert torch.equal(clips_of(uploaded, tmp_path)[0], expected)


def test_a_cut_body_goes_on_where_it_was_cut(store: Proxy, tmp_path: Path, impatient: None) -> None:
    """Half of what is asked for comes at every try: in the end, all of it."""
    content = os.urandom(5 * 2**20)
    request(store.url, "PUT", "/bucket")
    request(store.url, "PUT", "/bucket/large/file.tar", content)
    store.lay("silent", "file.tar", times=1)
    store.lay("503", "file.tar", times=4)
    assert ShardCache(tmp_path, timeout=1).fetch("s3://bucket/large/file.tar").read_bytes() == content


def test_a_part_of_a_file_comes_alone(store: Proxy, tmp_path: Path, impatient: None) -> None:
    """In one request, or in several where they are cut; what the file does not have is said."""
    content = os.urandom(2**20)
    request(store.url, "PUT", "/bucket")
    request(store.url, "PUT", "/bucket/large/part.tar", content)
    cache, url = ShardCache(tmp_path), "s3://bucket/large/part.tar"
    store.requests.clear()
    assert cache.open(url, version="v", size=9000, start=500_000).read() == content[500_000:509_000]
    asked = list(store.requests)
    assert [line.split()[0] for line in asked].count("GET") == 1
    assert cache.open(url, version="v", size=9000, start=500_000).read() == content[500_000:509_000]
    assert store.requests == asked, "it is here"
    store.lay("cut", "part.tar", times=2)
    assert cache.open(url, version="v", size=9000, start=0).read() == content[:9000]
    with pytest.raises(InputError, match=r"it has 576 bytes instead of 9000"):
        cache.open(url, version="v", size=9000, start=2**20 - 576)
    assert len(list(tmp_path.rglob("*.tar"))) == 2


def test_an_object_of_another_size_is_not_kept(store: Proxy, uploaded: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it has \d+ bytes instead of 7\)"):
        ShardCache(tmp_path).fetch(f"{uploaded}/{SHARD}", size=7)
    assert not list(tmp_path.rglob(SHARD))
    assert ShardCache(tmp_path).fetch(f"{uploaded}/{SHARD}").stat().st_size > 7
    with pytest.raises(InputError, match=r"has 1 GiB, and data\.cache_gib is 0\.5: raise it to hold the shards"):
        ShardCache(tmp_path, max_gib=0.5).fetch(f"{uploaded}/{SHARD}", size=2**30)


def test_a_copy_that_was_damaged_here_is_downloaded_again(store: Proxy, uploaded: str, tmp_path: Path) -> None:
    dataset = ShardDataset.open(uploaded, ShardCache(tmp_path))
    before = Reader(dataset).read(5)
    [copy] = tmp_path.rglob(SHARD)
    content = bytearray(copy.read_bytes())
    content[dataset.samples[5].offset + 9] ^= 1
    copy.write_bytes(content)
    assert Reader(dataset).read(5) == before
    os.truncate(copy, 100)
    assert Reader(dataset).read(5) == before


def test_nobody_waits_for_a_silent_store_when_the_loader_closes(store: Proxy, uploaded: str, tmp_path: Path) -> None:
    loader = loader_of(uploaded, tmp_path)
    store.lay("silent", ".tar")

    def ask() -> None:
        with suppress(CancelledError):
            list(loader.batches(0))

    threading.Thread(target=ask, daemon=True).start()
    deadline = time.monotonic() + 20
    while not any(line.endswith(".tar") for line in store.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 20, "the store would be silent for ever"
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("clips-", "shards-"))]
    assert left == []


def test_seconds_and_hits_are_counted(store: Proxy, uploaded: str, tmp_path: Path) -> None:
    store.lay("slow", ".tar", times=9, rate=15_000)
    first = clips_of(uploaded, tmp_path)[1]
    assert first["read_seconds"] < first["download_seconds"] / 3, "what is waited for is no reading"
    assert any(line.endswith(".tar") for line in store.requests)
    store.heal()
    second = clips_of(uploaded, tmp_path)[1]
    assert not any(line.endswith(".tar") for line in store.requests)
    assert second["cache_hits"] >= 3
    for counters in (first, second):
        assert counters["download_seconds"] > 0  # descriptions are always asked for
        assert counters["read_seconds"] > 0
        assert counters["decode_seconds"] > 0


def test_a_full_disk_is_said_with_the_folder(store: Proxy, uploaded: str, tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to("/dev")  # where /dev/full is
    to = tmp_path / "cache/full"
    with pytest.raises(InputError, match=r"cache takes no more \(No space left on device\): free some space"):
        download.Download(f"{uploaded}/{SHARD}", to, 60, lambda: False).run()


class TestDefaultFolder:
    """Of the cache; what another user could have put there is refused."""

    def test_it_is_the_users_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert user_cache_dir() == tmp_path / ".cache/adamae"
        assert (tmp_path / ".cache/adamae").stat().st_mode & 0o777 == 0o700
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert user_cache_dir() == tmp_path / "xdg/adamae"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
        assert user_cache_dir() == tmp_path / ".cache/adamae"

    def test_without_a_home_it_is_a_private_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
        assert user_cache_dir() == tmp_path / f"adamae-cache-{os.getuid()}"
        assert user_cache_dir().stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("trap", ["link", "open to others", "a file"])
    def test_another_ones_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        folder = tmp_path / "adamae"
        if trap == "link":
            (tmp_path / "elsewhere").mkdir()
            folder.symlink_to(tmp_path / "elsewhere")
        elif trap == "a file":
            folder.touch()
        else:
            folder.mkdir()
            folder.chmod(0o777)
        with pytest.raises(InputError, match=r"adamae, where downloads are kept, is a link, another user's, or others"):
            ShardCache().fetch("memory://nothing/here")

    def test_a_foreign_one_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        user_cache_dir()
        monkeypatch.setattr("os.getuid", lambda: 4711)
        with pytest.raises(InputError, match="is a link, another user's"):
            user_cache_dir()

    def test_nobody_asks_for_it_where_all_is_local(self, short_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipeline.reading.cache.user_cache_dir", lambda: pytest.fail("asked for"))
        Reader(ShardDataset.open(short_shards)).read(0)


def test_locks_follow_no_links(store: Proxy, uploaded: str, tmp_path: Path) -> None:
    copy = ShardCache(tmp_path / "cache").fetch(f"{uploaded}/{SHARD}")
    lock = copy.with_name(f".{SHARD}.lock")
    lock.unlink()
    victim = tmp_path / "victim"
    victim.write_text("dear")
    lock.symlink_to(victim)
    with pytest.raises(InputError, match=r"\.lock is a link: remove it"):
        ShardCache(tmp_path / "cache").fetch(f"{uploaded}/{SHARD}")
    assert victim.read_text() == "dear"
    shutil.rmtree(tmp_path / "cache")
