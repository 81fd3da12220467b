"""A dataset in a store has the bytes of one in a folder, whatever comes between."""

from pathlib import Path
from typing import ClassVar

import fsspec
import object_store
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from shard_making import hashes, run_here

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.reading import storage
from pipeline.shards.dataset import ShardDataset
from shard_tools import make_shards

URL = "leaky://bucket/data"
COPY = ["--encode", "copy", "--samples-per-shard", "2", "--max-rejects", "1", "--workers", "1"]


class Leaky(MemoryFileSystem):
    """A store of its own; `refused` ends the names of what it does not take, `cut` of what it keeps a half of."""

    protocol = "leaky"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    order: ClassVar[list[str]] = []
    refused: ClassVar[str | None] = None
    cut: ClassVar[str | None] = None

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("leaky://").strip("/")

    def pipe_file(self, path, value, mode="overwrite", **options):
        self._refuse(path)
        super().pipe_file(path, value, **options)

    def put_file(self, lpath, rpath, *others, **options):
        self._refuse(rpath)
        super().put_file(lpath, rpath, *others, **options)
        Leaky.order.append(rpath.rsplit("/", 1)[1])
        if Leaky.cut and rpath.endswith(Leaky.cut):
            content = self.cat_file(rpath)
            super().pipe_file(rpath, content[: len(content) // 2])

    def _refuse(self, path: str) -> None:
        if Leaky.refused is not None and path.endswith(Leaky.refused):
            raise PermissionError(path)


@pytest.fixture(autouse=True)
def store_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Leaky]:
    fsspec.register_implementation("leaky", Leaky, clobber=True)
    monkeypatch.setattr(Leaky, "store", {})
    monkeypatch.setattr(Leaky, "order", [])
    monkeypatch.setattr(Leaky, "refused", None)
    monkeypatch.setattr(Leaky, "cut", None)
    monkeypatch.setattr("shard_tools.output.user_cache_dir", lambda *_: tmp_path / "cache")
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)
    return Leaky


def make(inputs: Path | str, output: Path | str, *options: str) -> int:
    return make_shards.main([str(inputs), str(output), *COPY, *options])


def there(url: str = URL) -> dict[str, bytes]:
    """Every file under a URL of the store."""
    root = Leaky._strip_protocol(url) + "/"
    return {name.removeprefix(root): file.getvalue() for name, file in Leaky.store.items() if name.startswith(root)}


@pytest.fixture(scope="module")
def few(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the videos."""
    folder = tmp_path_factory.mktemp("few")
    for video in sorted(videos.glob("*/*.mp4"))[::2]:
        (folder / video.parent.name).mkdir(exist_ok=True)
        (folder / video.parent.name / video.name).hardlink_to(video)
    return folder


@pytest.fixture(scope="module")
def expected(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a folder holds that the videos are made into."""
    folder = tmp_path_factory.mktemp("expected") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_shards.ENGINES, "processes", run_here)
        assert make(videos, folder) == 0
    return hashes(folder)


def test_a_dataset_in_a_store_is_one_of_a_folder(videos, expected, tmp_path, capsys):
    assert make(videos, URL) == 0
    assert there() == expected
    assert Leaky.order[-1] == "dataset.json"
    assert URL in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob("*data*"))  # nothing of it stays on this machine
    config = DataConfig(shards=URL, cache_dir=str(tmp_path / "read"))
    assert len(ShardDataset.open(config).samples) == 9
    assert make(videos, URL) == 0  # there is nothing to add
    assert there() == expected


def test_videos_are_added_without_a_look_at_the_tars(few, videos, tmp_path, monkeypatch):
    for output in (tmp_path / "data", URL):
        assert make(few, output) == 0
        with monkeypatch.context() as patch:
            patch.setattr(storage.ObjectStore, "download", refusing_tars(storage.ObjectStore.download))
            assert make(videos, output) == 0
    assert there() == hashes(tmp_path / "data")


def refusing_tars(download):
    def refusing(self, name, file):
        assert not name.endswith(".tar")
        download(self, name, file)

    return refusing


@pytest.mark.parametrize(
    ("number", "moment"), [(2, "before"), (2, "after"), (14, "after"), (20, "before"), (20, "after")]
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


@pytest.mark.parametrize("name", ["shard-000001.tar", "shard-000000.idx", "dataset.json"])
def test_what_the_store_refuses_is_said_and_made_good(videos, expected, name):
    Leaky.refused = name
    with pytest.raises(InputError, match=rf"^{URL}/{name} cannot be written to: no permission; run the same command"):
        make(videos, URL)
    assert "dataset.json" not in there()
    Leaky.refused = None
    assert make(videos, URL) == 0
    assert there() == expected


def test_half_a_shard_is_found_and_made_good(videos, expected):
    Leaky.cut = "shard-000001.tar"
    with pytest.raises(InputError, match=r"shard-000001.tar has \d+ bytes after uploading \d+"):
        make(videos, URL)
    Leaky.cut = None
    assert make(videos, URL) == 0
    assert there() == expected


def test_a_store_that_takes_nothing_is_found_before_a_video_is_read(videos, monkeypatch):
    monkeypatch.setitem(make_shards.ENGINES, "processes", lambda *_: pytest.fail("began"))
    Leaky.refused = ""
    with pytest.raises(InputError, match=rf"^{URL}/.writable cannot be written to: no permission$"):
        make(videos, URL)


def test_a_shard_that_is_gone_from_the_store_is_said(few, videos):
    assert make(few, URL) == 0
    del Leaky.store["/bucket/data/shard-000000.tar"]
    with pytest.raises(InputError, match=rf"^{URL}/shard-000000.tar is missing or incomplete"):
        make(videos, URL)


def test_parts_share_a_staging_folder(videos, expected, tmp_path):
    for part in ("1/2", "2/2"):
        assert make(videos, URL, "--staging", str(tmp_path), "--part", part) == 0
    assert there() == expected
    assert not list(tmp_path.rglob("*.tar"))


def test_every_split_has_a_url(few, videos, tmp_path):
    splits = ["--split", f"train={videos}", "--split", f"test={few}"]
    for output in (tmp_path / "data", URL):
        assert make(videos, output, *splits) == 0
    assert there() == hashes(tmp_path / "data")


def test_folders_are_urls_too(videos, expected, tmp_path):
    assert make(videos, f"file://{tmp_path}/data") == 0
    assert hashes(tmp_path / "data") == expected


def test_a_real_server(few, s3_server, monkeypatch, tmp_path):
    for name, value in object_store.environment(s3_server.url).items():
        monkeypatch.setenv(name, value)
    object_store.request(s3_server.url, "PUT", "/made")
    for output in (tmp_path / "data", "s3://made/data"):
        assert make(few, output, "--samples-per-shard", "9") == 0
    made = storage.ObjectStore("s3://made/data")
    assert {name: made.read(name) for name in made.names()} == hashes(tmp_path / "data")
    with pytest.raises(InputError, match=r"^s3://absent/data cannot be listed: "):
        make(few, "s3://absent/data")
