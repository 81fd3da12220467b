from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made_videos import read_number
from PIL import Image

from adamae import preview
from adamae.figures.sheet import GAP, Layout, Row
from adamae.model.weights.read_config import run_config


def test_the_sheet_shows_source_and_clip(
    short_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        str(short_shards),
        "--output",
        str(tmp_path),
        "--num-clips",
        "2",
        "data.frame_stride=2",
        "model.num_frames=4",
        "model.image_size=32",
        "model.patch_size=8",
        "model.mask_ratio=0.5",
    ]
    preview.main(preview.parse_arguments(arguments))
    assert "2 clips of batch 0" in capsys.readouterr().out
    with Image.open(tmp_path / "preview.gif") as moving:
        assert moving.n_frames == 4
    sheet = np.array(Image.open(tmp_path / "preview.png"))
    layout = Layout.fit([Row("source", np.zeros((1, 48, 64, 3), np.uint8))], 4)
    side = layout.height
    assert sheet.shape[0] == 4 * (side + GAP)
    for clip in range(2):
        top = 2 * clip * (side + GAP)
        numbers = []
        for column in range(4):
            left = layout.label + column * (layout.width + GAP)
            # Without the edges, where scaling mixes neighbors.
            source = sheet[top + 4 : top + side - 4, left + 4 : left + layout.width - 4]
            frame = sheet[top + side + GAP :, left:][4 : side - 4, 4 : side - 4]
            source_color = np.median(source, axis=(0, 1))
            frame_color = np.median(frame, axis=(0, 1))
            assert np.abs(source_color - frame_color).max() <= 2, "the same frame"
            numbers.append(read_number(frame))
        assert {(after - before) % 22 for before, after in pairwise(numbers)} <= {2}
        distance = np.abs(sheet[top : top + side].astype(int) - preview.BOX_COLOR).max(axis=-1)
        assert (distance < 60).sum() > 4 * 200, "the crop is drawn"


def test_a_model_of_differences_is_shown_differences(short_shards: Path, tmp_path: Path) -> None:
    arguments = [
        str(short_shards),
        "--output",
        str(tmp_path),
        "--num-clips=1",
        "--config=configs/few_clips.yaml",
    ]
    options = preview.parse_arguments(arguments)
    preview.main(options)
    sheet = np.array(Image.open(tmp_path / "preview.png"))
    # A line of pixels of the source frames, which have colors, and one of the clip.
    for line, is_gray in ((30, False), (-30, True)):
        pixels = sheet[line, sheet.shape[1] // 2 :]
        assert (pixels.max(axis=-1) == pixels.min(axis=-1)).all() == is_gray


def test_a_run_says_what_is_shown(tiny_run: Path) -> None:
    arguments = ["shards", "--config", str(tiny_run / "config.yaml"), "data.flip=false"]
    config = preview.parse_arguments(arguments).config
    model = run_config(tiny_run)["model"]
    assert config.model.num_frames == model["num_frames"]
    assert config.model.image_size == model["image_size"]
    assert config.data.shards == "shards"
    assert not config.data.flip
