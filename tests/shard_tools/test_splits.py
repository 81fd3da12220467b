"""Whole groups are held out, of every class its share; what is on both sides is named."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from shard_making import all_samples, make, write_video

from adamae.shard_tools.splits import SHARED_FILE, choose_held_out, parse_group_by


def test_every_class_has_its_share_of_groups_and_what_is_added_moves_nothing() -> None:
    files = {
        f"{label}{number}": Counter([label])
        for label, count in (("a", 100), ("b", 10))
        for number in range(count)
    }
    held = choose_held_out(files, 0.2, {})
    assert Counter(name[0] for name in held) == {"a": 20, "b": 2}
    more = files | {f"b{number}": Counter(["b"]) for number in range(10, 30)}
    later = choose_held_out(more, 0.2, {name: name in held for name in files})
    assert held < later
    assert not (later - held) & files.keys()
    assert Counter(name[0] for name in later) == {"a": 20, "b": 6}
    persons = {f"person{n}": Counter({"walk": 3, "run": 1 + n % 2}) for n in range(20)}
    found = choose_held_out(persons, 0.25, {})
    assert sum((persons[name] for name in found), Counter())["run"] == pytest.approx(
        0.25 * 30, abs=1
    )
    assert choose_held_out({"one": Counter("a"), "two": Counter("a")}, 0.01, {}) <= {"one", "two"}


@pytest.mark.parametrize(
    ("how", "group"),
    [
        ("folder:2", "kitchen"),
        ("column:person", "7"),
        ("name:cam[0-9]+", "cam3"),
        ("name:_(.)_", "x"),
    ],
)
def test_groups_are_named_by_folder_column_or_pattern(how: str, group: str) -> None:
    assert parse_group_by(how)("day 1/kitchen/cam3_x_1.mp4", {"person": 7}) == group


def test_copies_and_look_alikes_on_both_sides_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    for name, scene, brightness in (
        ("a1", 0, 0),
        ("a2", 0, 9),
        ("b1", 1, 0),
        ("c1", 2, 0),
        ("plain1", None, 0),
    ):
        write_scene(videos / f"{name}.mp4", scene, brightness)
    write_scene(videos / "plain2.mp4", None, 5)  # as plain as the other one
    shutil.copy(videos / "b1.mp4", videos / "b2.mp4")
    for split, names in (("train", "a1 b1 c1 plain1"), ("validation", "a2 b2 plain2")):
        (tmp_path / f"{split}.csv").write_text("".join(f"{name}.mp4\n" for name in names.split()))
    lists = [f"--split={split}={tmp_path}/{split}.csv" for split in ("train", "validation")]
    assert make(videos, tmp_path / "out", *lists) == 0
    found = map(json.loads, (tmp_path / "out/validation" / SHARED_FILE).read_text().splitlines())
    assert {(row["validation"], row["train"], row["why"].partition(" ")[2]) for row in found} == {
        ("b2.mp4", "b1.mp4", "same bytes"),
        ("a2.mp4", "a1.mp4", "of 192 bits differ"),
    }
    assert "of validation, 2 videos show what one of train shows (" in capsys.readouterr().err
    persons = ["--hold-out", "0.4", "--group-by", "name:[a-z]+"]
    assert make(videos, tmp_path / "by group", *persons) == 0
    sides = [
        {sample.source.rstrip(".mp4123") for _, sample in all_samples(tmp_path / "by group" / side)}
        for side in ("train", "validation")
    ]
    assert sides[1]
    assert not sides[0] & sides[1]
    assert not (tmp_path / "by group/validation" / SHARED_FILE).read_text()


def write_scene(path: Path, scene: int | None, brightness: int) -> None:
    """Write a video of a still scene in which something small moves; None: an empty one."""
    picture = np.full((96, 128, 3), 90.0)
    if scene is not None:
        picture = np.kron(
            np.random.default_rng(scene).uniform(0, 200, (8, 8, 3)), np.ones((12, 16, 1))
        )
    frames = np.tile((picture + brightness).astype(np.uint8), (20, 1, 1, 1))
    for number, frame in enumerate(frames):
        frame[40:46, 4 * number : 4 * number + 6] = 250
    write_video(path, frames)
