"""Everything that a collection of videos comes as."""

import gzip
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from shard_making import all_samples, hashes, make, make_folder

from adamae.common.errors import InputError
from adamae.pipeline.shards.read_format import read_dataset_info
from adamae.shard_tools.inputs import (
    Item,
    ListOptions,
    assign_class_ids,
    read_inputs,
    read_label_map,
    tars,
)
from adamae.shard_tools.settings import Settings
from adamae.shard_tools.work import Job, process_job, read_staged


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Return a folder of files that only have names: enough for finding and labeling them."""
    names = ("run/a.mp4", "run/b c.mp4", "walk/d.webm", "e.mp4", "74225.webm")
    return make_folder(tmp_path / "clips", dict.fromkeys(names, "x"))


def test_urls(videos: Path, dataset: Path, tmp_path: Path) -> None:
    make(f"local://{videos}", tmp_path / "url", "--samples-per-shard", "3")
    assert hashes(tmp_path / "url") == hashes(dataset)
    video = next(videos.rglob("*.mp4"))
    (tmp_path / "list.csv").write_text(f"local://{video},here\nlocal:///nowhere.mp4,here\n")
    make(tmp_path / "list.csv", tmp_path / "list")
    info = read_dataset_info(tmp_path / "list")
    assert info.num_samples == 1
    assert info.num_rejected == 1


def test_a_folder_that_cannot_be_listed_is_named(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may list everything, so permissions alone show nothing here.
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"clips cannot be listed \(Permission denied\)"):
        read_inputs(str(clips))


# Labels of the input, classes that the dataset has, which keep their ids, and all classes by id.
LABELS = [
    ("0 a b", "b", "b 0 a"),
    ("2 0", "", "0 1 2"),
    ("1 2 3", "", "1 2 3"),
    ("4 1", "0 1 2", "0 1 2 3 4"),
    ("4 1", "1 0", "1 0 4"),
    ("9" * 5000, "", "9" * 5000),
    ("1 999999999", "", "1 999999999"),
    ("00 01 02", "", "00 01 02"),
    ("", "", ""),
]


def test_class_ids_are_stable_and_numbers_are_ids_if_they_have_few_gaps() -> None:
    for labels, known, classes in LABELS:
        assert assign_class_ids({*labels.split()}, known.split()) == classes.split()


@pytest.mark.parametrize("content", ["[1", '{"a": "x"}', '{"a": 0, "b": 2}', "3"])
def test_bad_label_maps(tmp_path: Path, content: str) -> None:
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(InputError, match="not a label map"):
        read_label_map(tmp_path / "map.json")


def test_what_a_folder_holds_besides_videos_is_counted_by_kind(clips: Path) -> None:
    names = (".hidden.mp4", ".cache/x.mp4", "run/a.json", "run/b.JSON", "readme", "x.tar")
    make_folder(clips, dict.fromkeys(names, ""))
    (clips / "z").symlink_to(clips / "run")
    inputs = read_inputs(str(clips))
    assert len(inputs) == 5
    skipped = {}
    for line in inputs.skipped.lines():
        kind = line.removeprefix("skipped ").partition(":")[0]
        skipped[kind] = line.rpartition(": ")[2]
    assert skipped == {
        "1 folders that were seen under another name": "z",
        "2 hidden or system files": ".cache/, .hidden.mp4",
        "1 tars, which are read only where no videos lie beside them": "x.tar",
        "1 without a video's extension": "readme",
        "2 tables and texts": "run/a.json, run/b.JSON",
    }


def test_object_storage_is_listed_with_labels_and_counts_what_it_skips() -> None:
    memory = fsspec.filesystem("memory")
    videos = ("a.mp4", "run/b.webm", "a::b.mp4", "walk/d.mp4", "walk/e.mp4")
    for name in (*videos, ".cache/c.mp4", "readme.txt"):
        memory.pipe(f"/mixed/{name}", b"12345")
    inputs = read_inputs("memory://mixed")
    items = {item.source: item for item in inputs}
    labels = {
        "a.mp4": None,
        "a::b.mp4": None,
        "run/b.webm": "run",
        "walk/d.mp4": "walk",
        "walk/e.mp4": "walk",
    }
    assert {source: item.label for source, item in items.items()} == labels
    problems = [item.problem for item in items.values() if item.problem]
    assert [problem[:17] for problem in problems] == ["it has no label, ", "its name holds ::"]
    for item in items.values():
        assert item.size == 5
        assert str(item.location).startswith("memory://")
    assert inputs.skipped.counts == {
        "hidden or system files": 1,
        "tables and texts: give a list of videos itself as INPUT": 1,
    }


KINETICS = "label,youtube_id,time_start,time_end\n,run/a,,\n"
HEADER = "label,path\nrun,run/a.mp4\n"
ROW = "run/a.mp4,run\n"
# Each has one good line.
BAD_LINES = [
    "run/a.mp4 run\n" + "x" * 5000 + " run",
    "run/a.mp4 run\n" + "x" * 300 + " run",
    ROW + "x" * 300 + ",run",
    ROW + "x" * 200_000 + ",run",
    ROW + ",run",
    ROW + "a\0b.mp4,run",
    ROW + "loop.mp4,run",
    HEADER + "run",
    KINETICS + "run,,0,10",
    KINETICS + "run," + "x" * 300 + ",1e400,10",
    '[{"path": "run/a.mp4"}, {"path": "\\ud800.mp4"}]',
    '[{"path": "run/a.mp4"}, {"path": "\\u0000.mp4"}]',
    '[{"path": "run/a.mp4"}, {"path": "http://nowhere/\\ud800.mp4"}]',
]


@pytest.mark.parametrize("text", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_line_that_can_be_no_file_is_rejected_and_the_rest_goes_on(
    clips: Path, text: str
) -> None:
    (clips / "loop.mp4").symlink_to(clips / "loop.mp4")
    (clips / "list").write_text(text + "\n")
    items = list(read_inputs(str(clips / "list"), ListOptions(unlabeled=True)))
    assert [item.source for item in items if item.problem is None] == ["run/a.mp4"]
    assert len([item for item in items if item.problem]) == 1


def test_only_a_newline_ends_a_line_and_a_list_may_hold_any_bytes(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["run/a\x1cb.mp4", "run/a\u2028b.mp4", "run/a\x85b.mp4", os.fsdecode(b"caf\xe9.mp4")]
    make_folder(clips, dict.fromkeys(names, ""))
    path = clips / "list"
    path.write_bytes(b"".join(os.fsencode(name) + b"\n" for name in names))
    with path.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file, encoding="utf-8"))
        from_stdin = list(read_inputs("-", ListOptions(root=str(clips))))
    for items in (list(read_inputs(str(path))), from_stdin):
        assert sorted(item.source for item in items) == sorted(names)
        assert not any(item.problem for item in items)


def test_names_with_colons_are_plain_files(videos: Path, tmp_path: Path) -> None:
    names = ["a:b.mp4", "a::b.mp4", "::.mp4", "x::1:2:y.mp4", "s3:/a.mp4"]
    make_folder(tmp_path / "in", dict.fromkeys(names, next(videos.rglob("*.mp4")).read_bytes()))
    assert make(tmp_path / "in", tmp_path / "out", "--encode", "copy", "--unlabeled") == 0
    assert {sample.source for _, sample in all_samples(tmp_path / "out")} == {*names}
    path = str(tmp_path / "in" / names[0])
    job = Job(path, {tmp_path / "0": Item(names[0])}, Settings(encode="copy"))
    assert process_job(job) is None
    assert read_staged(tmp_path / "0").stored.path == job.location, "the file itself, not a copy"
    Path(job.location).unlink()
    assert process_job(job) is None
    assert read_staged(tmp_path / "0") == Item(names[0], problem="there is no such file")


SPARSE_PAX = {
    "GNU.sparse.major": "0",
    "GNU.sparse.minor": "1",
    "GNU.sparse.map": "0,5",
    "GNU.sparse.size": "9999",
}


def pack(path: Path, members: Iterable[tuple[Any, ...]], form: int = tarfile.GNU_FORMAT) -> Path:
    """Write a tar of members (name, content, and attributes of the header), and return its path."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, content, *changes in members:
            tar.addfile(make_header(name, len(content), *changes), io.BytesIO(content))
    return path


