"""Opening shards, here and in an object store, and what is said when they are not what they should be."""

import json
import os
import shutil
import tarfile
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch
from listed import Listed
from made_videos import as_version_1, encode, write_shards

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding.video_error import VideoError
from pipeline.loader import ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.reading.cache import ShardCache
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset


@pytest.fixture
def bucket(short_shards: Path) -> str:
    """The short dataset in fsspec's in-memory object store."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.put(f"{short_shards}/", "memory://bucket/data", recursive=True)
    return "memory://bucket/data"


def test_samples_come_in_tar_order(short: ShardDataset) -> None:
    assert [sample.key for sample in short.samples] == [f"v{i:02d}" for i in range(12)]
    assert short.shard_of.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert short.where(5).endswith(f"shard-000001.tar:{short.samples[5].offset}:v05")
    reader = Reader(short)
    for index in range(12):
        with tarfile.open(short.shard_path(index)) as tar:
            member = tar.extractfile(f"v{index:02d}.mp4")
            assert member is not None
            assert reader.read(index) == member.read()


def test_a_mix_has_one_list_of_classes(tmp_path: Path) -> None:
    for name, classes in (("a", ["jump", "run"]), ("b", ["fall", "jump"])):
        folder = write_shards(tmp_path / name, [(f"{name}{i}", encode(4)) for i in range(2)], classes=2)
        description = json.loads((folder / "dataset.json").read_text())
        (folder / "dataset.json").write_text(json.dumps({**description, "classes": classes}))
    mix = ShardDataset.open([tmp_path / "a", tmp_path / "b"])
    assert mix.info.classes == ["fall", "jump", "run"]
    assert [mix.info.classes[sample.label or 0] for sample in mix.samples] == ["jump", "run", "fall", "jump"]
    assert mix.part_of.tolist() == [0, 1]
    assert mix.info.num_samples == 4
    assert ShardDataset.open(tmp_path / "b").info.classes == ["fall", "jump"]


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, short_shards: Path) -> None:
    with pytest.raises(InputError, match="names no folder"):
        ShardDataset.open("")
    with pytest.raises(InputError, match=r"holds no dataset\.json"):
        ShardDataset.open(tmp_path)
    folder = tmp_path / "copy"
    as_version_1(shutil.copytree(short_shards, folder))
    table = folder / "shard-000001.samples.jsonl"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match="lists 3 samples where"):
        ShardDataset.open(folder)
    table.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        ShardDataset.open(folder)


def test_missing_and_short_shards(tmp_path: Path, short_shards: Path) -> None:
    shutil.copytree(short_shards, tmp_path / "copy")
    dataset = ShardDataset.open(tmp_path / "copy")
    os.truncate(dataset.shard_path(0), dataset.samples[2].offset + 100)
    os.unlink(dataset.shard_path(4))
    reader = Reader(dataset)
    reader.read(0)
    with pytest.raises(VideoError, match="the shard ends after 100 of"):
        reader.read(2)
    with pytest.raises(InputError, match=r"shard-000001\.tar is missing"):
        reader.read(4)


def test_reading_from_many_threads(short: ShardDataset) -> None:
    """A shard's file must not be closed under a reader when another thread opens it at the same moment."""
    expected = [Reader(short).read(index) for index in range(12)]
    failures: list[BaseException] = []

    def read_all(reader: Reader) -> None:
        try:
            assert [reader.read(index) for index in range(12)] == expected
        except BaseException as error:
            failures.append(error)

    for _ in range(30):
        reader = Reader(short)
        threads = [threading.Thread(target=read_all, args=(reader,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_an_object_store_gives_the_same_clips(bucket: str, short: ShardDataset, tmp_path: Path) -> None:
    config = DataConfig(frame_stride=1, cache_dir=str(tmp_path))
    clips = []
    for dataset in (short, ShardDataset.open(bucket, ShardCache(tmp_path))):
        plan = TrainingPlan(dataset, config, num_frames=4, image_size=32, seed=0, batch_size=4)
        with ClipLoader(dataset, plan, torch.device("cpu"), config, None) as loader:
            clips.append(torch.stack([batch.clip for batch, _ in zip(loader.batches(0), range(4), strict=False)]))
    assert torch.equal(*clips)
    assert len(list(tmp_path.rglob("*.tar"))) == 3


def test_shards_are_downloaded_before_they_are_needed(bucket: str, tmp_path: Path) -> None:
    dataset = ShardDataset.open(bucket, ShardCache(tmp_path))
    reader = Reader(dataset, Listed([[5], [6, 9]]))
    reader.reach(0)
    deadline = time.monotonic() + 10
    while len(list(tmp_path.rglob("*.tar"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(path.name for path in tmp_path.rglob("*.tar")) == ["shard-000001.tar", "shard-000002.tar"]
    fsspec.filesystem("memory").store.clear()  # from here on only the copies are there
    assert len(reader.read(5)) == dataset.samples[5].size
    reader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shards-")]


def test_shards_that_were_uploaded_again_are_downloaded_again(bucket: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = Reader(ShardDataset.open(bucket, ShardCache(cache))).read(0)
    again = write_shards(tmp_path / "again", [("v00", encode(9))], per_shard=4)
    fsspec.filesystem("memory").put(f"{again}/", "memory://bucket/data", recursive=True)
    after = ShardDataset.open(DataConfig(bucket, cache_dir=str(cache)))
    assert Reader(after).read(0) == Reader(ShardDataset.open(again)).read(0) != before


def test_the_cache_keeps_to_its_size_and_drops_the_least_recently_used(bucket: str, tmp_path: Path) -> None:
    size = fsspec.filesystem("memory").size(f"{bucket}/shard-000000.tar")
    cache = ShardCache(tmp_path, max_gib=2.5 * size / 2**30)
    names = [f"{bucket}/shard-{number:06d}.tar" for number in range(3)]
    first = cache.fetch(names[0])
    os.utime(first, (1, 1))
    second = cache.fetch(names[1])
    os.utime(second, (2, 2))
    with open(first, "rb") as still_open:
        cache.fetch(names[0])  # used again: now the second is the oldest
        third = cache.fetch(names[2])
        assert first.exists()
        assert third.exists()
        assert not second.exists()
        assert len(still_open.read()) == size
    assert not list(tmp_path.rglob("*.partial"))


def test_a_store_that_fails_for_a_moment_is_asked_again(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, memory = [], type(fsspec.filesystem("memory"))
    real = memory.open

    def fails_twice(self: object, path: str, *arguments: object, **options: object) -> object:
        calls.append(path)
        if len(calls) <= 2:
            raise ConnectionError("connection reset")
        return real(self, path, *arguments, **options)

    monkeypatch.setattr(memory, "open", fails_twice)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert ShardCache(tmp_path).fetch(f"{bucket}/shard-000000.tar").stat().st_size > 0
    assert len(calls) == 3
    with pytest.raises(InputError, match="does not exist"):
        ShardCache(tmp_path).fetch(f"{bucket}/shard-000009.tar")
    with pytest.raises(InputError, match="cannot be read"):
        ShardCache(tmp_path).fetch("nosuchprotocol://bucket/file")
