"""Opening shards: the content of tables, what is refused in one sentence, and bad samples."""

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
from adamae.pipeline.shards.format import SAMPLE, Sample
from adamae.pipeline.shards.read_format import read_dataset_info, read_samples
from adamae.pipeline.video_error import VideoError

TABLE = {"file": "t.npy", "num_rows": 12, "num_bytes": 12, "sha256": 64 * "0"}
TABLES = dict.fromkeys(("shards", "samples", "gops", "names"), TABLE)


@pytest.fixture
def copied(short_shards: Path, tmp_path: Path) -> Path:
    """The short dataset in a folder in which a test may damage it."""
    return Path(shutil.copytree(short_shards, tmp_path / "copied"))


def change_description(folder: Path, **changes: object) -> None:
    """Change fields of dataset.json."""
    path = folder / "dataset.json"
    description = json.loads(path.read_bytes())
    path.write_text(json.dumps({**description, **changes}))


NO_DATASET = "no dataset.json in {0}: "


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], NO_DATASET + "there is no such folder"),
        (
            ["a.mp4"],
            NO_DATASET + "create shards with `python shard_tools/make_shards.py {0} SHARDS`",
        ),
        (
            ["train/dataset.json", "validation/dataset.json"],
            NO_DATASET + "give {0}/train or {0}/validation",
        ),
        ([".work/plan.jsonl"], "was interrupted there: run the same command again"),
        (["train/.work/plan.jsonl"], "was interrupted there: run the same command again"),
    ],
)
def test_a_folder_that_is_no_dataset_is_one_sentence_on_what_to_do(
    tmp_path: Path, files: list[str], says: str
) -> None:
    folder = tmp_path / "mine"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    with pytest.raises(InputError) as raised:
        ShardDataset.open(folder)
    assert says.format(folder) in str(raised.value)


def list_lines(folder: Path) -> list[Sample]:
    """Return the samples of all shards from their .samples.jsonl."""
    samples: list[Sample] = []
    for shard in read_dataset_info(folder).shards:
        samples += read_samples(folder, shard)
    return samples


@pytest.mark.parametrize(
    "name",
    [
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
    ],
)
def test_tables_say_what_lines_say(short: ShardDataset, short_shards: Path, name: str) -> None:
    values = [getattr(sample, name) for sample in short.samples]
    assert values == [getattr(line, name) for line in list_lines(short_shards)]


def test_tables_say_where_videos_lie_in_tars(short: ShardDataset) -> None:
    for number, sample in enumerate(short.samples):
        with tarfile.open(short.shards[int(short.shard_of(number))]) as tar:
            member = tar.extractfile(f"{sample.key}.mp4")
            assert member is not None
            assert short.read_video(number) == member.read()


def test_tables_are_as_documented(short: ShardDataset, short_shards: Path) -> None:
    assert SAMPLE.itemsize == 92
    assert [sample.key for sample in short.samples] == [f"v{i:02d}" for i in range(12)]
    assert short.describe_location(5).endswith(f"shard-000001.tar:{short.samples[5].offset}:v05")
    labels = [line.label for line in list_lines(short_shards)]
    assert short.column("label").tolist() == labels
    assert short.info.codecs == read_dataset_info(short_shards).codecs
    assert short.info.frame_strides == [1]
    assert short.info.num_unlabeled == 0


def test_the_digest_changes_with_any_of_several_labels(tmp_path: Path) -> None:
    videos = [("a", encode(4)), ("b", encode(5))]

    def digest(name: str, labels: tuple[int, ...]) -> str:
        folder = write_shards(tmp_path / name, videos, classes=3, labels=[(0, 1), labels])
        return ShardDataset.open(folder).digest

    first = digest("first", (0, 2))
    assert digest("changed", (1, 2)) != first
    assert digest("same", (0, 2)) == first


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
    """The table's hash is made right, as those of large tables are not compared."""
    tables = json.loads((copied / "dataset.json").read_text())["tables"]
    path = copied / tables["samples"]["file"]
    rows = np.load(path)
    for name, value in values.items():
        rows[name][5] = value
    np.save(path, rows)
    tables["samples"]["sha256"] = hash_file(path)
    change_description(copied, tables=tables)
    config = DataConfig(frame_stride=1, num_workers=1, max_bad_fraction=0.9)
    dataset = ShardDataset.open(copied)
    quarantine = tmp_path / "quarantine.jsonl"
    loader = open_loader(dataset, config, quarantine, num_frames=4, image_size=16)
    with loader as (_, clips):
        # Three epochs.
        for batch in islice(clips.batches(0), 9):
            assert batch.clip.shape == (4, 4, 16, 16, 3)
            assert all(0 <= label < 3 for label in batch.labels.tolist())
    (line,) = quarantine.read_text().splitlines()
    bad_sample = json.loads(line)
    assert bad_sample["key"] == "v05"
    assert says in bad_sample["reason"]


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
    first, *rest = path.read_text().splitlines()
    shard = read_dataset_info(copied).shards[1]
    changed = json.dumps({**json.loads(first), name: value})
    for line in (changed, "{", "null", 5000 * "["):
        path.write_text("\n".join([line, *rest]))
        with pytest.raises(InputError, match="cannot be read") as raised:
            list(read_samples(copied, shard))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "damage",
    [lambda data: data.replace(b'"v05"', b'"v05\xff'), lambda data: bytes(len(data))],
    ids=["not UTF-8", "zeros"],
)
def test_a_name_that_cannot_be_read_is_a_bad_sample(
    copied: Path, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_format, "HASHED_BYTES", 0)
    (path,) = copied.glob("names-*")
    path.write_bytes(damage(path.read_bytes()))
    sample = ShardDataset.open(copied).samples[5]
    assert sample.key == "sample-5"
    assert sample.problem == "its line of the table of names cannot be read"


