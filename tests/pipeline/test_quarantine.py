"""What is written down of videos that do not decode."""

import json

import pytest

from adamae.common.errors import InputError
from adamae.common.jsonl import read_jsonl
from adamae.pipeline.quarantine import MIN_CLIPS, Quarantine
from adamae.pipeline.shards.dataset import ShardDataset


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, cut=cut: data[:-cut] for cut in (1, 20, 60)),
        *(
            lambda data, line=line: line + data
            for line in (b"\xff\xfe{\n", b"[1]\n", b"null\n", b'{"key": [2]}\n')
        ),
    ],
)
def test_a_broken_line_of_the_file_hides_no_other(short: ShardDataset, tmp_path, damage):
    file = tmp_path / "quarantine.jsonl"
    for sample in (3, 5):
        Quarantine(short, file, 0.5).add(sample, "it is broken", 1, 0)
    file.write_bytes(damaged := damage(file.read_bytes()))
    read_jsonl(file)
    assert file.read_bytes() == damaged, "a report only reads, perhaps beside the run"
    for _ in range(2):  # the second one meets a cut line in the middle
        quarantine = Quarantine(short, file, 0.5)
        quarantine.add(3, "it is broken", 1, 0)
        quarantine.add(7, "it is broken", 1, 0)
    found = [
        line
        for line in file.read_bytes().splitlines()
        if line.startswith(b'{"key": "') and line.endswith(b"}")
    ]
    keys = [json.loads(line)["key"] for line in found]
    assert keys[0] == short.samples[3].key
    assert keys[-1] == short.samples[7].key
    assert len(keys) == len(set(keys))


def test_too_many_bad_videos_end_the_run(short: ShardDataset, tmp_path):
    quarantine = Quarantine(short, tmp_path / "quarantine.jsonl", max_bad_fraction=0.02)
    quarantine.add(3, "it is broken", 4, MIN_CLIPS)
    with pytest.raises(
        InputError, match=r"5 of 200 clips .* more than data.max_bad_fraction = 0.02"
    ):
        quarantine.add(4, "it is broken", 5, MIN_CLIPS)