def make_header(name: str, size: int, changes: dict[str, object] | None = None) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    for attribute, value in (changes or {}).items():
        setattr(info, attribute, value)
    return info


def read_items(path: Path) -> dict[str, Item]:
    """Return the items of an input by their sources; folders that may be classes are none."""
    return {item.source: item for item in read_inputs(str(path), ListOptions(asks=False))}


# Videos in a tar, and the members that hold their labels.
LABELED = {
    "./a.mp4": "./a.cls",
    "b.left.mp4": "b.cls",
    "c.left.mp4": "c.left.cls",
    "v1.0/d.mp4": "v1.0/d.cls",
    "v1.0/e.f/g.h.WEBM": "v1.0/e.f/g.json",
    "in/folders/i.mp4": "in/folders/i.cls",
}


def test_every_name_that_webdataset_reads_is_a_video_with_its_label_in_one_tar_or_more(
    tmp_path: Path,
) -> None:
    members = [(name, name.encode()) for name in LABELED]
    labels = {}
    for number, (video, sidecar) in enumerate(LABELED.items()):
        label = f"class {number}"
        labels[f"x.tar/{video.removeprefix('./')}"] = label
        text = f'{{"label": "{label}"}}' if sidecar.endswith("json") else label
        members.append((sidecar, text.encode()))
    tar = pack(tmp_path / "x.tar", members)
    pack(tmp_path / "y.tar", [("run.mp4", b"video"), ("run.cls", b"left")])
    # video2dataset writes these beside its tars.
    make_folder(tmp_path, {"y.parquet": "PAR1", "dataset.json": '{"name": "another set"}'})
    for inputs, expected in ((tar, labels), (tmp_path, labels | {"y.tar/run.mp4": "left"})):
        items = read_items(inputs).values()
        assert {item.source: item.label for item in items if not item.problem} == expected


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_longer_than_a_files_and_with_any_byte(
    videos: Path, tmp_path: Path, form: int
) -> None:
    content = next(videos.rglob("*.mp4")).read_bytes()
    names = ["x" * 300, "deep/" * 80 + "a", "a:b::c", "caf\udce9", "日本", "line\nbreak\x1b"]
    names = [f"{name}.mp4" for name in names]
    # The last byte makes them different videos.
    members = [(name, content + bytes([number])) for number, name in enumerate(names)]
    tar = pack(tmp_path / "a::b.tar", members, form)
    assert make(tar, tmp_path / "out", "--encode", "copy", "--unlabeled") == 0
    sources = {sample.source for _, sample in all_samples(tmp_path / "out")}
    assert sources == {f"{tar.name}/{name}" for name in names}


