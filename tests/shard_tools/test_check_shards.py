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
    code = check_shards.main([str(folder), "--workers", "1", *options])
    return code, capsys.readouterr().out


def test_whole_shards_pass(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(dataset, capsys) == (0, "3 shards checked, 9 videos decoded, 0 problems\n")


def test_what_is_wrong_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "shard-000001.tar").unlink()
    (copied / "shard-000000.tar").write_bytes((copied / "shard-000000.tar").read_bytes()[:-1024])
    shard, sample = all_samples(copied)[7]
    change_bytes(shard, lambda data: flip(data, [sample.offset + sample.size - 40]))(copied)
    change_description(classes=["down", "left"])(copied)
    code, said = check(copied, capsys, "--decode", "0")
    assert code == 1
    assert "shard-000001.tar is missing\n" in said
    assert "shard-000000.tar: its bytes have changed since it was written\n" in said
    assert f"{shard}: its bytes have changed since it was written\n" in said
    assert f"{shard}: {sample.key}: the video's bytes have changed\n" in said
    lost = [sample for name, sample in all_samples(copied) if name == shard and sample.label == 2]
    assert lost
    assert all(
        f"{shard}: {sample.key}: label 2, but there are 2 classes\n" in said for sample in lost
    )
    assert "dataset.json has changed since it was written\n" in said


Edit = Callable[[Path], None]


def change_table(name: str, column: str, row: int = 4) -> Edit:
    """Flip the lowest bit of one value."""

    def changed(data: bytes) -> bytes:
        rows = np.load(io.BytesIO(data))
        return flip(
            data, [len(data) - rows.nbytes + rows.dtype.fields[column][1] + row * rows.itemsize], 1
        )

    return change_bytes(f"{name}-*.npy", changed)


def change_lines(change: Callable[[list[bytes]], list[bytes]]) -> Edit:
    return change_bytes(
        "shard-000001.samples.jsonl", lambda data: b"".join(change(data.splitlines(keepends=True)))
    )


def change_line(name: str, value: object, line: int = 1) -> Edit:
    """Change one value of a sample beside its shard."""

    def changed(lines: list[bytes]) -> list[bytes]:
        lines[line] = json.dumps({**json.loads(lines[line]), name: value}).encode() + b"\n"
        return lines

    return change_lines(changed)


def change_bytes(pattern: str, change: Callable[[bytes], bytes]) -> Edit:
    def edit(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[-1]
        data = change(path.read_bytes())
        assert data != path.read_bytes()
        path.write_bytes(data)

    return edit


def change_description(**values: object) -> Edit:
    return change_bytes(
        "dataset.json", lambda data: json.dumps({**json.loads(data), **values}).encode()
    )


def remove(pattern: str) -> Edit:
    return lambda folder: sorted(folder.glob(pattern))[-1].unlink()


def swap(lines: list[bytes]) -> list[bytes]:
    return [lines[1], lines[0], *lines[2:]]


def link_to_itself(folder: Path) -> None:
    (folder / "dataset.json").unlink()
    (folder / "dataset.json").symlink_to("dataset.json")


HUGE = b"\x80\0\0\0\x7f" + b"\xff" * 7  # bytes of a tar's member, in base 256
EDITS: dict[str, Edit] = {
    **{f"samples: {name}": change_table("samples", name) for name in SAMPLE.names or ()},
    **{f"shards: {name}": change_table("shards", name, 1) for name in SHARD.names or ()},
    **{f"gops: {name}": change_table("gops", name) for name in GOP.names or ()},
    "names: a key": change_bytes(
        "names-*", lambda data: data.replace(b"video_000004", b"video_000009")
    ),
    "names: lines swapped": change_bytes(
        "names-*", lambda data: b"".join(swap(data.splitlines(keepends=True)))
    ),
    "names: overwritten": change_bytes(
        "names-*", lambda data: data[:20] + bytes(range(80)) + data[100:]
    ),
    "samples: 10^20 rows": change_bytes(
        "samples-*", lambda data: data.replace(b"(9,)", b"(9" + b"9" * 20 + b",)")
    ),
    "samples: zeros": change_bytes("samples-*", lambda data: data[:-600] + bytes(600)),
    "names: a source": change_bytes("names-*", lambda data: data.replace(b"left/", b"LEFT/", 1)),
    **{
        f"{name}: cut": change_bytes(f"{name}-*", lambda data: data[:-1])
        for name in ("samples", "shards", "gops")
    },
    **{f"{name}: gone": remove(f"{name}-*") for name in ("samples", "shards", "gops", "names")},
    **{
        f"line: {name}": change_line(name, value)
        for name, value in {
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
        }.items()
    },
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
        code, said = check(copied, capsys, "--decode", "1")
    except InputError as error:
        code, said = 1, str(error)
    assert code == 1
    assert said.count("\n") < 20
    with contextlib.suppress(InputError):
        assert all(sample in intact for sample in read_all(copied))


def test_what_decodes_is_compared(copied: Path) -> None:
    for name, value in {"num_frames": 4, "height": 48, "codec": "hevc", "fps": 7.4}.items():
        change_line(name, value, line=2)(copied)
    info = read_dataset_info(copied)
    _, videos = check_shards.check_shard(copied, info.shards[1], len(info.classes))
    wrong = [
        "num_frames is 5 instead of 4",
        "height is 64 instead of 48",
        "codec is h264 instead of hevc",
    ]
    assert check_shards.check_video(videos[2]) == "; ".join(
        f"its {it}" for it in [*wrong, "fps is 7.5 instead of 7.4"]
    )


def test_damaged_tables_can_be_rewritten(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = hashes(copied)
    for name in ("samples", "gops", "names"):
        remove(f"{name}-*")(copied)
    assert check(copied, capsys, "--decode", "0", "--rewrite-tables")[0] == 0
    assert hashes(copied) == before
