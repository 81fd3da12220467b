"""A dataset in a store has the bytes of one in a folder, whatever comes between."""

import shutil
from pathlib import Path

import object_store
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from shard_making import hashes

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.reading import storage
from pipeline.shards.dataset import ShardDataset
from shard_tools import make_shards

URL = "memory://bucket/data"
COPY = ["--encode", "copy", "--samples-per-shard", "2", "--max-rejects", "1", "--workers", "1"]


@pytest.fixture(autouse=True)
def uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Empty the store; return the names of what is uploaded to it, in order."""
    names = []

    def put_file(self, file, target, *others, **options):
        names.append(target.rsplit("/", 1)[1])
        put(self, file, target, *others, **options)

    put = MemoryFileSystem.put_file
    for name, value in (("store", {}), ("pseudo_dirs", [""]), ("put_file", put_file)):
        monkeypatch.setattr(MemoryFileSystem, name, value)
    monkeypatch.setattr("shard_tools.output.user_cache_dir", lambda *_: tmp_path / "cache")
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)
    return names


def make(inputs: Path | str, output: Path | str, *options: str) -> int:
    return make_shards.main([str(inputs), str(output), *COPY, *options])


def there() -> dict[str, bytes]:
    """Every file under URL."""
    root = URL.removeprefix("memory:/") + "/"
    files = MemoryFileSystem.store.items()
    return {name.removeprefix(root): file.getvalue() for name, file in files if name.startswith(root)}


@pytest.fixture(scope="module")
def few(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the videos."""
    folder = tmp_path_factory.mktemp("few")
    names = {path.name for path in sorted(videos.glob("*/*.mp4"))[1::2]}
    return Path(shutil.copytree(videos, folder, dirs_exist_ok=True, ignore=lambda *_: names))


@pytest.fixture(scope="module")
def expected(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a folder holds that the videos are made into."""
    folder = tmp_path_factory.mktemp("expected") / "data"
    assert make(videos, folder) == 0
    return hashes(folder)


def test_a_dataset_in_a_store_is_one_of_a_folder(videos, expected, tmp_path, capsys, uploaded):
    assert make(videos, URL) == 0
    assert there() == expected
    assert uploaded[-1] == "dataset.json"
    assert URL in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob("*data*"))  # nothing of it stays on this machine
    config = DataConfig(shards=URL, cache_dir=str(tmp_path / "read"))
    assert len(ShardDataset.open(config).samples) == 9
    assert make(videos, URL) == 0  # there is nothing to add
    assert there() == expected


def test_videos_are_added_without_a_look_at_the_tars(few, videos, tmp_path, monkeypatch):
    def refuse_tars(self, name, file):
        assert not name.endswith(".tar")
        download(self, name, file)

    download = storage.ObjectStore.download
    monkeypatch.setattr(storage.ObjectStore, "download", refuse_tars)
    for output in (tmp_path / "data", URL):
        assert make(few, output) == make(videos, output) == 0
    assert there() == hashes(tmp_path / "data")


@pytest.mark.parametrize(
    ("number", "moment"), [(2, "before"), (2, "after"), (10, "after"), (16, "before"), (16, "after")]
)
def test_killed_at_an_upload_the_same_command_goes_on(videos, expected, monkeypatch, number, moment):
    left = number

    def killed(self, file, name):
        nonlocal left
        left -= 1
        if left < 0 and moment == "before":
            raise KeyboardInterrupt
        upload(self, file, name)
        if left < 0:
            raise KeyboardInterrupt

    upload = storage.ObjectStore.upload
    with monkeypatch.context() as patch:
        patch.setattr(storage.ObjectStore, "upload", killed)
        with pytest.raises(KeyboardInterrupt):
            make(videos, URL)
    assert make(videos, URL) == 0
    assert there() == expected


REFUSED = "cannot be written to: no permission; run the same command"


@pytest.mark.parametrize(
    ("fault", "name", "says"),
    [
        ("refused", "shard-000001.tar", REFUSED),
        ("refused", "shard-000000.samples.jsonl", REFUSED),
        ("refused", "dataset.json", REFUSED),
        ("cut", "shard-000001.tar", r"has \d+ bytes after uploading \d+; run the same command"),
    ],
)
def test_what_the_store_refuses_or_cuts_is_said_and_made_good(videos, expected, monkeypatch, fault, name, says):
    def put_file(self, file, target, *others, **options):
        if not target.endswith(name):
            put(self, file, target, *others, **options)
        elif fault == "refused":
            raise PermissionError(target)
        else:
            self.pipe_file(target, Path(file).read_bytes()[:5000])

    put = MemoryFileSystem.put_file
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", put_file)
        with pytest.raises(InputError, match=rf"^{URL}/{name} {says}"):
            make(videos, URL)
    assert "dataset.json" not in there()
    assert make(videos, URL) == 0
    assert there() == expected


def test_a_store_that_takes_nothing_or_lost_a_shard_is_found_before_a_video_is_read(few, videos, monkeypatch):
    assert make(few, URL) == 0
    monkeypatch.setitem(make_shards.ENGINES, "processes", lambda *_: pytest.fail("began"))
    del MemoryFileSystem.store["/bucket/data/shard-000000.tar"]
    with pytest.raises(InputError, match=rf"^{URL}/shard-000000.tar is missing or incomplete"):
        make(videos, URL)

    def refuse(self, path, *_, **__):
        raise PermissionError(path)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(InputError, match=rf"^{URL}/.writable cannot be written to: no permission$"):
        make(videos, URL)


def test_parts_share_a_staging_folder(videos, expected, tmp_path):
    for part in ("1/2", "2/2"):
        assert make(videos, URL, "--staging", str(tmp_path), "--part", part) == 0
    assert there() == expected
    assert not list(tmp_path.rglob("*.tar"))


def test_a_real_server(few, s3_server, monkeypatch, tmp_path):
    for name, value in object_store.environment(s3_server.url).items():
        monkeypatch.setenv(name, value)
    object_store.request(s3_server.url, "PUT", "/made")
    for output in (tmp_path / "data", "s3://made/data"):
        assert make(few, output, "--samples-per-shard", "9") == 0
    made = storage.ObjectStore("s3://made/data")
    assert {name: made.read(name) for name in made.sizes()} == hashes(tmp_path / "data")
    with pytest.raises(InputError, match=r"^s3://absent/data cannot be listed: "):
        make(few, "s3://absent/data")