# Attributes of the header of each member, and how its problem begins.
MEMBERS: dict[str, tuple[dict[str, object], str | None]] = {
    "good.mp4": ({}, None),
    "symbolic.mp4": (
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        "it is a link to /etc/passwd: put the file",
    ),
    "hard.mp4": (
        {"type": tarfile.LNKTYPE, "linkname": "good.mp4"},
        "it is a link to good.mp4: put the file itself",
    ),
    "pipe.mp4": ({"type": tarfile.FIFOTYPE}, "it is a device or a pipe, not a video file"),
    "sparse.mp4": (
        {"pax_headers": SPARSE_PAX},
        "it is stored as a sparse file: pack it without --sparse",
    ),
    "twice.mp4": ({}, "the tar holds several of this name"),
    "./twice.mp4": ({}, "the tar holds several of this name"),
    "folder.mp4": ({"type": tarfile.DIRTYPE}, None),
    "folder.mp4/inside.mp4": ({}, None),
}


def test_members_that_are_no_files_are_rejected_each_with_its_reason(tmp_path: Path) -> None:
    members = []
    for name, (changes, _) in MEMBERS.items():
        members.append((name, b"" if "type" in changes else b"12345", changes))
    items = read_items(pack(tmp_path / "x.tar", members, tarfile.PAX_FORMAT))
    # The first is the same name as twice.mp4.
    expected = MEMBERS.keys() - {"./twice.mp4", "folder.mp4"}
    assert items.keys() == {f"x.tar/{name}" for name in expected}
    for name in expected:
        problem = items[f"x.tar/{name}"].problem or ""
        assert problem.startswith(MEMBERS[name][1] or ""), name


@pytest.mark.parametrize("extension", ["json", "cls", "txt"])
def test_a_sidecar_that_is_too_large_is_not_read_and_rejects_its_video(
    tmp_path: Path, extension: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tars, "MAX_SIDECAR_BYTES", 1000)
    members = [(f"{name}.mp4", b"video") for name in ("a", "b.1", "c")]
    members += [(f"b.{extension}", b" " * 1001), (f"c.{extension}", b" " * 1000)]
    items = read_items(pack(tmp_path / "x.tar", members))
    assert items["x.tar/a.mp4"].problem is None
    assert items["x.tar/c.mp4"].problem is None
    assert items["x.tar/b.1.mp4"].problem == f"its .{extension} has 1 kB, more than 1 kB"


