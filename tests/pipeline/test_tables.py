"""Opening shards: what their tables say, what is refused in one sentence, and what is a bad sample like any other."""

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loading import open_loader
from made_videos import encode, write_shards

from adamae.common.atomic_io import hash_file
from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.shards import read_format
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import SAMPLE
from adamae.pipeline.shards.read_format import read_dataset_info, read_samples
from adamae.pipeline.video_error import VideoError

TABLE = {"file": "t.npy", "num_rows": 12, "num_bytes": 12, "sha256": 64 * "0"}
TABLES = dict.fromkeys(("shards", "samples", "gops", "names"), TABLE)


@pytest.fixture
def copied(short_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(short_shards, tmp_path / "copied"))


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ("", "no dataset.json in {0}: there is no such folder"),
        (
            "a.mp4",
            "no dataset.json in {0}: create shards with `python shard_tools/make_shards.py {0} SHARDS`",
        ),
        (
            "train/dataset.json validation/dataset.json",
            "no dataset.json in {0}: give {0}/train or {0}/validation",
        ),
        (".work/plan.jsonl", "was interrupted there: run the same command again"),
        ("train/.work/plan.jsonl", "was interrupted there: run the same command again"),
    ],
)
def test_a_folder_that_is_no_dataset_is_one_sentence_on_what_to_do(
    tmp_path: Path, there: str, says: str
) -> None:
    folder = tmp_path / "mine"
    for file in there.split():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    with pytest.raises(InputError) as raised:
        ShardDataset.open(folder)
    assert says.format(folder) in str(raised.value)


def test_tables_say_what_lines_and_tars_say(short: ShardDataset, short_shards: Path) -> None:
    assert SAMPLE.itemsize == 92, "as documented"
    info = read_dataset_info(short_shards)
    expected = [sample for shard in info.shards for sample in read_samples(short_shards, shard)]
    for number, (found, sample) in enumerate(zip(short.samples, expected, strict=True)):
        for name in (
            "key",
            "source",
            "labels",
            "num_frames",
            "fps",
            "width",
            "sha256",
            "offset",
            "size",
            "codec",
        ):
            assert getattr(found, name) == getattr(sample, name)
        with tarfile.open(short.shards[int(short.shard_of(number))]) as tar:
            member = tar.extractfile(f"{sample.key}.mp4")
            assert member is not None
            assert short.read_video(number) == member.read()
    assert [sample.key for sample in short.samples] == [f"v{i:02d}" for i in range(12)]
    assert short.describe_location(5).endswith(f"shard-000001.tar:{short.samples[5].offset}:v05")
    assert short.column("label").tolist() == [sample.label for sample in expected]
    assert (short.info.codecs, short.info.frame_strides, short.info.num_unlabeled) == (
        info.codecs,
        [1],
        0,
    )


