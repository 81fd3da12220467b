"""What is read of a dataset in object storage: which files, in how many requests at a time."""

import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from adamae.common.errors import InputError
from adamae.common.jsonl import append_line
from adamae.pipeline.config import DataConfig
from adamae.pipeline.reading import storage
from adamae.pipeline.reading.cache import TABLE_REQUESTS, ShardCache
from adamae.pipeline.reading.storage import ObjectStore
from adamae.pipeline.shards.dataset import ShardDataset


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files of each request, in order."""
    names: list[str] = []
    read = ObjectStore.read
    read_range = ObjectStore.read_range

    def count_read(store: ObjectStore, name: str) -> bytes | None:
        names.append(name)
        return read(store, name)

    def count_range(store: ObjectStore, name: str, start: int, end: int) -> bytes:
        names.append(name)
        return read_range(store, name, start, end)

    monkeypatch.setattr(ObjectStore, "read", count_read)
    monkeypatch.setattr(ObjectStore, "read_range", count_range)
    return names


@pytest.fixture
def config(short_shards: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(f"file://{short_shards}", cache_dir=str(tmp_path / "cache"))


def test_a_sample_costs_the_list_of_its_shard_once(
    config: DataConfig, requests: list[str], short: ShardDataset
) -> None:
    dataset = ShardDataset.open(config)
    assert requests == ["dataset.json", short.info.tables["shards"].file]
    requests.clear()
    for index in (4, 5, 7):
        sample = dataset.samples[index]
        assert (sample.key, sample.label) == (short.samples[index].key, short.samples[index].label)
    assert requests == ["shard-000001.samples.jsonl"]
    # A decode worker of this process asks for nothing at all.
    assert pickle.loads(pickle.dumps(dataset)).samples[6].key == short.samples[6].key
    assert requests == ["shard-000001.samples.jsonl"]


def test_groups_of_pictures_come_with_the_list(vp9: ShardDataset, tmp_path: Path) -> None:
    config = DataConfig(f"file://{vp9.folder}", cache_dir=str(tmp_path))
    part = ShardDataset.open(config).read_clip(3, (9, 10))
    assert part.in_groups
    assert part == vp9.read_clip(3, (9, 10))
    assert not list(tmp_path.glob("*/gops-*.npy"))


def test_the_first_rows_of_a_column_are_a_range(
    config: DataConfig, requests: list[str], short: ShardDataset
) -> None:
    dataset = ShardDataset.open(config)
    requests.clear()
    assert np.array_equal(dataset.column("num_frames", 5), short.column("num_frames", 5))
    assert np.array_equal(dataset.column("fps", 5), short.column("fps", 5))
    assert requests == [short.info.tables["samples"].file]
    assert not list(Path(config.cache_dir).glob("*/samples-*.npy"))


def test_a_damaged_list_is_read_again(config: DataConfig, requests: list[str]) -> None:
    key = ShardDataset.open(config).samples[5].key
    (copy,) = Path(config.cache_dir).glob("*/shard-000001.samples-*.jsonl")
    copy.write_bytes(copy.read_bytes().replace(b"v0", b"w0"))
    requests.clear()
    assert ShardDataset.open(config).samples[5].key == key
    assert requests == ["dataset.json", "shard-000001.samples.jsonl"]


def test_a_table_is_read_in_eight_requests_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(160)
    (tmp_path / "table").write_bytes(content)
    monkeypatch.setattr(storage, "BLOCK", 10)
    all_are_asked = threading.Barrier(8, timeout=30)
    read_range = ObjectStore.read_range

    def wait_and_read(store: ObjectStore, name: str, start: int, end: int) -> bytes:
        all_are_asked.wait()
        return read_range(store, name, start, end)

    monkeypatch.setattr(ObjectStore, "read_range", wait_and_read)
    store = ObjectStore(f"file://{tmp_path}")
    store.append_range("table", tmp_path / "copy", len(content), TABLE_REQUESTS)
    assert (tmp_path / "copy").read_bytes() == content


def test_tables_count_towards_the_cache(
    config: DataConfig, short: ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = short.info.shards[0]
    table = short.info.tables["samples"]
    cache = ShardCache(Path(config.cache_dir), (shard.num_bytes + 100) / 2**30)
    assert cache.fetch(f"{config.shards}/{shard.name}", shard.sha256, shard.num_bytes)
    # The shard makes room.
    arguments = (f"{config.shards}/{table.file}", table.sha256, table.num_bytes)
    assert cache.fetch_table(*arguments).exists()
    assert not list(Path(config.cache_dir).glob("*/*.tar"))
    small = ShardCache(Path(config.cache_dir) / "small", (table.num_bytes - 1) / 2**30)
    with pytest.raises(InputError, match=r"finds no room in .*: raise data.cache_gib"):
        small.fetch_table(*arguments)


def test_ranks_of_a_node_read_the_description_once(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    read = ObjectStore.read
    url = f"{config.shards}/dataset.json"
    content = (Path(str(config.shards).removeprefix("file://")) / "dataset.json").read_bytes()

    def read_and_log(store: ObjectStore, name: str) -> bytes | None:
        append_line(log, f"{name}\n")
        return read(store, name)

    def read_description() -> None:
        assert ShardCache(tmp_path / "cache").read_description(url) == content

    monkeypatch.setattr(ObjectStore, "read", read_and_log)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=read_description) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert log.read_text().split() == ["dataset.json"]
    # An earlier job's copy.
    (copy,) = (tmp_path / "cache/descriptions").glob("[!.]*")
    os.utime(copy, (0, 0))
    read_description()
    assert log.read_text().split() == ["dataset.json"] * 2
