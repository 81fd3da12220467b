from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made_videos import read_number
from PIL import Image

import preview
from common.errors import InputError


def test_the_sheet_shows_source_and_clip(short_shards: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    arguments = [
        str(short_shards), "--output", str(tmp_path), "--num-clips", "2", "--num-frames", "4", "--image-size", "32",
        "data.frame_stride=2",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["preview", *arguments])
    preview.main()
    assert "2 clips of batch 0" in capsys.readouterr().out
    with Image.open(tmp_path / "preview.gif") as moving:
        assert moving.n_frames == 4
    sheet = np.array(Image.open(tmp_path / "preview.png"))
    assert sheet.shape == (2 * (16 + 122 + 162), 4 * 162, 3)  # of 64×48: 160×120, and the clip's 160×160
    for clip in range(2):
        top = clip * 300 + 16
        lefts = [column * 162 + 4 for column in range(4)]
        fed = [sheet[top + 122 + 4 : top + 122 + 156, left : left + 152] for left in lefts]
        for left, frame in zip(lefts, fed, strict=True):
            source = sheet[top + 4 : top + 116, left : left + 152]
            assert np.abs(np.median(source, axis=(0, 1)) - np.median(frame, axis=(0, 1))).max() <= 2, "the same frame"
        assert {(b - a) % 22 for a, b in pairwise(map(read_number, fed))} <= {2}
        boxes = np.abs(sheet[top : top + 120].astype(int) - (255, 64, 32)).max(-1) < 60
        assert boxes.sum() > 4 * 200, "the crop is drawn"


def test_pictures_of_any_shape_fill_the_sheet() -> None:
    wide, tall = [Image.new("RGB", size, "red") for size in ((64, 36), (36, 64))]
    square = Image.new("RGB", (32, 32), "red")
    for sources in ([wide] * 2, [tall] * 2):
        for picture in (
            preview.sheet([("caption", sources, [square] * 2)]),
            preview.column([("caption", sources, [square] * 2)], 0),
        ):
            shown = np.array(picture)[preview.HEAD :] == (255, 0, 0)
            assert shown.all(-1).mean() > 0.95


def test_bad_input_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["preview", str(tmp_path)])
    with pytest.raises(InputError, match=r"holds no dataset\.json"):
        preview.main()