def test_the_digest_changes_with_any_of_several_labels(tmp_path: Path) -> None:
    videos, digests = [("a", encode(4)), ("b", encode(5))], []
    for labels in ((0, 2), (1, 2), (0, 2)):
        folder = write_shards(
            tmp_path / str(len(digests)), videos, classes=3, labels=[(0, 1), labels]
        )
        digests.append(ShardDataset.open(folder).digest)
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"offset": 10**9}, "the bytes 1000000000 to"),
        ({"offset": 2**64 - 1}, "the bytes 18446744073709551615 to"),
        ({"size": 0}, "the bytes"),
        ({"size": 2**63}, "the bytes"),
        ({"num_frames": 0}, "0 frames in"),
        ({"num_frames": 2**32 - 1}, "4294967295 frames in"),
        ({"fps": np.nan}, "nan frames per second"),
        ({"fps": np.inf}, "inf frames per second"),
        ({"fps": -1}, "-1.0 frames per second"),
        ({"label": 3}, "label 3, its line of names (2,), and there are 3 classes"),
        ({"label": 0}, "label 0, its line of names (2,)"),
        ({"label": -2}, "label -2, its line of names (2,)"),
        ({"width": 0}, "0x48 pixels"),
        ({"height": 65535}, "64x65535 pixels"),
        ({"frame_stride": 0}, "a frame stride of 0"),
        ({"codec": 9}, "a codec or a container"),
        ({"container": 255}, "a codec or a container"),
        ({"first_gop": 2**63, "num_gops": 3}, "its rows of the group table are broken"),
        ({"sha256": np.void(bytes(32))}, "sha256 differs"),
    ],
)
def test_a_broken_row_is_a_bad_sample(
    copied: Path, tmp_path: Path, values: dict[str, Any], says: str
) -> None:
    """In a table whose hash is right all the same: of large ones, it is not compared. Three epochs are loaded."""
    described, quarantine = (
        json.loads((copied / "dataset.json").read_text()),
        tmp_path / "quarantine.jsonl",
    )
    path = copied / described["tables"]["samples"]["file"]
    rows = np.load(path)
    for name, value in values.items():
        rows[name][5] = value
    np.save(path, rows)
    described["tables"]["samples"]["sha256"] = hash_file(path)
    (copied / "dataset.json").write_text(json.dumps(described))
    config, shape = (
        DataConfig(frame_stride=1, num_workers=1, max_bad_fraction=0.9),
        {"num_frames": 4, "image_size": 16},
    )
    with open_loader(ShardDataset.open(copied), config, quarantine, **shape) as (_, loader):
        for batch in islice(loader.batches(0), 9):
            assert batch.clip.shape == (4, 4, 16, 16, 3)
            assert all(0 <= label < 3 for label in batch.labels.tolist())
    (line,) = quarantine.read_text().splitlines()
    assert json.loads(line)["key"] == "v05"
    assert says in json.loads(line)["reason"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offset", -1),
        ("offset", 10**30),
        ("num_frames", 0),
        ("num_frames", "20"),
        ("num_frames", 20.5),
        ("fps", float("nan")),
        ("labels", [-3]),
        ("labels", [True]),
        ("labels", 3),
        ("width", 0),
        ("codec", "\0"),
        ("container", "../../etc"),
        ("sha256", 64 * "A"),
        ("key", 5),
    ],
)
def test_broken_lines_are_one_sentence(copied: Path, name: str, value: object) -> None:
    path = copied / "shard-000001.samples.jsonl"
    first, *others = path.read_text().splitlines()
    for line in (json.dumps({**json.loads(first), name: value}), "{", "null", 5000 * "["):
        path.write_text("\n".join([line, *others]))
        with pytest.raises(InputError, match="cannot be read") as raised:
            list(read_samples(copied, read_dataset_info(copied).shards[1]))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "damage", [lambda data: data.replace(b'"v05"', b'"v05\xff'), lambda data: bytes(len(data))]
)
def test_a_name_that_cannot_be_read_is_a_bad_sample(
    copied: Path, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_format, "HASHED_BYTES", 0)
    (path,) = copied.glob("names-*")
    path.write_bytes(damage(path.read_bytes()))
    sample = ShardDataset.open(copied).samples[5]
    assert (sample.key, sample.problem) == (
        "sample-5",
        "its line of the table of names cannot be read",
    )


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((1, 0), r"has changed since it was written.*--rewrite-tables"),
        ((), "No such file|0 bytes and should have"),
    ],
)
def test_names_of_others_are_refused_with_the_first_sample(
    copied: Path, lines: tuple[int, ...], says: str
) -> None:
    (path,) = copied.glob("names-*")
    found = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([found[line] for line in lines] + (found[2:] if lines else [])))
    dataset = ShardDataset.open(copied)
    with pytest.raises(InputError, match=says):
        _ = dataset.samples[0]