@pytest.mark.parametrize("prefix", ["", "x.tar/"])
def test_files_are_looked_into_where_their_names_do_not_tell(
    videos: Path, tmp_path: Path, prefix: str
) -> None:
    video = next(videos.rglob("*.mp4")).read_bytes()
    names = [
        "noextension",
        "camera.dat",
        "v.insv",
        ".hidden.mp4",
        "MAC/._a.mp4",
        "a.jpg",
        "notes.html",
    ]
    files = {name: video + bytes([number]) for number, name in enumerate(names)}
    files |= {"readme": b"# no video", "cut.xyz": video[:300]}
    inputs = tmp_path / "x"
    if prefix:
        inputs = pack(tmp_path / "x.tar", files.items())
    else:
        make_folder(inputs, files)
    assert make(inputs, tmp_path / "out") == 0
    sources = {sample.source for _, sample in all_samples(tmp_path / "out")}
    assert sources == {prefix + name for name in ("camera.dat", "noextension", "v.insv")}
    reasons = {}
    for line in (tmp_path / "out/skipped.jsonl").read_text().splitlines():
        row = json.loads(line)
        reasons[row["source"].removeprefix(prefix)] = row["reason"].removeprefix("skipped: ")[:27]
    unknown = "without a video's extension"
    hidden = "hidden or system files"
    assert reasons == {
        "cut.xyz": unknown,
        "notes.html": unknown,
        "readme": unknown,
        "a.jpg": "pictures: convert animated ",
        ".hidden.mp4": hidden,
        "MAC/._a.mp4": hidden,
    }


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "compressed": (gzip.compress, r"x\.tar is compressed \(gzip\): unpack it"),
    "cut in a video": (lambda data: data[:2000], r"x\.tar is not a complete tar file"),
    "cut in a header": (
        lambda data: data[:1300],
        r"x\.tar is not a complete tar file \(no header at byte 1024\)",
    ),
    "cut between members": (
        lambda data: data[:1024],
        r"x\.tar is not a complete tar file \(no end-of-archive marker",
    ),
    "impossible checksum": (
        lambda data: data[: 1024 + 148] + b"7777777\0" + data[1024 + 156 :],
        r"x\.tar .* \(no header at byte 1024\)",
    ),
    # Python 3.14 takes a negative size for no header.
    "negative size": (
        lambda data: (
            data[:1024] + make_header("b.mp4", -1024).tobuf(tarfile.GNU_FORMAT) + data[1536:]
        ),
        r"x\.tar is not .* \((b\.mp4 would have -1024 bytes|no header at byte 1024)\)",
    ),
    "joined": (
        lambda data: data * 2,
        r"x\.tar contains data after the end-of-archive marker at byte 4608",
    ),
    "endless headers": (
        lambda data: make_header("x", 0, {"type": tarfile.XHDTYPE}).tobuf() * 3000,
        r"x\.tar is not a com",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tar_that_cannot_be_read_to_its_end_is_refused(tmp_path: Path, damage: str) -> None:
    path = pack(tmp_path / "x.tar", [("a.mp4", b"a"), ("b.mp4", bytes(2000)), ("c.mp4", b"c")])
    change, sentence = DAMAGES[damage]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=sentence) as refused:
        read_inputs(str(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", ["99", "-1", '"left"'])
def test_a_label_that_is_no_class_of_the_shards_costs_its_video(
    dataset: Path, tmp_path: Path, wrong: str
) -> None:
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    with tarfile.open(dataset / "shard-000000.tar") as source:
        members = [(info.name, source.extractfile(info).read()) for info in source]  # type: ignore[union-attr]
    name, _ = members[0]
    members[0] = (name, f'{{"label": {wrong}}}'.encode())
    items = read_items(pack(tmp_path / "shard-000000.tar", members).parent).values()
    (problem,) = (item.problem for item in items if item.problem)
    assert "is none of the dataset's 3 classes" in problem
    assert {item.label for item in items if not item.problem} <= {"down", "left", "right"}
