"""The plan of a run and its rejects, on disk."""

import pytest

from common.errors import InputError
from shard_tools.build import read_rejects
from shard_tools.plan import Entry, Plan

PLAN = Plan({"gop": 8}, ["a"], {"shard-000000": [Entry("x.mp4", 0, 0), Entry("y.mp4", None, 1)]}, {"z.mp4": "empty"})


def test_a_plan_comes_back_as_it_was_saved(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


def test_a_part_reads_only_its_shards(tmp_path):
    shards = {f"shard-{number}": [Entry(f"{number}.mp4", None, 0)] for number in range(5)}
    plan = Plan({"max_seconds": None}, [], shards, {})
    plan.save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines(keepends=True)
    lines[1] = '["shard-0", damaged\n'  # of another part
    (tmp_path / "plan.json").write_text("".join(lines))
    part = Plan.load(tmp_path / "plan.json", (1, 3))
    assert list(part.shards) == list(shards)
    assert [part.sources(f"shard-{number}") for number in (1, 4)] == [["1.mp4"], ["4.mp4"]]
    assert [part.parts_of(name, 3) for name in shards] == [plan.parts_of(name, 3) for name in shards]


def test_a_part_reads_the_pieces_that_lie_in_shards_of_others(tmp_path):
    shards = {"shard-0": [Entry("a.mp4", None, 1)], "shard-1": [Entry("a.mp4", None, 0)]}
    plan = Plan({"max_seconds": 5.0}, [], shards, {})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", (1, 2)) == plan
    assert plan.parts_of("shard-0", 2) == {1}


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
        '{"settings": {}, "classes": [], "rejected": {}, "num_shards": 1}',
        '{"settings": {}, "classes": [], "rejected": {}, "num_shards": 1}\n["a", [["x", 0, 0]',
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


def test_memory_holds_no_more_of_a_saved_plan_than_where_its_shards_begin(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert not isinstance(plan.shards, dict)
    whole = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(whole.replace('"x.mp4"', '"w.mp4"'))
    assert plan.sources("shard-000000") == ["w.mp4", "y.mp4"], "a line is read when it is reached"
    (tmp_path / "plan.json").write_text(whole.splitlines()[0])
    with pytest.raises(InputError, match=r"plan\.json is damaged"):
        plan.sources("shard-000000")
