"""What is written down of videos that do not decode."""

import json

import pytest

from common.errors import InputError
from pipeline.quarantine import MIN_CLIPS, Quarantine
from pipeline.shards.dataset import ShardDataset


@pytest.fixture
def dataset(synthetic_shards) -> ShardDataset:
    return ShardDataset.open(synthetic_shards)


def keys(text: str) -> list[str]:
    return [json.loads(line)["key"] for line in text.splitlines() if line.endswith("}")]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_cut_short_hides_no_other(dataset, tmp_path, cut):
    file = tmp_path / "quarantine.jsonl"
    for sample in (3, 5):
        Quarantine(dataset, file, 0.5).add(sample, "it is broken", clips=1)
    file.write_text(file.read_text()[:-cut])
    for _ in range(2):  # the second one meets the cut line in the middle
        Quarantine(dataset, file, 0.5).add(7, "it is broken", clips=1)
    found = keys(file.read_text())
    assert found[0] == dataset.samples[3].key
    assert found[-1] == dataset.samples[7].key
    assert found.count(found[-1]) == 1


def test_too_many_bad_videos_end_the_run(dataset, tmp_path):
    quarantine = Quarantine(dataset, tmp_path / "quarantine.jsonl", max_bad_fraction=0.02)
    quarantine.clips = MIN_CLIPS
    for sample in range(4):
        quarantine.add(sample, "it is broken", clips=1)
    with pytest.raises(InputError, match=r"5 of 200 clips .* more than data.max_bad_fraction = 0.02"):
        quarantine.add(4, "it is broken", clips=1)


@pytest.mark.parametrize("line", [b"\xff\xfe{\n", b"[1]\n", b"null\n", b'{"key": [2]}\n', b'{"reason": "no key"}\n'])
def test_a_broken_line_of_the_file_hides_no_other(dataset, tmp_path, line):
    file = tmp_path / "quarantine.jsonl"
    Quarantine(dataset, file, 0.5).add(3, "it is broken", clips=1)
    file.write_bytes(line + file.read_bytes())
    quarantine = Quarantine(dataset, file, 0.5)
    quarantine.add(3, "it is broken", clips=1)
    quarantine.add(5, "it is broken", clips=1)
    added = [json.loads(text)["key"] for text in file.read_bytes()[len(line) :].splitlines()]
    assert added == [dataset.samples[3].key, dataset.samples[5].key]
