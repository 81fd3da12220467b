"""Tars of videos: whatever is in one ends as an item, with a reason if need be, or is counted."""

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from shard_making import all_samples, make

from common.errors import InputError
from shard_tools.inputs import Item, Skipped, read_inputs

SPARSE_PAX = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,5", "GNU.sparse.size": "9999"}


def packed(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            add(tar, name, content)
    return path


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **changes: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for attribute, value in changes.items():
        setattr(member, attribute, value)
    tar.addfile(member, io.BytesIO(content))


def by_source(path: Path, skipped: Skipped | None = None) -> dict[str, Item]:
    return {item.source: item for item in read_inputs(str(path), skipped=skipped)}


LABELS = {
    "./a.mp4": "./a.cls", "b.left.mp4": "b.cls", "c.left.mp4": "c.left.cls", "v1.0/d.mp4": "v1.0/d.cls",
    "v1.0/e.f/g.h.WEBM": "v1.0/e.f/g.json", "in/folders/i.mp4": "in/folders/i.cls",
}  # fmt: skip


def test_every_name_that_webdataset_reads_is_a_video_with_its_label(tmp_path: Path) -> None:
    members = []
    for number, (video, label) in enumerate(LABELS.items()):
        text = json.dumps({"label": f"class {number}"}) if label.endswith("json") else f"class {number}"
        members += [(video, video.encode()), (label, text.encode())]
    items = by_source(packed(tmp_path / "x.tar", members))
    names = [name.removeprefix("./") for name in LABELS]
    labels = {f"x.tar/{name}": f"class {number}" for number, name in enumerate(names)}
    assert {source: item.label for source, item in items.items()} == labels
    assert not any(item.problem for item in items.values())


def test_a_folder_of_tars_beside_somebody_elses_description(tmp_path: Path) -> None:
    for name in "ab":
        packed(tmp_path / f"{name}.tar", [(f"{name}.mp4", b"video"), (f"{name}.cls", b"left")])
    (tmp_path / "dataset.json").write_text('{"name": "somebody else\'s"}')
    labels = {source: item.label for source, item in by_source(tmp_path).items()}
    assert labels == {"a.tar/a.mp4": "left", "b.tar/b.mp4": "left"}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_longer_than_a_files_and_with_any_byte(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: int
) -> None:
    content = next(videos.rglob("*.mp4")).read_bytes()
    names = ["x" * 300, "deep/" * 80 + "a", "a:b::c", "caf\udce9", "日本", "line\nbreak\x1b"]
    names = [f"{name}.mp4" for name in names]
    tar = packed(tmp_path / "a::b.tar", [(name, content + bytes([number])) for number, name in enumerate(names)], form)
    assert make(tar, tmp_path / "out", "--encode", "copy") == 0
    assert {sample.source for _, sample in all_samples(tmp_path / "out")} == {f"{tar.name}/{name}" for name in names}


def test_members_that_are_no_files_are_rejected_each_with_its_reason(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "good.mp4", b"good")
        add(tar, "symbolic.mp4", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "hard.mp4", type=tarfile.LNKTYPE, linkname="good.mp4")
        add(tar, "pipe.mp4", type=tarfile.FIFOTYPE)
        add(tar, "sparse.mp4", b"12345", pax_headers=SPARSE_PAX)
        add(tar, "twice.mp4", b"one")
        add(tar, "./twice.mp4", b"two")
        add(tar, "folder.mp4", type=tarfile.DIRTYPE)
        add(tar, "folder.mp4/inside.mp4", b"inside")
    items = by_source(tmp_path / "x.tar")
    assert {source.removeprefix("x.tar/"): item.problem for source, item in items.items()} == {
        "good.mp4": None,
        "symbolic.mp4": "it is a link to /etc/passwd: put the file itself into the tar",
        "hard.mp4": "it is a link to good.mp4: put the file itself into the tar",
        "pipe.mp4": "it is a device or a pipe, not a video file",
        "sparse.mp4": "it is stored as a sparse file: pack it without --sparse",
        "twice.mp4": "the tar holds several of this name",
        "folder.mp4/inside.mp4": None,
    }


def test_members_are_looked_into_where_their_names_do_not_tell(videos: Path, tmp_path: Path) -> None:
    video = next(videos.rglob("*.mp4")).read_bytes()
    names = ["noextension", "camera.dat", ".hidden.mp4", "MAC/._a.mp4", "a.jpg", "notes.html", "readme", "a.cls"]
    members = [(name, b"# no video" if name in ("readme", "a.cls") else video + bytes([0])) for name in names]
    skipped = Skipped()
    items = by_source(packed(tmp_path / "x.tar", members), skipped)
    assert list(items) == ["x.tar/camera.dat", "x.tar/noextension"]
    assert skipped.lines() == [
        "skipped 2 hidden: x.tar/.hidden.mp4, x.tar/MAC/._a.mp4",
        "skipped 1 pictures: convert animated ones to .mp4; numbered frames lie in a folder of their own: x.tar/a.jpg",
        "skipped 2 without a video's extension (.html 1, none 1): x.tar/notes.html, x.tar/readme",
    ]
    for mode in ("h264", "copy"):
        assert make(tmp_path / "x.tar", tmp_path / mode, "--encode", mode) == 0
        assert {sample.source for _, sample in all_samples(tmp_path / mode)} == set(items)


def negative_size(data: bytes) -> bytes:
    member = tarfile.TarInfo("b.mp4")
    member.size = -1024
    return data[:1024] + member.tobuf(tarfile.GNU_FORMAT) + data[1536:]


def endless_headers(data: bytes) -> bytes:
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    return header.tobuf() * 3000


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "compressed": (gzip.compress, r"x\.tar is compressed \(gzip\): unpack it"),
    "cut in a video": (lambda data: data[:2000], r"x\.tar is not a complete tar file"),
    "cut in a header": (lambda data: data[:1300], r"x\.tar is not a complete tar file \(no header at byte 1024\)"),
    "cut between members": (lambda data: data[:1024], r"x\.tar is not a complete tar file \(no end-of-archive marker"),
    "impossible checksum": (
        lambda data: data[: 1024 + 148] + b"7777777\0" + data[1024 + 156 :], r"x\.tar .* \(no header at byte 1024\)"
    ),
    "negative size": (  # which Python 3.14 takes for no header
        negative_size, r"x\.tar is not .* \((b\.mp4 would have -1024 bytes|no header at byte 1024)\)"
    ),
    "joined": (lambda data: data * 2, r"x\.tar contains data after the end-of-archive marker at byte 4608"),
    "endless headers": (endless_headers, r"x\.tar is not a complete tar file"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tar_that_cannot_be_read_to_its_end_is_refused(tmp_path: Path, damage: str) -> None:
    path = packed(tmp_path / "x.tar", [("a.mp4", b"a"), ("b.mp4", bytes(2000)), ("c.mp4", b"c")])
    change, sentence = DAMAGES[damage]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=sentence) as refused:
        read_inputs(str(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", ["99", "-1", '"left"'])
def test_a_label_that_is_no_class_of_the_shards_costs_its_video(dataset: Path, tmp_path: Path, wrong: str) -> None:
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    with tarfile.open(dataset / "shard-000000.tar") as source:
        members = [(member.name, source.extractfile(member).read()) for member in source]  # type: ignore[union-attr]
    members[0] = members[0][0], f'{{"label": {wrong}}}'.encode()
    items = by_source(packed(tmp_path / "shard-000000.tar", members)).values()
    (problem,) = (item.problem for item in items if item.problem)
    assert "is none of the dataset's 3 classes" in problem
    assert {item.label for item in items if not item.problem} <= {"down", "left", "right"}
