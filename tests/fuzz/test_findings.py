"""What fuzzing has found, as plain tests; and some random cases, the same ones every time."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from shard_making import all_samples, decode, make, run_here, video_bytes

import visualize
from common.errors import DISK_ERRORS, InputError
from pipeline.shards.dataset import ShardDataset
from shard_tools import check_shards
from shard_tools.workers import ENGINES

ROOT = Path(__file__).parents[2]
VIDEOS = sorted((Path(__file__).parent / "findings").iterdir())


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def change_dataset(**values: object) -> Callable[[Path], object]:
    return rewrite(lambda data: json.dumps(json.loads(data) | values).encode())


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def change_column(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        table = np.load(path)
        table[name][1] += 1
        np.save(path, table)

    return change


def swap_lines(data: bytes) -> bytes:
    first, second, *others = data.split(b"\n")
    return b"\n".join([second, first, *others])


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "description lost": ("dataset.json", Path.unlink),
    "description links to itself": ("dataset.json", link_to_itself),
    "description in UTF-16": ("dataset.json", rewrite(lambda data: data.decode().encode("utf-16"))),
    "description nested too deep": ("dataset.json", rewrite(lambda data: data[:-2] + b',"a":' + b"[" * 10**5)),
    "description with another report": ("dataset.json", change_dataset(report={})),
    "description with other classes": ("dataset.json", change_dataset(classes=["a"])),
    "description with a huge count": ("dataset.json", change_dataset(num_samples=10**30)),
    "table of 10^20 rows": ("samples-*.npy", rewrite(lambda data: data.replace(b"(16,)", b"(9" + b"9" * 20 + b",)"))),
    "table with another label": ("samples-*.npy", change_column("label")),
    "table with zeros": ("samples-*.npy", rewrite(lambda data: data[:-600] + bytes(600))),
    "names in another order": ("names-*.jsonl", rewrite(swap_lines)),
    "names overwritten": ("names-*.jsonl", rewrite(lambda data: data[:20] + bytes(range(80)) + data[100:])),
    "samples with a blank line": ("*.samples.jsonl", rewrite(lambda data: data.replace(b"\n", b"\n\n", 1))),
    "samples with a byte order mark": ("*.samples.jsonl", rewrite(lambda data: b"\xef\xbb\xbf" + data)),
    "tar member of 8 EiB": ("*.tar", rewrite(lambda data: data[:124] + b"\x80\0\0\0\x7f" + b"\xff" * 7 + data[136:])),
    "shard lost": ("*.tar", Path.unlink),
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "processes", run_here)


@pytest.fixture
def shards(synthetic_shards: Path, tmp_path: Path) -> Path:
    return shutil.copytree(synthetic_shards, tmp_path / "shards")


@contextlib.contextmanager
def one_sentence_at_most() -> Iterator[None]:
    """Pass over the errors that commands end with in one sentence."""
    try:
        yield
    except InputError:
        pass
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise


def read_all(shards: Path) -> list[object]:
    """Return the samples that the loader does not pass over."""
    samples = ShardDataset.open(shards).samples
    return [sample for sample in map(samples.__getitem__, range(len(samples))) if not sample.problem]


@pytest.mark.parametrize(("files", "change"), DAMAGE.values(), ids=list(DAMAGE))
def test_damaged_shards_are_reported_and_never_misread(shards: Path, files: str, change: Callable) -> None:
    intact = read_all(shards)
    change(next(iter(sorted(shards.glob(files)))))
    with one_sentence_at_most():
        assert check_shards.main([str(shards), "--workers=1", "--decode=1"]) == 1
    with one_sentence_at_most():
        assert all(sample in intact for sample in read_all(shards))


@pytest.mark.parametrize("path", VIDEOS, ids=lambda path: path.stem)
def test_a_damaged_video_is_rejected_or_copied_unchanged(path: Path, tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    shutil.copy(path, tmp_path / "videos")
    try:
        make(tmp_path / "videos", tmp_path / "shards", "--encode=copy")
    except InputError:  # the only video is rejected
        rejected = (tmp_path / "shards/rejected.jsonl").read_text().splitlines()
        assert [json.loads(line)["source"] for line in rejected] == [path.name]
        return
    assert check_shards.main([str(tmp_path / "shards"), "--workers=1"]) == 0
    [(shard, sample)] = all_samples(tmp_path / "shards")
    assert video_bytes(tmp_path / "shards", shard, sample) == path.read_bytes()
    assert len(decode(path)) == sample.num_frames


def test_damage_to_what_make_shards_reads_needs_no_traceback(
    shards: Path, synthetic_videos: Path, tmp_path: Path
) -> None:
    (tmp_path / "videos.tar").write_bytes(b"")
    with pytest.raises(InputError, match=r"videos\.tar"):
        make(tmp_path / "videos.tar", tmp_path / "new")
    change_dataset(report={})(shards / "dataset.json")
    with contextlib.suppress(InputError):
        make(synthetic_videos, shards, "--frame-stride=2")


def test_a_damaged_run_is_one_sentence(tiny_run: Path, synthetic_shards: Path, tmp_path: Path) -> None:
    run = shutil.copytree(tiny_run, tmp_path / "run")
    options = visualize.parse_arguments([str(run), str(synthetic_shards), "--clips=1", f"--output={tmp_path / 'out'}"])
    config, weights = run / "config.yaml", run / "checkpoints/step-00000006/model.safetensors"
    intact = config.read_text()
    config.write_text(intact.replace("frame_stride: 2", "frame_stride: often"))
    with pytest.raises(InputError, match="frame_stride"):
        visualize.visualize(options)
    config.write_text(intact)
    state = load_file(weights)
    next(value for name, value in state.items() if "sampler" in name)[...] = np.nan
    save_file(state, weights)
    with pytest.raises(InputError, match="NaN"):
        visualize.visualize(options)


@pytest.mark.slow  # a minute: 60 cases, each a command
def test_random_cases_find_nothing() -> None:
    command = [sys.executable, Path(__file__).with_name("fuzz.py"), "--cases=60", "--seed=0"]
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests", "tests/shard_tools"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "60 cases, 0 findings\n"), done.stdout + done.stderr
