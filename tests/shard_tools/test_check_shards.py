"""Checks of shards: any single edit of a dataset is found and named."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from shard_making import all_samples, flip, hashes

from adamae.common.errors import InputError
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import SAMPLE, SHARD
from adamae.pipeline.shards.gops import GOP
from adamae.pipeline.shards.read_format import read_dataset_info
from adamae.shard_tools import check_shards


@pytest.fixture
def copied(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copied"))


def check(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Return the exit code of check_shards and what it prints."""
    code = check_shards.main([str(folder), "--workers", "1", *options])
    return code, capsys.readouterr().out


def test_whole_shards_pass(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(dataset, capsys) == (0, "3 shards checked, 9 videos decoded, 0 problems\n")


def test_what_is_wrong_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "shard-000001.tar").unlink()
    first = copied / "shard-000000.tar"
    first.write_bytes(first.read_bytes()[:-1024])
    shard, sample = all_samples(copied)[7]
    change_bytes(shard, lambda data: flip(data, [sample.offset + sample.size - 40]))(copied)
    change_description(classes=["down", "left"])(copied)
    code, output = check(copied, capsys, "--decode", "0")
    assert code == 1
    assert "shard-000001.tar is missing\n" in output
    assert "shard-000000.tar: its bytes have changed since it was written\n" in output
    assert f"{shard}: its bytes have changed since it was written\n" in output
    assert f"{shard}: {sample.key}: the video's bytes have changed\n" in output
    assert "dataset.json has changed since it was written\n" in output
    unknown = [other for name, other in all_samples(copied) if name == shard and other.label == 2]
    assert unknown
    for other in unknown:
        assert f"{shard}: {other.key}: label 2, but there are 2 classes\n" in output


# Changes a dataset in a folder.
Edit = Callable[[Path], None]


def change_table(name: str, column: str, row: int = 4) -> Edit:
    """Return an edit that flips the lowest bit of one value of a table."""

    def change(data: bytes) -> bytes:
        rows = np.load(io.BytesIO(data))
        _, offset_in_row = rows.dtype.fields[column]
        header_bytes = len(data) - rows.nbytes
        return flip(data, [header_bytes + row * rows.itemsize + offset_in_row], 1)

    return change_bytes(f"{name}-*.npy", change)


def change_lines(change: Callable[[list[bytes]], list[bytes]]) -> Edit:
    """Return an edit of the lines of a samples.jsonl."""

    def change_data(data: bytes) -> bytes:
        return b"".join(change(data.splitlines(keepends=True)))

    return change_bytes("shard-000001.samples.jsonl", change_data)


def change_line(name: str, value: object, line: int = 1) -> Edit:
    """Return an edit of one value of a sample in the samples.jsonl of its shard."""

    def change(lines: list[bytes]) -> list[bytes]:
        values = json.loads(lines[line])
        values[name] = value
        lines[line] = json.dumps(values).encode() + b"\n"
        return lines

    return change_lines(change)


