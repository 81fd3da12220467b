"""What is written down of videos that do not decode."""

import json
from pathlib import Path

import pytest

from adamae.common.errors import InputError
from adamae.common.jsonl import read_jsonl
from adamae.pipeline.quarantine import MIN_CLIPS, Quarantine
from adamae.pipeline.shards.dataset import ShardDataset


@pytest.mark.parametrize(
    ("first_line", "num_cut_bytes"),
    [
        (b"", 1),
        (b"", 20),
        (b"", 60),
        (b"\xff\xfe{\n", 0),
        (b"[1]\n", 0),
        (b"null\n", 0),
        (b'{"key": [2]}\n', 0),
    ],
)
def test_a_broken_line_of_the_file_hides_no_other(
    short: ShardDataset, tmp_path: Path, first_line: bytes, num_cut_bytes: int
) -> None:
    file = tmp_path / "quarantine.jsonl"
    for sample in (3, 5):
        Quarantine(short, file, 0.5).add(sample, "it is broken", 1, 0)
    content = file.read_bytes()
    damaged = first_line + content[: len(content) - num_cut_bytes]
    file.write_bytes(damaged)
    read_jsonl(file)
    assert file.read_bytes() == damaged, "a report only reads, perhaps beside the run"
    # The second time, a cut line stands in the middle.
    for _ in range(2):
        quarantine = Quarantine(short, file, 0.5)
        quarantine.add(3, "it is broken", 1, 0)
        quarantine.add(7, "it is broken", 1, 0)
    lines = file.read_bytes().splitlines()
    whole = [line for line in lines if line.startswith(b'{"key": "') and line.endswith(b"}")]
    keys = [json.loads(line)["key"] for line in whole]
    assert keys[0] == short.samples[3].key
    assert keys[-1] == short.samples[7].key
    assert len(keys) == len(set(keys))


def test_too_many_bad_videos_end_the_run(short: ShardDataset, tmp_path: Path) -> None:
    quarantine = Quarantine(short, tmp_path / "quarantine.jsonl", max_bad_fraction=0.02)
    quarantine.add(3, "it is broken", 4, MIN_CLIPS)
    message = r"5 of 200 clips .* more than data.max_bad_fraction = 0.02"
    with pytest.raises(InputError, match=message):
        quarantine.add(4, "it is broken", 5, MIN_CLIPS)
