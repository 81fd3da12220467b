"""Folders of videos: which are classes, which are subsets, and what is asked."""

import re
from pathlib import Path
from typing import Any

import pytest
from shard_making import make, make_folder, read_labels

from adamae.common.errors import InputError, QuestionError
from adamae.shard_tools.inputs import ListOptions, read_inputs

SPLITS = ["train/dog/a.mp4", "train/cat/b.mp4", "test/dog/c.mp4"]
METADATA = {
    "train/metadata.jsonl": '{"file_name": "1.mp4", "label": "dog"}\n',
    "test/metadata.csv": "file_name,label\n1.mp4,cat\n",
}
# Hugging Face's
VIDEO_FOLDER = ["train/1.mp4", "test/1.mp4", "docs/a.txt", *METADATA]
PARTS = "parts of archives"
NO_VIDEOS = {
    "a.tar.gz": "archives: unpack them",
    "k.tar.gz.aa": PARTS,
    "v.part1.rar": PARTS,
    "v.zip.001": PARTS,
    "a.tif": "TIFF files: save",
    "a.webp": "pictures: convert animated ones",
    "a.nii.gz": "volumes",
    "a.h5": "arrays: save the frames",
    "a.mp4.part": "unfinished downloads: complete them",
    "sub/a.tar": "tars, which are read only where they lie in INPUT itself",
    "list.csv": "tables and texts: give a list of videos itself as INPUT",
    "#recycle/a.mp4": "hidden or system files",
    "__MACOSX/run/a.mp4": "hidden or system files",
}


def name_files(*folders: str) -> list[str]:
    """Name two videos in each folder."""
    return [f"{folder}/{name}.mp4" for folder in folders for name in "ab"]


# Files, options, and labels or a sentence.
READ: list[tuple[list[str], dict[str, Any], dict[str, str | None] | str]] = [
    (SPLITS, {"subset": "train"}, {"train/cat/b.mp4": "cat", "train/dog/a.mp4": "dog"}),
    (
        SPLITS,
        {"subset": "all"},
        {"train/cat/b.mp4": "cat", "train/dog/a.mp4": "dog", "test/dog/c.mp4": "dog"},
    ),
    (SPLITS, {}, "has several subsets, test, train: give --subset"),
    (
        ["data/train/run/a.mp4", "data/test/run/b.mp4", "data/test/walk/b.mp4", "x/train/x.json"],
        {"subset": "train", "label_folder": 3},
        {"data/train/run/a.mp4": "run"},
    ),
    (["train/a.mp4", "train/b.mp4"], {}, dict.fromkeys(["train/a.mp4", "train/b.mp4"])),
    (["full/a.mp4", "parts/a.mp4"], {"unlabeled": True}, {"full/a.mp4": None, "parts/a.mp4": None}),
    (["full/a.mp4", "parts/a.mp4"], {"asks": False}, {"full/a.mp4": None, "parts/a.mp4": None}),
    (
        ["P01/run/a.mp4", "P01/b.mp4"],
        {"label_folder": 2},
        {"P01/run/a.mp4": "run", "P01/b.mp4": "! it has no label, others have one"},
    ),
    (VIDEO_FOLDER, {}, "has several subsets, test, train: give --subset"),
    (VIDEO_FOLDER, {"subset": "all"}, {"train/1.mp4": "dog", "test/1.mp4": "cat"}),
    (VIDEO_FOLDER, {"subset": "train"}, {"train/1.mp4": "dog"}),
    (
        VIDEO_FOLDER[:-1],
        {"subset": "test"},
        "test has no metadata, as other folders beside it have: give one",
    ),
    *(
        ([name], {}, rf"no video found in .*; skipped 1 {NO_VIDEOS[name]}.*: {re.escape(name[:9])}")
        for name in NO_VIDEOS
    ),
]


@pytest.mark.parametrize(("files", "options", "expected"), READ)
def test_folders_are_classes_or_subsets(
    tmp_path: Path, files: list[str], options: Any, expected: Any
) -> None:
    make_folder(tmp_path, {name: METADATA.get(name, "") for name in files})
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            read_inputs(str(tmp_path), ListOptions(**options))
    else:
        assert read_labels(tmp_path, **options) == expected


# Folders of two videos each: these are classes without a question.
CLASSES = [
    "run walk",
    "0 1",
    "2 10 0 1 3 4 5 6 7 8 9",
    "1_run 2_walk",
    "Monday Tuesday",
    "A a",
    "high_jump long_jump",
    "brush_hair person_runs",
    "class_1 class_2",
]


@pytest.mark.parametrize("names", CLASSES)
def test_folders_named_like_classes_are_taken(tmp_path: Path, names: str) -> None:
    files = name_files(*names.split())
    make_folder(tmp_path, dict.fromkeys(files, ""))
    assert read_labels(tmp_path) == {file: file.partition("/")[0] for file in files}