@pytest.mark.parametrize(
    "change",
    [
        {"num_samples": -1},
        {"num_samples": 11},
        {"num_samples": "12"},
        {"classes": "abc"},
        {"classes": [1]},
        {"codecs": {"h264": 3}},
        {"codecs": {}},
        {"containers": []},
        {"frame_strides": []},
        {"frame_strides": [0]},
        {"tables": {}},
        {"tables": {"samples": {}}},
        {"tables": {**TABLES, "names": {**TABLE, "file": "../passwd"}}},
        {"labels": [1]},
        {"more": 1},
        {"encode": []},
        {"num_bytes": 10**40},
        {"schema_version": 1},
        {"schema_version": None},
        b"",
        b"{",
        b"null",
        b"\xff",
        b"[]",
        10000 * b"[",
    ],
)
def test_a_broken_description_is_one_sentence(copied: Path, change: dict[str, Any] | bytes) -> None:
    path = copied / "dataset.json"
    path.write_bytes(
        change
        if isinstance(change, bytes)
        else json.dumps({**json.loads(path.read_text()), **change}).encode()
    )
    with pytest.raises(InputError) as raised:
        ShardDataset.open(copied)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["shards", "samples"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: None,
        lambda data: bytes(len(data)),
        lambda data: data.replace(b"}", b"(", 1),
        lambda data: data.replace(b"<u4", b"<i4").replace(b"<u8", b"<i8"),
    ],
    ids=["cut", "gone", "no table", "of an open header", "of another dtype"],
)
def test_a_table_that_is_not_the_one_is_one_sentence(
    copied: Path,
    name: str,
    damage: Callable[[bytes], bytes | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_format, "HASHED_BYTES", 0)
    (path,) = copied.glob(f"{name}-*.npy")
    damaged = damage(path.read_bytes())
    path.unlink() if damaged is None else path.write_bytes(damaged)
    with pytest.raises(InputError, match="cannot be used") as raised:
        ShardDataset.open(copied)
    assert "\n" not in str(raised.value)


def test_a_mix_is_one_list(copied: Path, tmp_path: Path) -> None:
    other = write_shards(tmp_path / "other", [("w0", encode(6)), ("w1", encode(7))], classes=2)
    mix = ShardDataset.open([copied, other])
    assert [sample.key for sample in mix.samples] == [f"v{i:02d}" for i in range(12)] + ["w0", "w1"]
    assert mix.shard_of(range(14)).tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2
    assert [mix.shard_of(i) for i in (0, 11, 13)] == [0, 2, 3]
    assert mix.shards[3] == f"{other}/shard-000000.tar"
    assert [shard.num_samples for shard in mix.info.shards] == [4, 4, 4, 2]
    assert mix.samples[-1].num_frames == 7
    assert mix.column("num_frames").tolist() == [20] * 12 + [6, 7]
    assert mix.digest != ShardDataset.open([other, copied]).digest
    with pytest.raises(IndexError):
        mix.samples[14]


def test_a_mix_has_one_list_of_classes(tmp_path: Path) -> None:
    for name, classes, last in (("a", ["jump", "run"], (1,)), ("b", ["fall", "jump"], (0, 1))):
        videos = [(f"{name}{i}", encode(4)) for i in range(2)]
        folder = write_shards(tmp_path / name, videos, classes=2, labels=[(0,), last])
        description = json.loads((folder / "dataset.json").read_text())
        (folder / "dataset.json").write_text(json.dumps({**description, "classes": classes}))
    mix = ShardDataset.open([tmp_path / "a", tmp_path / "b"])
    assert mix.info.classes == ["fall", "jump", "run"]
    names = [[mix.info.classes[label] for label in sample.labels or ()] for sample in mix.samples]
    assert names == [["jump"], ["run"], ["fall"], ["fall", "jump"]]
    assert mix.column("label").tolist() == [1, 2, 0, -2]
    assert mix.info.multi_label
    assert mix.info.num_samples == 4
    assert ShardDataset.open(tmp_path / "b").info.classes == ["fall", "jump"]


def test_no_folder_and_no_videos_are_refused(copied: Path) -> None:
    said = json.loads((copied / "dataset.json").read_bytes())
    (copied / "dataset.json").write_text(json.dumps({**said, "num_samples": 0}))
    for shards, says in (
        ("", "names no folder"),
        ([copied], r"copied holds no video: see its rejected\.jsonl"),
    ):
        with pytest.raises(InputError, match=says):
            ShardDataset.open(shards)


def test_a_short_shard_costs_the_videos_that_are_cut_off(copied: Path) -> None:
    dataset = ShardDataset.open(copied)
    os.truncate(dataset.shards[0], dataset.samples[2].offset + 100)
    dataset.read_video(0)
    with pytest.raises(VideoError, match="the shard ends after 100 of"):
        dataset.read_video(2)


def test_labels_segments_and_fields_come_back(tmp_path: Path) -> None:
    about = {
        "labels": [(2, 0), (), None],
        "segment": ["t=1.5,4", "", "frames=0,9;2"],
        "start": [1.5, 0.0, 0.0],
        "fields": [{"caption": "a \udc80 dög", "n": [1]}, {}, {}],
    }
    videos = [(f"v{i}", encode(4)) for i in range(3)]
    dataset = ShardDataset.open(write_shards(tmp_path / "data", videos, classes=3, **about))
    assert dataset.info.multi_label
    assert dataset.info.num_unlabeled == 1
    assert dataset.column("label").tolist() == [-2, -2, -1]
    assert {name: [getattr(sample, name) for sample in dataset.samples] for name in about} == about
