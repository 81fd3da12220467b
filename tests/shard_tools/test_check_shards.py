import json
import shutil
import tarfile
from pathlib import Path

import pytest
from shard_making import all_samples

from errors import InputError
from shard_tools import check_shards


@pytest.fixture
def copied(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copied"))


def check(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = check_shards.main([str(folder), "--workers", "1", *options])
    return code, capsys.readouterr().out


def test_whole_shards_pass(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(dataset, capsys) == (0, "3 shards checked, 9 videos decoded, 0 problems\n")


def test_a_flipped_byte_is_found_in_its_sample(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard, sample = all_samples(copied)[4]
    data = bytearray((copied / shard).read_bytes())
    data[sample.offset + sample.size - 40] ^= 255
    (copied / shard).write_bytes(data)
    code, said = check(copied, capsys, "--decode", "0")
    assert code == 1
    assert f"{shard}: its bytes have changed since it was made\n" in said
    assert f"{shard}: {sample.key}: the video's bytes have changed\n" in said
    assert "2 problems" in said


def test_what_is_missing_cut_or_swapped_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "shard-000000.tar").unlink()
    (copied / "shard-000001.tar").write_bytes((copied / "shard-000001.tar").read_bytes()[:-1024])
    shutil.copy(copied / "shard-000001.idx", copied / "shard-000002.idx")
    code, said = check(copied, capsys, "--decode", "0")
    assert code == 1
    assert "shard-000000.tar is missing" in said
    assert "shard-000001.tar has" in said
    assert "shard-000002.idx does not fit its tar" in said


def test_a_wrong_number_of_frames_is_found(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = copied / "shard-000002.samples.jsonl"
    entries = [json.loads(line) for line in table.read_text().splitlines()]
    entries[1]["num_frames"] += 1
    table.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    code, said = check(copied, capsys)
    assert code == 1
    assert f"{entries[1]['key']}.mp4: 5 frames decode instead of 6" in said


def test_a_label_without_a_class_is_found(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    description = json.loads((copied / "dataset.json").read_text())
    (copied / "dataset.json").write_text(json.dumps({**description, "classes": description["classes"][:2]}))
    code, said = check(copied, capsys, "--decode", "0")
    assert code == 1
    lost = [(shard, sample) for shard, sample in all_samples(copied) if sample.label == 2]
    assert said.splitlines()[:-1] == [
        f"{shard}: {sample.key}: label 2, and there are 2 classes" for shard, sample in lost
    ]


def test_a_foreign_webdataset_is_checked(videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = sorted(videos.rglob("*.mp4"))[:2]
    (tmp_path / "cut.mp4").write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    with tarfile.open(tmp_path / "foreign.tar", "w") as tar:
        tar.add(whole, "one.mp4")
        tar.add(tmp_path / "cut.mp4", "two.mp4")
    code, said = check(tmp_path, capsys)
    assert code == 1
    assert "foreign.tar: two.mp4: the file is cut off" in said
    assert "1 problems" in said


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no shards"):
        check_shards.main([str(tmp_path)])
