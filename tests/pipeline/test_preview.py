import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from made_videos import read_number
from PIL import Image

ROOT = Path(__file__).parents[2]


def preview(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.preview", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_sheet_shows_source_and_clip(short_shards: Path, tmp_path: Path) -> None:
    done = preview(
        str(short_shards), "--output", str(tmp_path), "--num-clips", "2", "--num-frames", "4", "--image-size", "32",
        "--data.frame_stride", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 clips of batch 0" in done.stdout
    with Image.open(tmp_path / "preview.gif") as moving:
        assert moving.n_frames == 4
    sheet = np.array(Image.open(tmp_path / "preview.png"))
    for clip in range(2):
        top = clip * (16 + 2 * 114)
        for column in range(4):
            source = sheet[top + 16 + 4 : top + 16 + 108, column * 151 + 4 : column * 151 + 145]
            fed = sheet[top + 130 + 4 : top + 130 + 108, column * 151 + 4 : column * 151 + 108]
            assert np.abs(np.median(source, axis=(0, 1)) - np.median(fed, axis=(0, 1))).max() <= 2, "the same frame"
        numbers = [
            read_number(sheet[top + 134 : top + 238, column * 151 + 4 : column * 151 + 108]) for column in range(4)
        ]
        assert {(b - a) % 22 for a, b in pairwise(numbers)} <= {2}
        boxes = (sheet[top + 16 : top + 128] == (255, 64, 32)).all(-1)
        assert boxes.sum() > 4 * 200, "the crop is drawn"


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    done = preview(str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "holds no dataset.json" in done.stderr
    assert "Traceback" not in done.stderr
