"""Opening shards, here and in an object store, and what is said when they are not what they should be."""

import json
import os
import shutil
import tarfile
import threading
from pathlib import Path

import pytest
from made_videos import encode, write_shards

from common.errors import InputError
from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from pipeline.video_error import VideoError


def test_samples_come_in_tar_order(short: ShardDataset) -> None:
    assert [sample.key for sample in short.samples] == [f"v{i:02d}" for i in range(12)]
    assert short.shard_of[range(12)].tolist() == [0] * 4 + [1] * 4 + [2] * 4
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


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names no folder"):
        ShardDataset.open("")
    with pytest.raises(InputError, match=r"no dataset\.json"):
        ShardDataset.open(tmp_path)


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
