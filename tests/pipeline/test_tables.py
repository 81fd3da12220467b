"""The tables of a dataset: what they say, what of them is refused, and what of them is a bad sample like any other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_videos import as_version_1, encode, write_shards

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.loader import ClipLoader
from pipeline.planning.plan import TrainingPlan
from pipeline.shards import index
from pipeline.shards.dataset import ShardDataset
from pipeline.shards.format import SAMPLE, read_dataset_info, read_samples

CPU = torch.device("cpu")


@pytest.fixture
def copied(short_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(short_shards, tmp_path / "copied"))


def change_row(folder: Path, sample: int, **values: Any) -> None:
    (path,) = folder.glob("samples-*.npy")
    rows = np.load(path)
    for name, value in values.items():
        rows[name][sample] = value
    np.save(path, rows)


def change_line(folder: Path, sample: int, change: Callable[[str], str]) -> None:
    path = folder / f"shard-{sample // 4:06d}.samples.jsonl"
    lines = path.read_text().splitlines()
    lines[sample % 4] = change(lines[sample % 4])
    path.write_text("".join(line + "\n" for line in lines))


def train_on(dataset: ShardDataset, quarantine: Path) -> list[str]:
    """Three epochs; returns what is quarantined."""
    config = DataConfig(frame_stride=1, num_threads=1, max_bad_fraction=0.9)
    plan = TrainingPlan(dataset, config, num_frames=4, image_size=16, seed=0, batch_size=4)
    with ClipLoader(dataset, plan, CPU, config, quarantine) as loader:
        for batch, _ in zip(loader.batches(0), range(9), strict=False):
            assert batch.clip.shape == (4, 4, 16, 16, 3)
            assert all(0 <= label < 3 for label in batch.labels.tolist())
    return quarantine.read_text().splitlines()


def test_both_versions_say_the_same(copied: Path, short: ShardDataset, tmp_path: Path) -> None:
    info = read_dataset_info(copied)
    expected = [sample for shard in info.shards for sample in read_samples(copied, shard)]
    old = ShardDataset.open(as_version_1(Path(shutil.copytree(copied, tmp_path / "old"))))
    for dataset in (short, old):
        for found, sample in zip(dataset.samples, expected, strict=True):
            for name in ("key", "source", "label", "num_frames", "fps", "width", "sha256", "offset", "size", "codec"):
                assert getattr(found, name) == getattr(sample, name)
        assert dataset.column("label").tolist() == [sample.label for sample in expected]
        assert dataset.info.codecs == info.codecs
        assert dataset.info.frame_strides == [1]
        assert dataset.info.labels == (0, 2)
        assert not dataset.info.num_unlabelled


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"offset": 10**9}, "bytes from 1000000000 on"),
        ({"offset": 2**64 - 1}, "bytes from 18446744073709551615 on"),
        ({"size": 0}, "0 bytes from"),
        ({"size": 2**63}, "bytes from"),
        ({"num_frames": 0}, "0 frames in"),
        ({"num_frames": 2**32 - 1}, "4294967295 frames in"),
        ({"fps": np.nan}, "nan frames a second"),
        ({"fps": np.inf}, "inf frames a second"),
        ({"fps": -1}, "-1.0 frames a second"),
        ({"label": 3}, "label 3, and there are 3 classes"),
        ({"label": -2}, "label -2, and there are 3 classes"),
        ({"width": 0}, "0x48 pixels"),
        ({"height": 65535}, "64x65535 pixels"),
        ({"frame_stride": 0}, "every 0th frame"),
        ({"codec": 9}, "a codec or a container"),
        ({"container": 255}, "a codec or a container"),
        ({"shard": 7}, "shard 7 and stands among those of shard 1"),
        ({"first_gop": 2**63, "num_gops": 3}, "3 rows of the GOP table"),
        ({"sha256": np.void(bytes(32))}, "is not what shard-000001.samples.jsonl says"),
    ],
)
def test_a_broken_row_is_a_bad_sample(copied: Path, tmp_path: Path, values: dict[str, Any], says: str) -> None:
    change_row(copied, 5, **values)
    (line,) = train_on(ShardDataset.open(copied), tmp_path / "quarantine.jsonl")
    assert json.loads(line)["key"] == "v05"
    assert says in json.loads(line)["reason"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offset", -1), ("offset", 10**30), ("size", -5), ("num_frames", 0), ("num_frames", 10**12),
        ("num_frames", "20"), ("num_frames", 20.5), ("fps", float("nan")), ("fps", 0), ("label", 99), ("label", -3),
        ("label", True), ("width", 0), ("height", 10**7), ("frame_stride", -2), ("codec", "\0"), ("codec", None),
        ("container", "../../etc"), ("sha256", "zz"), ("sha256", 64 * "A"), ("key", 5), ("source", ["a"]),
    ],
)  # fmt: skip
def test_a_broken_line_of_version_1_is_a_bad_sample(copied: Path, tmp_path: Path, name: str, value: object) -> None:
    as_version_1(copied)
    change_line(copied, 5, lambda line: json.dumps({**json.loads(line), name: value}))
    lines = train_on(ShardDataset.open(copied), tmp_path / "quarantine.jsonl")
    assert len(lines) == 1
    assert "shard-000001.tar" in json.loads(lines[0])["where"]


@pytest.mark.parametrize("line", ["", "{", "[]", "null", "\x00", 5000 * "["])
def test_a_line_that_is_none_is_a_bad_sample(copied: Path, tmp_path: Path, line: str) -> None:
    as_version_1(copied)
    change_line(copied, 5, lambda _: line)
    assert len(train_on(ShardDataset.open(copied), tmp_path / "quarantine.jsonl")) == 1


@pytest.mark.parametrize("damage", [lambda data: data.replace(b'"v05"', b'"v05\xff'), lambda data: bytes(len(data))])
def test_names_that_cannot_be_read_stop_nothing(copied: Path, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    (path,) = copied.glob("names-*")
    path.write_bytes(damage(path.read_bytes()))
    change_row(copied, 5, size=0)
    dataset = ShardDataset.open(copied)
    assert dataset.samples[5].key == "sample-5"
    assert len(train_on(dataset, tmp_path / "quarantine.jsonl")) == 1


def test_names_that_have_changed_places_are_not_used(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = copied.glob("names-*")
    first, second, *others = path.read_bytes().splitlines(keepends=True)
    assert len(first) == len(second)
    path.write_bytes(b"".join([second, first, *others]))
    dataset = ShardDataset.open(copied)
    assert [dataset.samples[number].key for number in (0, 1)] == ["sample-0", "sample-1"]
    assert capsys.readouterr().err.count("has changed since it was made") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"num_samples": -1}, {"num_samples": 11}, {"num_samples": "12"}, {"classes": "abc"}, {"classes": [1]},
        {"codecs": {"h264": 3}}, {"codecs": {}}, {"containers": []}, {"frame_strides": []}, {"frame_strides": [0]},
        {"tables": {}}, {"tables": {"samples": {}}}, {"schema_version": 3}, {"schema_version": None},
        {"labels": [1]}, {"more": 1},
        {"encode": []}, {"num_bytes": 10**40}, {"upgrade": {"schema_version": 1}},
    ],
)  # fmt: skip
def test_a_broken_description_is_one_sentence(copied: Path, change: dict[str, Any], tmp_path: Path) -> None:
    path = copied / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError) as raised:
        ShardDataset.open(copied)
    assert "\n" not in str(raised.value)


def test_a_table_outside_of_the_folder_is_refused(copied: Path) -> None:
    path = copied / "dataset.json"
    said = json.loads(path.read_text())
    said["tables"]["names"]["file"] = "../../etc/passwd"
    path.write_text(json.dumps(said))
    with pytest.raises(InputError, match="is not a dataset description"):
        ShardDataset.open(copied)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\xff", b"[]", 10000 * b"["])
def test_a_description_that_is_none_is_one_sentence(copied: Path, content: bytes) -> None:
    (copied / "dataset.json").write_bytes(content)
    with pytest.raises(InputError, match="is not a dataset description"):
        ShardDataset.open(copied)


@pytest.mark.parametrize("name", ["shards", "samples"])
@pytest.mark.parametrize("damage", ["cut", "gone", "of another dtype", "no table", "of an open header"])
def test_a_table_that_is_not_the_one_is_one_sentence(copied: Path, name: str, damage: str) -> None:
    (path,) = copied.glob(f"{name}-*.npy")
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "gone":
        path.unlink()
    elif damage == "no table":
        path.write_bytes(bytes(len(data)))
    elif damage == "of an open header":
        path.write_bytes(data.replace(b"}", b"(", 1))
    else:
        path.write_bytes(data.replace(b"<u4", b"<i4").replace(b"<u8", b"<i8"))
    with pytest.raises(InputError, match="cannot be used") as raised:
        ShardDataset.open(copied)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "changed", [{"label": 1}, {"num_frames": 3}, {"fps": 24.5}, {"width": 66}, {"offset": 2048}, {"sha256": bytes(32)}]
)
def test_a_row_that_says_something_else_than_the_shard_is_passed_over(
    copied: Path, short: ShardDataset, capsys: pytest.CaptureFixture[str], changed: dict[str, Any]
) -> None:
    """Each of these would be a sound row of another video."""
    info = json.loads((copied / "dataset.json").read_text())
    for sides in info["codecs"].values():
        sides["max_width"] = 66
    (copied / "dataset.json").write_text(json.dumps(info))
    number = next(n for n, sample in enumerate(short.samples) if sample.label != 1)
    change_row(copied, number, **changed)
    found = ShardDataset.open(copied)
    assert [n for n, sample in enumerate(found.samples) if sample.problem] == [number]
    assert found.samples[number].problem == f"its row is not what shard-{number // 4:06d}.samples.jsonl says"
    assert "note: 1 rows in " in (said := capsys.readouterr().err)
    assert "have changed and are skipped: write it again with check_shards.py --rewrite-tables" in said


def test_a_row_that_has_no_line_beside_its_shard_is_passed_over(copied: Path) -> None:
    change_row(copied, 0, label=2)
    path = copied / "shard-000001.samples.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert [n for n, sample in enumerate(ShardDataset.open(copied).samples) if sample.problem] == [0, 7]
    path.unlink()
    with pytest.raises(InputError, match=r"shard-000001\.samples\.jsonl cannot be read"):
        ShardDataset.open(copied)


def test_the_digest_of_large_tables_is_that_of_when_they_were_made(copied: Path, monkeypatch) -> None:
    """Reading them would be most of what opening costs."""
    digest = ShardDataset.open(copied).digest
    monkeypatch.setattr(index, "HASHED_ROWS", 0)
    monkeypatch.setattr(index.Tables, "_hash_of_rows", lambda _: pytest.fail("it reads all rows"))
    assert ShardDataset.open(copied).digest == digest


def test_one_of_several_datasets_without_a_video_is_refused(copied: Path, tmp_path: Path) -> None:
    empty = Path(shutil.copytree(copied, tmp_path / "empty"))
    said = json.loads((empty / "dataset.json").read_bytes())
    (empty / "dataset.json").write_text(json.dumps({**said, "num_samples": 0}))
    with pytest.raises(InputError, match=r"empty holds no video: see its rejected\.jsonl"):
        ShardDataset.open([copied, empty])


def test_a_mix_of_versions_is_one_list(copied: Path, tmp_path: Path) -> None:
    other = write_shards(tmp_path / "other", [("w0", encode(6)), ("w1", encode(7))], classes=2)
    as_version_1(copied)
    mix = ShardDataset.open([copied, other])
    assert [sample.key for sample in mix.samples] == [f"v{i:02d}" for i in range(12)] + ["w0", "w1"]
    assert mix.shard_of.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2
    assert [mix.shard_of[i] for i in (0, 11, 13)] == [0, 2, 3]
    assert mix.shards[3] == f"{other}/shard-000000.tar"
    assert [shard.num_samples for shard in mix.info.shards] == [4, 4, 4, 2]
    assert mix.samples[-1].num_frames == 7
    assert mix.column("num_frames").tolist() == [20] * 12 + [6, 7]
    assert mix.digest != ShardDataset.open([other, copied]).digest
    with pytest.raises(IndexError):
        mix.samples[14]


def test_names_are_opened_when_they_are_asked_for(copied: Path) -> None:
    (path,) = copied.glob("names-*")
    path.unlink()
    dataset = ShardDataset.open(copied)
    assert dataset.samples[3].num_frames == 20
    with pytest.raises(InputError, match="is missing or incomplete"):
        _ = dataset.samples[3].key


def test_the_row_is_what_is_documented() -> None:
    assert SAMPLE.itemsize == 96
