"""Whole groups are held out, of every class its fraction; videos on both sides are named."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from shard_making import all_samples, make, write_video

from adamae.shard_tools.splits import SHARED_FILE, choose_held_out, parse_group_by


def count_classes(names: set[str]) -> Counter[str]:
    """Count files by their class, the first letter of their names."""
    return Counter(name[0] for name in names)


def test_every_class_has_its_fraction_of_groups_and_what_is_added_moves_nothing() -> None:
    files = {f"a{number}": Counter(["a"]) for number in range(100)}
    files |= {f"b{number}": Counter(["b"]) for number in range(10)}
    held = choose_held_out(files, 0.2, {})
    assert count_classes(held) == {"a": 20, "b": 2}
    more = files | {f"b{number}": Counter(["b"]) for number in range(10, 30)}
    later = choose_held_out(more, 0.2, {name: name in held for name in files})
    assert held < later
    assert not (later - held) & files.keys()
    assert count_classes(later) == {"a": 20, "b": 6}


def test_groups_of_several_videos_are_held_out_by_their_number() -> None:
    persons = {}
    for number in range(20):
        persons[f"person{number}"] = Counter({"walk": 3, "run": 1 + number % 2})
    held = choose_held_out(persons, 0.25, {})
    num_running = sum(persons[name]["run"] for name in held)
    assert num_running == pytest.approx(0.25 * 30, abs=1)


def test_a_fraction_of_less_than_a_group_chooses_none_but_existing_ones() -> None:
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


def write_scenes(folder: Path) -> None:
    """Write videos of three scenes, two of which come twice, and two plain videos."""
    folder.mkdir()
    write_scene(folder / "a1.mp4", 0, brightness=0)
    write_scene(folder / "a2.mp4", 0, brightness=9)
    write_scene(folder / "b1.mp4", 1, brightness=0)
    write_scene(folder / "c1.mp4", 2, brightness=0)
    # One is as plain as the other.
    write_scene(folder / "plain1.mp4", None, brightness=0)
    write_scene(folder / "plain2.mp4", None, brightness=5)
    shutil.copy(folder / "b1.mp4", folder / "b2.mp4")


def test_copies_and_look_alikes_on_both_sides_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    videos = tmp_path / "videos"
    write_scenes(videos)
    (tmp_path / "train.csv").write_text("a1.mp4\nb1.mp4\nc1.mp4\nplain1.mp4\n")
    (tmp_path / "validation.csv").write_text("a2.mp4\nb2.mp4\nplain2.mp4\n")
    lists = [f"--split={split}={tmp_path}/{split}.csv" for split in ("train", "validation")]
    assert make(videos, tmp_path / "out", *lists) == 0
    shared = set()
    for line in (tmp_path / "out/validation" / SHARED_FILE).read_text().splitlines():
        row = json.loads(line)
        # The number of different bits depends on the encoder.
        reason = row["why"].partition(" ")[2]
        shared.add((row["validation"], row["train"], reason))
    assert shared == {
        ("b2.mp4", "b1.mp4", "same bytes"),
        ("a2.mp4", "a1.mp4", "of 192 bits differ"),
    }
    warning = capsys.readouterr().err
    assert "2 of 3 videos of validation look like videos of train (" in warning
    assert "divide by recording, --hold-out with --group-by" in warning


def test_videos_on_one_background_do_not_look_alike_more_than_those_of_other_classes(
    tmp_path: Path,
) -> None:
    """Signs of a few persons in front of one wall, in short."""
    videos = tmp_path / "videos"
    videos.mkdir()
    for number in range(10):
        write_scene(videos / f"{number}.mp4", 0, brightness=number)
    signs = [f"{number}.mp4,{'yes' if number % 2 else 'no'}\n" for number in range(10)]
    (tmp_path / "train.csv").write_text("".join(signs[:8]))
    (tmp_path / "validation.csv").write_text("".join(signs[8:]))
    lists = [f"--split={split}={tmp_path}/{split}.csv" for split in ("train", "validation")]
    assert make(videos, tmp_path / "out", *lists) == 0
    assert not (tmp_path / "out/validation" / SHARED_FILE).read_text()


def test_advice_that_was_followed_is_not_given_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    # Three persons: two of them are filmed at one place.
    for number, scene in enumerate([0, 0, 1]):
        write_scene(videos / f"p{number}.mp4", scene, brightness=9 * number)
    sides = {}
    for fraction in ("0.3", "0.6"):
        out = tmp_path / fraction
        assert make(videos, out, "--hold-out", fraction, "--group-by", "name:p[0-9]") == 0
        sides[fraction] = {sample.source for _, sample in all_samples(out / "validation")}
        warning = capsys.readouterr().err
        is_divided = len({"p0.mp4", "p1.mp4"} & sides[fraction]) == 1
        assert ("look like videos of train" in warning) == is_divided
        assert "--group-by" not in warning
    assert any(len({"p0.mp4", "p1.mp4"} & side) == 1 for side in sides.values())


def test_files_with_the_same_bytes_stay_on_one_side(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    for number in range(4):
        write_scene(videos / f"{number}.mp4", number, brightness=0)
        shutil.copy(videos / f"{number}.mp4", videos / f"copy{number}.mp4")
    assert make(videos, tmp_path / "out", "--hold-out", "0.5") == 0
    numbers = [sample.source[-5] for _, sample in all_samples(tmp_path / "out/validation")]
    assert sorted(Counter(numbers).values()) == [2, 2]
    assert not (tmp_path / "out/validation" / SHARED_FILE).read_text()


def test_no_group_is_on_both_sides(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    write_scenes(videos)
    groups = ["--hold-out", "0.4", "--group-by", "name:[a-z]+"]
    assert make(videos, tmp_path / "out", *groups) == 0
    letters = {}
    for side in ("train", "validation"):
        samples = all_samples(tmp_path / "out" / side)
        letters[side] = {sample.source.rstrip(".mp4123") for _, sample in samples}
        # Evaluations give accuracies per group.
        assert letters[side] == {sample.fields["group"] for _, sample in samples}
    assert letters["validation"]
    assert not letters["train"] & letters["validation"]
    assert not (tmp_path / "out/validation" / SHARED_FILE).read_text()


def write_scene(path: Path, scene: int | None, brightness: int) -> None:
    """Write a video of a static scene in which something small moves; None: an empty scene."""
    picture = np.full((96, 128, 3), 90.0)
    if scene is not None:
        colors = np.random.default_rng(scene).uniform(0, 200, (8, 8, 3))
        picture = np.kron(colors, np.ones((12, 16, 1)))
    frames = np.tile((picture + brightness).astype(np.uint8), (20, 1, 1, 1))
    for number, frame in enumerate(frames):
        frame[40:46, 4 * number : 4 * number + 6] = 250
    write_video(path, frames)
