"""The plan of a run and its rejects, on disk."""

import pytest

from errors import InputError
from shard_tools.build import read_rejects
from shard_tools.plan import Entry, Plan

PLAN = Plan({"gop": 8}, ["a"], {"shard-000000": [Entry("x.mp4", 0, 0), Entry("y.mp4", None, 1)]}, {"z.mp4": "empty"})


def test_a_plan_comes_back_as_it_was_saved(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"shards": []}',
        '{"shards": {"a": [[1]]}}',
        '{"shards": {}, "new": 1}',
        '{"settings": {}, "classes": [], "shards": {}, "rejected": {}, "key_digits": 3}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_plan_is_named(tmp_path, text):
    file = tmp_path / "plan.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=r"plan\.json is damaged"):
        Plan.load(file)


@pytest.mark.parametrize("line", [b"{", b"[]", b"3", b'{"source": "a.mp4"}', b"\xff"])
def test_damaged_rejects_are_named(tmp_path, line):
    (tmp_path / "rejected.jsonl").write_bytes(b'{"source": "a.mp4", "reason": "empty"}\n' + line + b"\n")
    with pytest.raises(InputError, match=r"rejected\.jsonl is damaged"):
        read_rejects(tmp_path)