def swap_first_lines(data: bytes) -> bytes:
    first, second, *rest = data.splitlines(keepends=True)
    return b"".join([second, first, *rest])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swap_first_lines, r"has changed since it was written.*--rewrite-tables"),
        (lambda data: b"", "No such file|0 bytes and should have"),
    ],
    ids=["swapped", "empty"],
)
def test_names_of_others_are_refused_with_the_first_sample(
    copied: Path, change: Callable[[bytes], bytes], says: str
) -> None:
    (path,) = copied.glob("names-*")
    path.write_bytes(change(path.read_bytes()))
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
    ],
)
def test_a_broken_description_is_one_sentence(copied: Path, change: dict[str, Any]) -> None:
    change_description(copied, **change)
    with pytest.raises(InputError) as raised:
        ShardDataset.open(copied)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\xff", b"[]", 10000 * b"["])
def test_a_description_that_is_no_object_is_one_sentence(copied: Path, content: bytes) -> None:
    (copied / "dataset.json").write_bytes(content)
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
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    with pytest.raises(InputError, match="cannot be used") as raised:
        ShardDataset.open(copied)
    assert "\n" not in str(raised.value)


def test_a_mix_is_one_list(copied: Path, tmp_path: Path) -> None:
    videos = [("w0", encode(6)), ("w1", encode(7))]
    added = write_shards(tmp_path / "added", videos, classes=2)
    mix = ShardDataset.open([copied, added])
    assert [sample.key for sample in mix.samples] == [f"v{i:02d}" for i in range(12)] + ["w0", "w1"]
    assert mix.shard_of(range(14)).tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2
    assert [mix.shard_of(sample) for sample in (0, 11, 13)] == [0, 2, 3]
    assert mix.shards[3] == f"{added}/shard-000000.tar"
    assert [shard.num_samples for shard in mix.info.shards] == [4, 4, 4, 2]
    assert mix.samples[-1].num_frames == 7
    assert mix.column("num_frames").tolist() == [20] * 12 + [6, 7]
    assert mix.digest != ShardDataset.open([added, copied]).digest
    with pytest.raises(IndexError):
        mix.samples[14]


def test_a_mix_has_one_list_of_classes(tmp_path: Path) -> None:
    def write(name: str, classes: list[str], labels: list[tuple[int, ...]]) -> Path:
        videos = [(f"{name}{i}", encode(4)) for i in range(2)]
        folder = write_shards(tmp_path / name, videos, classes=2, labels=labels)
        change_description(folder, classes=classes)
        return folder

    first = write("a", ["jump", "run"], [(0,), (1,)])
    second = write("b", ["fall", "jump"], [(0,), (0, 1)])
    mix = ShardDataset.open([first, second])
    assert mix.info.classes == ["fall", "jump", "run"]
    names = [[mix.info.classes[label] for label in sample.labels or ()] for sample in mix.samples]
    assert names == [["jump"], ["run"], ["fall"], ["fall", "jump"]]
    assert mix.column("label").tolist() == [1, 2, 0, -2]
    assert mix.info.multi_label
    assert mix.info.num_samples == 4
    assert ShardDataset.open(second).info.classes == ["fall", "jump"]


def test_no_folder_and_no_videos_are_refused(copied: Path) -> None:
    with pytest.raises(InputError, match="names no folder"):
        ShardDataset.open("")
    change_description(copied, num_samples=0)
    with pytest.raises(InputError, match=r"copied holds no video: see its rejected\.jsonl"):
        ShardDataset.open([copied])


def test_a_short_shard_costs_the_videos_that_are_cut_off(copied: Path) -> None:
    dataset = ShardDataset.open(copied)
    os.truncate(dataset.shards[0], dataset.samples[2].offset + 100)
    dataset.read_video(0)
    with pytest.raises(VideoError, match="the shard ends after 100 of"):
        dataset.read_video(2)


def test_labels_segments_and_fields_come_back(tmp_path: Path) -> None:
    columns = {
        "labels": [(2, 0), (), None],
        "segment": ["t=1.5,4", "", "frames=0,9;2"],
        "start": [1.5, 0.0, 0.0],
        "fields": [{"caption": "a \udc80 dög", "n": [1]}, {}, {}],
    }
    videos = [(f"v{i}", encode(4)) for i in range(3)]
    dataset = ShardDataset.open(write_shards(tmp_path / "data", videos, classes=3, **columns))
    assert dataset.info.multi_label
    assert dataset.info.num_unlabeled == 1
    assert dataset.column("label").tolist() == [-2, -2, -1]
    for name, values in columns.items():
        assert [getattr(sample, name) for sample in dataset.samples] == values
