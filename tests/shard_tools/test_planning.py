"""Inputs, shuffle and keys in tables on the disk: what they give, what they take, and a disk that is full."""

import os
from pathlib import Path

import pytest
from shard_making import hashes, make

from common.errors import InputError
from shard_tools.inputs import Inputs, Item, Skipped, TarMember
from shard_tools.inputs.table import LARGEST
from shard_tools.layout import Keys, Shuffled, shuffle_key
from shard_tools.report import Files

NAMES = ["a.mp4", "B.mp4", "é.mp4", "e\u0301.mp4", "\udcff.mp4", "\uffff.mp4", "\U0001f3a5.mp4", "a.mp4 ", "a/b.mp4"]
LAST = "\U0001f3a6.mp4"


def settled(items: list[Item], unlabelled: bool = False) -> Inputs:
    inputs = Inputs()
    inputs.add(items)
    inputs.deduplicate(unlabelled)
    return inputs


def test_sources_come_in_the_order_of_their_characters_and_whole() -> None:
    items = [Item(name, os.path.join("/in", name), "x", number) for number, name in enumerate(NAMES)]
    inputs = settled([Item(LAST, member := TarMember("a.tar", 512, 2**70, "a"), "x", 2**70), *reversed(items)])
    assert list(inputs) == [*sorted(items, key=lambda item: item.source), Item(LAST, member, "x", LARGEST)]
    assert len(inputs) == inputs.num_usable == len(items) + 1
    assert [item.source for item in inputs.by_size()] == [*NAMES, LAST]
    assert inputs.location(NAMES[4]) == f"/in/{NAMES[4]}"
    assert inputs.location("none") is None


def test_a_source_that_is_listed_again_counts_once_and_has_one_label() -> None:
    items = [
        Item("a", "first", "x"),
        Item("b", "b", "y"),
        Item("a", "second", "x"),
        Item("b", "b", "z"),
        Item("c", "c"),
    ]
    a, b, c = settled(items)
    assert a == Item("a", "first", "x")
    assert b == Item("b", "b", "y", problem="it is listed with two labels, 'y' and 'z'")
    assert c == Item("c", "c", problem="it has no label, others have one")
    assert all(item.label is None for item in settled(items, unlabelled=True))
    assert [item.problem for item in settled([Item("c", "c"), Item("d", "d")])] == [None, None]


def test_arrays_beside_videos_are_passed_over() -> None:
    inputs, skipped = settled([Item("a.npy", "a"), Item("b.mp4", "b"), Item("c.NPY", "c")]), Skipped()
    assert not inputs.only_arrays
    inputs.pass_over_arrays(skipped, "arrays beside videos")
    assert [item.source for item in inputs] == ["b.mp4"]
    assert skipped.lines() == ["skipped 2 arrays beside videos: a.npy, c.NPY"]


def test_what_a_dataset_holds_or_has_rejected_is_not_new() -> None:
    items = [Item(name, name, "x", 10, "broken" if name in "de" else None) for name in "abcdef"]
    inputs = settled(items)
    inputs.compare([("a", "x", 10), ("d", "x", 10), ("gone", "x", 1)], ["b", "e"])
    assert [item.source for item in inputs.new()] == ["c", "f"]
    assert inputs.new_problems() == {}
    assert inputs.relabelled() == inputs.resized() == (0, "")
    inputs.compare([("c", "z", 0), ("c", "x", 10), ("a", None, 10), ("b", "x", 11), ("d", "z", 1)], ())
    assert inputs.relabelled() == (2, "a, None there and 'x' in the input")
    assert inputs.resized() == (1, "b, 11 bytes then and 10 now")
    assert inputs.new_problems() == {"e": "broken"}


def test_a_label_map_names_labels_and_refuses_others() -> None:
    inputs = settled([Item("a", "", "cat"), Item("b", "", "1"), Item("c", "", "2"), Item("d", "", "cow")])
    inputs.name_labels(["cat", "dog"])
    a, b, c, d = inputs
    assert (a.label, b.label) == ("cat", "dog")
    assert c.problem == "its label '2' is not in the label map"
    assert d.problem == "its label 'cow' is not in the label map"
    assert inputs.labels() == {"cat", "dog"}


def test_the_shuffle_is_that_of_a_sort_in_memory() -> None:
    items = [Item(name, name, None, 5, piece=piece) for name in NAMES for piece in range(3)]
    with Shuffled(items, seed=7) as order:
        assert (order.count, order.total) == (27, 135)
        found = [f"{item.source}\0{item.piece}" if item.piece else item.source for item in order]
    assert found == sorted(found, key=lambda name: shuffle_key(name, 7))


@pytest.mark.parametrize(
    ("new", "stored", "alike"),
    [
        ([("k", "a"), ("k", "a"), ("l", "b")], [], None),
        ([("k", "a"), ("k", "b")], [], ("k", "a", "b")),
        ([("k", "a")], [("k", "b")], ("k", "a", "b")),
        ([("k", "a")], [("k", "a"), ("l", "b")], None),
        ([], [("k", "a"), ("k", "b")], None),  # nothing is made of them any more
    ],
)
def test_two_keys_alike(
    new: list[tuple[str, str]], stored: list[tuple[str, str]], alike: tuple[str, str, str] | None
) -> None:
    with Keys() as keys:
        keys.add(stored, are_stored=True)
        keys.add(new, are_stored=False)
        assert keys.alike() == alike


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """One table of this kind has room for 8 pages of 4 KiB."""
    monkeypatch.setattr(request.param, "schema", f"PRAGMA max_page_count = 8; {request.param.schema}")


@pytest.mark.parametrize("full_disk", [Inputs, Shuffled, Keys, Files], indirect=True)
def test_a_full_disk_of_temporary_files_says_where_to_go_and_leaves_no_plan(
    full_disk: None, videos: Path, tmp_path: Path
) -> None:
    source = next(videos.glob("*/*.mp4"))
    (folder := tmp_path / "in").mkdir()
    for number in range(150):
        (folder / f"{'long_name_' * 20}{number}.mp4").hardlink_to(source)
    with pytest.raises(InputError, match=r"sorted \(database or disk is full\): .* SQLITE_TMPDIR to a folder"):
        make(folder, tmp_path / "out", "--encode", "copy")
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_after_a_full_disk_the_same_command_makes_what_it_would_have_made(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Shuffled, "schema", f"PRAGMA max_page_count = 1; {Shuffled.schema}")
        with pytest.raises(InputError, match="all videos cannot be sorted"):
            make(videos, tmp_path / "out", "--encode", "copy")
    assert make(videos, tmp_path / "out", "--encode", "copy") == 0
    assert make(videos, tmp_path / "other", "--encode", "copy") == 0
    assert hashes(tmp_path / "out") == hashes(tmp_path / "other")
