"""What fuzzing has found, as plain tests; and some random cases, the same ones every time."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from shard_making import all_samples, decode, make, run_here, video_bytes

from adamae import visualize
from adamae.common.errors import InputError
from adamae.shard_tools import check_shards
from adamae.shard_tools.workers import ENGINES

ROOT = Path(__file__).parents[2]
VIDEOS = sorted((Path(__file__).parent / "findings").iterdir())


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in this process, where a traceback can be seen."""
    monkeypatch.setitem(ENGINES, "processes", run_here)


@pytest.mark.parametrize("path", VIDEOS, ids=lambda path: path.stem)
def test_a_damaged_video_is_rejected_or_copied_unchanged(path: Path, tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    shutil.copy(path, tmp_path / "videos")
    try:
        make(tmp_path / "videos", tmp_path / "shards", "--encode=copy")
    except InputError:
        # Its only video is rejected.
        rejected = (tmp_path / "shards/rejected.jsonl").read_text().splitlines()
        assert [json.loads(line)["source"] for line in rejected] == [path.name]
        return
    assert check_shards.main([str(tmp_path / "shards"), "--workers=1"]) == 0
    [(shard, sample)] = all_samples(tmp_path / "shards")
    assert video_bytes(tmp_path / "shards", shard, sample) == path.read_bytes()
    assert len(decode(path)) == sample.num_frames


def test_damage_to_what_make_shards_reads_needs_no_traceback(
    synthetic_shards: Path, synthetic_videos: Path, tmp_path: Path
) -> None:
    (tmp_path / "videos.tar").write_bytes(b"")
    with pytest.raises(InputError, match=r"videos\.tar"):
        make(tmp_path / "videos.tar", tmp_path / "new")
    shards = shutil.copytree(synthetic_shards, tmp_path / "shards")
    description = json.loads((shards / "dataset.json").read_text())
    (shards / "dataset.json").write_text(json.dumps(description | {"report": {}}))
    with contextlib.suppress(InputError):
        make(synthetic_videos, shards, "--frame-stride=2")


def test_a_damaged_run_is_one_sentence(
    tiny_run: Path, synthetic_shards: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(tiny_run, tmp_path / "run")
    options = visualize.parse_arguments(
        [str(run), str(synthetic_shards), "--clips=1", f"--output={tmp_path / 'out'}"]
    )
    config = run / "config.yaml"
    intact = config.read_text()
    config.write_text(intact.replace("frame_stride: 2", "frame_stride: often"))
    with pytest.raises(InputError, match="frame_stride"):
        visualize.visualize(options)
    config.write_text(intact)
    weights = run / "checkpoints/step-00000006/model.safetensors"
    state = load_file(weights)
    name = next(name for name in state if "sampler" in name)
    state[name][...] = np.nan
    save_file(state, weights)
    with pytest.raises(InputError, match=r"its hash is not the one in train_state\.json"):
        visualize.visualize(options)


# It takes a minute: 60 cases, each a command.
@pytest.mark.slow
def test_random_cases_find_nothing() -> None:
    command = [sys.executable, Path(__file__).with_name("fuzz.py"), "--cases=60", "--seed=0"]
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests", "tests/shard_tools"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert (done.returncode, done.stdout) == (0, "60 cases, 0 findings\n"), output