def change_bytes(pattern: str, change: Callable[[bytes], bytes]) -> Edit:
    """Return an edit of the last file of a pattern, which must change it."""

    def edit(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[-1]
        data = change(path.read_bytes())
        assert data != path.read_bytes()
        path.write_bytes(data)

    return edit


def change_description(**values: object) -> Edit:
    """Return an edit of some entries of dataset.json."""

    def change(data: bytes) -> bytes:
        return json.dumps({**json.loads(data), **values}).encode()

    return change_bytes("dataset.json", change)


def remove(pattern: str) -> Edit:
    """Return an edit that removes the last file of a pattern."""

    def edit(folder: Path) -> None:
        sorted(folder.glob(pattern))[-1].unlink()

    return edit


def swap(lines: list[bytes]) -> list[bytes]:
    """Swap the first two lines."""
    return [lines[1], lines[0], *lines[2:]]


def swap_names(data: bytes) -> bytes:
    return b"".join(swap(data.splitlines(keepends=True)))


def link_to_itself(folder: Path) -> None:
    (folder / "dataset.json").unlink()
    (folder / "dataset.json").symlink_to("dataset.json")


# The size of a tar's member in base 256, which is how tar writes what octal digits cannot hold.
HUGE = b"\x80\0\0\0\x7f" + b"\xff" * 7
TABLES = ("samples", "shards", "gops", "names")
# Another value for every field that a line of samples.jsonl has.
LINE: dict[str, object] = {
    "key": "other",
    "container": "webm",
    "codec": "hevc",
    "num_frames": 4,
    "fps": 7.0,
    "frame_stride": 1,
    "width": 48,
    "height": 48,
    "labels": None,
    "source": "right/else.mp4",
    "sha256": 64 * "0",
    "offset": 512,
    "size": 5,
    "source_sha256": 64 * "1",
    "source_size": 7,
    "gops": "",
}
EDITS: dict[str, Edit] = {
    **{f"samples: {name}": change_table("samples", name) for name in SAMPLE.names or ()},
    **{f"shards: {name}": change_table("shards", name, row=1) for name in SHARD.names or ()},
    **{f"gops: {name}": change_table("gops", name) for name in GOP.names or ()},
    **{f"{name}: gone": remove(f"{name}-*") for name in TABLES},
    **{f"line: {name}": change_line(name, value) for name, value in LINE.items()},
    "samples: cut": change_bytes("samples-*", lambda data: data[:-1]),
    "shards: cut": change_bytes("shards-*", lambda data: data[:-1]),
    "gops: cut": change_bytes("gops-*", lambda data: data[:-1]),
    "samples: 10^20 rows": change_bytes(
        "samples-*", lambda data: data.replace(b"(9,)", b"(9" + b"9" * 20 + b",)")
    ),
    "samples: zeros": change_bytes("samples-*", lambda data: data[:-600] + bytes(600)),
    "names: a key": change_bytes(
        "names-*", lambda data: data.replace(b"video_000004", b"video_000009")
    ),
    "names: a source": change_bytes("names-*", lambda data: data.replace(b"left/", b"LEFT/", 1)),
    "names: lines swapped": change_bytes("names-*", swap_names),
    "names: overwritten": change_bytes(
        "names-*", lambda data: data[:20] + bytes(range(80)) + data[100:]
    ),
    "line: gone": change_lines(lambda lines: lines[:-1]),
    "line: twice": change_lines(lambda lines: [*lines, lines[0]]),
    "lines: in another order": change_lines(swap),
    "line: blank": change_lines(lambda lines: [lines[0], b"\n", *lines[1:]]),
    "line: a byte order mark": change_lines(lambda lines: [b"\xef\xbb\xbf" + lines[0], *lines[1:]]),
    "line: broken": change_lines(lambda lines: [lines[0], lines[1][:-9] + b"\n", *lines[2:]]),
    "tar: a byte of a video": change_bytes("*1.tar", lambda data: flip(data, [3000])),
    "tar: a label": change_bytes(
        "*.tar", lambda data: data.replace(b'"labels": [', b'"labels": [1', 1)[: len(data)]
    ),
    "tar: the name of a member": change_bytes(
        "*.tar", lambda data: data.replace(b".mp4\0", b".mp5\0", 1)
    ),
    "tar: cut": change_bytes("*.tar", lambda data: data[:-512]),
    "tar: longer": change_bytes("*.tar", lambda data: data + bytes(512)),
    "tar: gone": remove("*.tar"),
    "tar: a member of 8 EiB": change_bytes(
        "*.tar", lambda data: data[:124] + HUGE + data[124 + len(HUGE) :]
    ),
    "tar: of another shard": lambda folder: shutil.copy(
        folder / "shard-000000.tar", folder / "shard-000002.tar"
    ),
    "table of a shard: gone": remove("*.samples.jsonl"),
    "description: classes in another order": change_description(classes=["left", "down", "right"]),
    "description: samples": change_description(num_samples=8),
    "description: a huge count": change_description(num_samples=10**30),
    "description: one class": change_description(classes=["a"]),
    "description: another report": change_description(report={}),
    "description: gone": remove("dataset.json"),
    "description: a link to itself": link_to_itself,
    "description: in UTF-16": change_bytes(
        "dataset.json", lambda data: data.decode().encode("utf-16")
    ),
    "description: nested too deep": change_bytes(
        "dataset.json", lambda data: data[:-2] + b',"a":' + b"[" * 10**5
    ),
    "description: strides": change_description(frame_strides=[2, 4]),
    "description: settings": change_description(encode={}),
}


def read_all(shards: Path) -> list[object]:
    """Return the samples that the loader does not pass over."""
    return [sample for sample in ShardDataset.open(shards).samples if not sample.problem]


@pytest.mark.parametrize("edit", EDITS)
def test_any_single_edit_is_found_and_never_misread(
    copied: Path, capsys: pytest.CaptureFixture[str], edit: str
) -> None:
    intact = read_all(copied)
    EDITS[edit](copied)
    try:
        code, output = check(copied, capsys, "--decode", "1")
    except InputError as error:
        code = 1
        output = str(error)
    assert code == 1
    assert output.count("\n") < 20
    with contextlib.suppress(InputError):
        assert all(sample in intact for sample in read_all(copied))


def test_what_decodes_is_compared(copied: Path) -> None:
    for name, value in {"num_frames": 4, "height": 48, "codec": "hevc", "fps": 7.4}.items():
        change_line(name, value, line=2)(copied)
    info = read_dataset_info(copied)
    _, videos = check_shards.check_shard(copied, info.shards[1], len(info.classes))
    differences = [
        "its num_frames is 5 instead of 4",
        "its height is 64 instead of 48",
        "its codec is h264 instead of hevc",
        "its fps is 7.5 instead of 7.4",
    ]
    assert check_shards.check_video(videos[2]) == "; ".join(differences)


def test_damaged_tables_can_be_rewritten(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = hashes(copied)
    for name in ("samples", "gops", "names"):
        remove(f"{name}-*")(copied)
    code, _ = check(copied, capsys, "--decode", "0", "--rewrite-tables")
    assert code == 0
    assert hashes(copied) == before
