"""Everything that a collection of videos comes as."""

import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from shard_making import hashes, make

from common.errors import InputError
from pipeline.shards.format import read_dataset_info
from shard_tools.inputs import ListOptions, Skipped, assign_class_ids, read_inputs, read_label_map
from shard_tools.settings import Settings
from shard_tools.work import Entry, Job, Outcome, process_job, read_outcome


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A folder of files that only have names: enough for finding and labeling them."""
    folder = tmp_path / "clips"
    for name in ("run/a.mp4", "run/b c.mp4", "walk/d.webm", "e.mp4", "74225.webm"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def test_urls(videos: Path, dataset: Path, tmp_path: Path) -> None:
    make(f"local://{videos}", tmp_path / "url", "--samples-per-shard", "3")
    assert hashes(tmp_path / "url") == hashes(dataset)
    (tmp_path / "list.csv").write_text(f"local://{next(videos.rglob('*.mp4'))},here\nlocal:///nowhere.mp4,here\n")
    make(tmp_path / "list.csv", tmp_path / "list")
    assert read_dataset_info(tmp_path / "list").num_samples == 1
    assert read_dataset_info(tmp_path / "list").num_rejected == 1


def test_shards_as_input_keep_their_classes(videos: Path, dataset: Path, tmp_path: Path) -> None:
    make(dataset, tmp_path / "again", "--encode", "copy")
    before, after = read_dataset_info(dataset), read_dataset_info(tmp_path / "again")
    assert after.classes == before.classes
    assert after.report["class_histogram"] == before.report["class_histogram"]


def test_a_folder_that_cannot_be_listed_is_named(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refuse(path: str) -> Any:  # root may list everything, so permissions alone show nothing here
        if Path(path).name == "walk":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"clips/walk cannot be listed \(Permission denied\)"):
        read_inputs(str(clips))


LABELS = [  # of the input, and the classes that are known: those keep their ids
    ("0 a b", "b", "b 0 a"), ("2 0", "", "0 1 2"), ("1 2 3", "", "1 2 3"), ("4 1", "0 1 2", "0 1 2 3 4"),
    ("4 1", "1 0", "1 0 4"), ("9" * 5000, "", "9" * 5000), ("1 999999999", "", "1 999999999"),
    ("00 01 02", "", "00 01 02"), ("", "", ""),
]  # fmt: skip


def test_class_ids_are_stable_and_numbers_are_ids_if_they_have_few_gaps() -> None:
    for labels, known, classes in LABELS:
        assert assign_class_ids({*labels.split()}, known.split()) == classes.split()


@pytest.mark.parametrize("content", ["[1", '{"a": "x"}', '{"a": 0, "b": 2}', "3"])
def test_bad_label_maps(tmp_path: Path, content: str) -> None:
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(InputError, match="not a label map"):
        read_label_map(tmp_path / "map.json")


def test_what_a_folder_holds_besides_videos_is_counted_by_kind(clips: Path) -> None:
    for name in (".hidden.mp4", ".cache/x.mp4", "run/a.json", "run/b.JSON", "readme", "x.tar"):
        (clips / name).parent.mkdir(exist_ok=True)
        (clips / name).touch()
    (clips / "z").symlink_to(clips / "run")
    skipped = Skipped()
    assert len(read_inputs(str(clips), skipped=skipped)) == 5
    assert skipped.total == 7
    assert sorted(skipped.lines()) == [
        "skipped 1 folders that were seen under another name: z",
        "skipped 1 tars, which are read only where no videos lie beside them: x.tar",
        "skipped 1 without a video's extension (none 1): readme",
        "skipped 2 hidden: .cache/, .hidden.mp4",
        "skipped 2 tables and texts: give a list of videos itself as INPUT: run/a.json, run/b.JSON",
    ]
    skipped.write(clips / "skipped.jsonl")
    row = '{"source": "readme", "reason": "skipped: without a video\'s extension"}'
    assert row in (clips / "skipped.jsonl").read_text()


def test_object_storage_is_listed_with_labels_and_counts_what_it_skips() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a.mp4", "run/b.webm", "a::b.mp4", ".cache/c.mp4", "readme.txt"):
        memory.pipe(f"/mixed/{name}", b"12345")
    skipped = Skipped()
    items = list(read_inputs("memory://mixed", skipped=skipped))
    assert [(it.source, it.label, it.size) for it in items] == [
        (it, None, 5) for it in ("a.mp4", "a::b.mp4", "run/b.webm")
    ]
    assert [(item.problem or "")[:17] for item in items] == ["", "its name holds ::", ""]
    assert all(str(item.location).startswith("memory://") for item in items)
    assert dict(skipped.counts) == {"hidden": 1, "tables and texts: give a list of videos itself as INPUT": 1}
    memory.pipe("/mixed/walk/d.mp4", b"12345")
    memory.pipe("/mixed/walk/e.mp4", b"12345")
    labels = {item.source: item.label for item in read_inputs("memory://mixed")}
    assert labels == {"a.mp4": None, "a::b.mp4": None, "run/b.webm": "run", "walk/d.mp4": "walk", "walk/e.mp4": "walk"}


KINETICS = "label,youtube_id,time_start,time_end\n,run/a,,\n"
HEADER = "label,path\nrun,run/a.mp4\n"
ROW = "run/a.mp4,run\n"
BAD_LINES = [
    "run/a.mp4 run\n" + "x" * 5000, "run/a.mp4 run\n" + "x" * 300 + " run", ROW + "x" * 300 + ",run",
    ROW + "x" * 200_000 + ",run", ROW + ",run", ROW + "a\0b.mp4,run", ROW + "loop.mp4,run", HEADER + "run",
    KINETICS + "run,,0,10", KINETICS + "run," + "x" * 300 + ",1e400,10",
    *(f'[{{"path": "run/a.mp4"}}, {{"path": "{path}"}}]'
      for path in ("\\ud800.mp4", "\\u0000.mp4", "http://nowhere/\\ud800.mp4")),
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_line_that_can_be_no_file_is_rejected_and_the_rest_goes_on(clips: Path, text: str) -> None:
    (clips / "loop.mp4").symlink_to(clips / "loop.mp4")
    (clips / "list").write_text(text + "\n")
    items = list(read_inputs(str(clips / "list"), ListOptions(unlabeled=True)))
    assert [item.source for item in items if item.problem is None] == ["run/a.mp4"]
    assert len([item for item in items if item.problem]) == 1


def test_only_a_newline_ends_a_line_and_a_list_on_stdin_may_hold_any_bytes(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["run/a\x1cb.mp4", "run/a\u2028b.mp4", "run/a\x85b.mp4", os.fsdecode(b"caf\xe9.mp4")]
    for name in names:
        (clips / name).touch()
    lines = b"".join(os.fsencode(name) + b"\n" for name in names)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    items = read_inputs("-", ListOptions(root=str(clips)))
    assert sorted((item.source, item.problem) for item in items) == sorted((name, None) for name in names)


def test_names_with_colons_are_plain_files(videos: Path, tmp_path: Path) -> None:
    names = ["a:b.mp4", "a::b.mp4", "::.mp4", "x::1:2:y.mp4", "s3:/a.mp4"]
    for name in names:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(next(videos.rglob("*.mp4")), path)
    for number, item in enumerate(read_inputs(str(tmp_path / "in"), ListOptions(unlabeled=True))):
        stem = tmp_path / str(number)
        job = Job(item.location, {stem: Entry(item.source)}, Settings(encode="copy"))
        assert process_job(job) is None
        outcome = read_outcome(stem)
        assert outcome is not None
        assert [path for _, path in outcome.samples] == [tmp_path / "in" / item.source], "the file itself, not a copy"
        (tmp_path / "in" / item.source).unlink()
        assert process_job(job) is None
        assert read_outcome(stem) == Outcome(Entry(item.source), [], "there is no such file")


def test_files_are_looked_into_where_their_names_do_not_tell(tmp_path: Path, generate) -> None:
    video = generate("--num-frames", "4").read_bytes()
    (tmp_path / "in").mkdir()
    for name in ("noextension", "camera.dat", "v.insv", "photo.jpg", "notes.md", "cut.xyz"):
        (tmp_path / "in" / name).write_bytes(b"# no video" if name == "notes.md" else video)
    (tmp_path / "in" / "cut.xyz").write_bytes(video[:300])
    skipped = Skipped()
    found = read_inputs(str(tmp_path / "in"), skipped=skipped)
    assert [item.source for item in found] == ["camera.dat", "noextension", "v.insv"]
    assert skipped.total == 3
