"""Inputs and plans: what they hold, damaged plans, and a disk for temporary files that is full."""

import os
import tracemalloc
from itertools import chain
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest
from shard_making import collect, hashes, make

from adamae.common.errors import InputError
from adamae.shard_tools.build import read_rejects
from adamae.shard_tools.inputs import Item, TarMember
from adamae.shard_tools.inputs.item_store import shuffle_key
from adamae.shard_tools.plan import Plan, assign_shards, save_plan
from adamae.shard_tools.settings import Settings
from adamae.shard_tools.temp_table import TempTable

NOT_UTF_8 = "\udcff.mp4"
NAMES = [
    "a.mp4",
    "B.mp4",
    "é.mp4",
    "e\u0301.mp4",
    NOT_UTF_8,
    "\uffff.mp4",
    "\U0001f3a5.mp4",
    "a.mp4 ",
    "a/b.mp4",
]
LAST_IN_UTF_8 = "\U0001f3a6.mp4"


def test_sources_come_in_the_order_of_their_characters_and_last_what_is_not_utf_8() -> None:
    items = []
    for number, name in enumerate(NAMES):
        items.append(Item(name, os.path.join("/in", name), ("x",), number))
    items.append(Item(LAST_IN_UTF_8, TarMember("a.tar", 512, 9, "a"), ("x",), 9))
    inputs = collect(reversed(items))
    expected = sorted(items, key=lambda item: (item.source == NOT_UTF_8, item.source))
    assert list(inputs) == expected
    assert len(inputs) == len(items)
    assert inputs.location(NOT_UTF_8) == f"/in/{NOT_UTF_8}"
    assert inputs.location("none") is None


def shard(items: list[Item], **settings: object) -> list[list[Item]]:
    """Assign items to shards; return those of each shard, in order."""
    counts, videos = assign_shards(collect(items), Settings(**settings))  # type: ignore[arg-type]
    shards: dict[str, list[Item]] = {}
    for item in sorted(chain(*videos), key=attrgetter("position")):
        unplanned = msgspec.structs.replace(item, shard="", position=0)
        shards.setdefault(item.shard, []).append(unplanned)
    assert list(shards) == [f"shard-{number:06d}.tar" for number in range(len(shards))]
    assert counts == {name: len(items) for name, items in shards.items()}
    return list(shards.values())


def numbered(count: int) -> list[Item]:
    """Return items of classes of a hundred each."""
    return [Item(f"{number:05d}.mp4", "", (str(number // 100),)) for number in range(count)]


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (256, 1), (257, 2), (1000, 4)])
def test_shards_have_equal_counts(count: int, expected: int) -> None:
    lengths = [len(items) for items in shard(numbered(count))]
    assert sum(lengths) == count
    assert len(lengths) == expected
    assert max(lengths, default=0) - min(lengths, default=0) <= 1


def test_the_shuffle_is_global_and_depends_on_names_pieces_and_seed_alone() -> None:
    pieces = []
    for name in NAMES:
        pieces += [Item(name, name, None, 5, segment=f"t={start},9") for start in range(3)]
    names = [item.name for item in chain(*shard(pieces, seed=7, samples_per_shard=1))]
    assert names == sorted(names, key=lambda name: shuffle_key(name, 7))
    items = numbered(1000)
    first = shard(items)
    assert shard(items[::-1]) == first
    other_seed = shard(items, seed=1)
    assert other_seed != first
    by_source = attrgetter("source")
    assert sorted(chain(*first), key=by_source) == sorted(chain(*other_seed), key=by_source)
    for shard_items in first:
        assert len({item.label for item in shard_items}) == 10, "all classes are in every shard"


def test_memory_of_planning_hardly_grows_with_the_sources(tmp_path: Path) -> None:
    peaks = []
    for count, num_shards in ((1_000, 4), (20_000, 79)):
        tracemalloc.start()
        inputs = collect(Item(f"folder/{number:09d}.mp4", "/", None, 1) for number in range(count))
        inputs.mark_stored((), ())
        save_plan(tmp_path / "plan.jsonl", inputs, Settings(), [], 0)
        assert len(Plan(tmp_path / "plan.jsonl").shards) == num_shards
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 20_000 * 24, "bytes: a list of all items takes megabytes"


@pytest.mark.parametrize("line", [b"{", b"[]", b"3", b'{"source": "a.mp4"}', b"\xff"])
def test_damaged_rejects_and_plans_are_named(tmp_path: Path, line: bytes) -> None:
    rejects = b'{"source": "a.mp4", "reason": "empty"}\n' + line + b"\n"
    (tmp_path / "rejected.jsonl").write_bytes(rejects)
    (tmp_path / "plan.jsonl").write_bytes(line + b"\n")
    with pytest.raises(InputError, match=r"rejected\.jsonl is damaged"):
        read_rejects(tmp_path)
    with pytest.raises(InputError, match=r"plan\.jsonl is damaged"):
        Plan(tmp_path / "plan.jsonl")


def test_a_full_temporary_disk_is_explained_and_nothing_is_lost(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = next(videos.glob("*/*.mp4"))
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(150):
        (folder / f"{'long_name_' * 20}{number}.mp4").hardlink_to(source)
    create = TempTable.__init__

    def create_small(self: TempTable, schema: str) -> None:
        """Create a database that is full after eight pages, if it is the one of the items."""
        if "CREATE TABLE items (" in schema:
            schema = f"PRAGMA max_page_count = 8; {schema}"
        create(self, schema)

    message = r"\(database or disk is full\): free some space, or set SQLITE_TMPDIR"
    with monkeypatch.context() as patch:
        patch.setattr(TempTable, "__init__", create_small)
        with pytest.raises(InputError, match=message):
            make(folder, tmp_path / "out", "--encode", "copy")
    assert not (tmp_path / "out" / "dataset.json").exists()
    for name in ("out", "other"):
        assert make(folder, tmp_path / name, "--encode", "copy") == 0
    assert hashes(tmp_path / "out") == hashes(tmp_path / "other")