NONE = "--unlabeled"
# Folders of two videos each, and the answers to the question, the proposal first.
ASKED = [
    # RAVDESS, EPIC-KITCHENS, KTH and the like: a folder a person.
    ("Actor_01 Actor_02", [NONE, "1"]),
    ("P01 P02", [NONE, "1"]),
    ("subject01/walk subject01/run subject02/walk", ["2", NONE, "1"]),
    ("subjectA subjectB", [NONE, "1"]),
    ("1 2", ["1", NONE]),
    ("cam0 cam1", [NONE, "1"]),
    ("front_camera rear_camera", [NONE, "1"]),
    # State Farm's classes, and codes of classes.
    ("c0 c1", ["1", NONE]),
    ("c001 c002", ["1", NONE]),
    ("10000 10001", ["1", NONE]),
    ("2024-01-31 office", [NONE, "1"]),
    ("full parts", [NONE, "1"]),
    ("rgb depth", [NONE, "1"]),
    # The cache of Hugging Face.
    ("blobs snapshots", [NONE, "1"]),
    ("train other", [NONE, "1"]),
    ("run", [NONE, "1"]),
    # UCF11: a folder a recording in each class.
    ("dive/v_01 dive/v_02 jump/v_01", ["1", NONE, "2"]),
    ("run/day1 walk", ["1", NONE, "2"]),
    ("train/c0 train/c1", ["2", NONE]),
]


@pytest.mark.parametrize(("names", "answers"), ASKED)
def test_other_folders_are_asked_about_with_the_command_for_each_answer(
    tmp_path: Path, names: str, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "in put", dict.fromkeys(name_files(*names.split()), ""))
    command = ["make_shards.py", str(tmp_path / "in put"), "out"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(QuestionError, match=r"it is not clear whether folders in .* are") as asked:
        read_inputs(str(tmp_path / "in put"))
    commands = [line.strip() for line in asked.value.details[1::2]]
    options = [NONE if answer == NONE else f"--label folder:{answer}" for answer in answers]
    assert commands == [f"python make_shards.py '{command[1]}' out {option}" for option in options]


def test_a_question_shows_what_each_answer_gives_and_writes_nothing(tmp_path: Path) -> None:
    make_folder(tmp_path / "in", dict.fromkeys(["m1/a.mp4", "m2/a.mp4", "m2/b.mp4"], ""))
    with pytest.raises(QuestionError) as asked:
        make(tmp_path / "in", tmp_path / "out")
    text = "\n".join(asked.value.details)
    assert "2 classes with their videos: m1 (1), m2 (2) [names differ in numbers only]" in text
    assert "no labels" in text
    assert not (tmp_path / "out").exists()


def test_without_a_question_doubtful_folders_are_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = name_files("P01", "P02")
    make_folder(tmp_path, dict.fromkeys(files, ""))
    assert read_labels(tmp_path, asks=False) == dict.fromkeys(files)
    assert "are classes, so no video has a label: make_shards.py asks" in capsys.readouterr().err


def test_each_folder_with_one_video_is_asked_about(tmp_path: Path) -> None:
    make_folder(tmp_path, {"alice/a.mp4": "", "bob/b.mp4": ""})
    with pytest.raises(QuestionError) as asked:
        read_inputs(str(tmp_path))
    assert "no labels" in asked.value.details[0]
    assert "[a single video in each]" in asked.value.details[2]


def test_folders_of_the_system_are_named_and_no_classes(tmp_path: Path) -> None:
    system = ["#recycle/x", "$RECYCLE.BIN/x", "run/@eaDir/x", ".trash/x", "__MACOSX/run/x"]
    make_folder(
        tmp_path, dict.fromkeys([*name_files("run", "walk"), *map("{}.mp4".format, system)], "")
    )
    inputs = read_inputs(str(tmp_path))
    assert {item.label for item in inputs} == {"run", "walk"}
    assert inputs.skipped.counts == {"hidden or system files": len(system)}


@pytest.mark.parametrize("label", ["folder", "folder:", "folder:0", "folder:x", "folder:1x"])
def test_a_label_that_is_half_a_rule_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(InputError, match=rf"--label is {label}: give folder:1 "):
        make(tmp_path, tmp_path / "out", "--label", label)


@pytest.mark.parametrize("name", ["run/a.mp4", "list.csv"])
def test_a_folder_that_no_path_has_is_refused(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / "in", {"run/a.mp4": "", name: "run/a.mp4\n"})
    path = tmp_path / "in" if name.endswith(".mp4") else tmp_path / "in" / name
    with pytest.raises(InputError, match=r"--label is folder:3, and no path in .* has as many"):
        read_inputs(str(path), ListOptions(label_folder=3))
