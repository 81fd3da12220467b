"""The benchmark of encoder settings compares what it says, and stops where frames are missing."""

import json
from pathlib import Path

import numpy as np
import pytest
from made_videos import encode

from benchmarks import encode_settings
from common.errors import InputError
from shard_tools.encoding.cuts import VideoWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A video of two clips at the stored rate, and one that is too short for a clip."""
    videos = tmp_path / "videos"
    videos.mkdir()
    (videos / "a.mp4").write_bytes(encode(10, width=64, height=48, pattern=True))
    (videos / "b.mp4").write_bytes(encode(136, width=64, height=48, pattern=True))
    return videos


def run(folder: Path, *options: str) -> list[dict]:
    output = folder.parent / "out"
    encode_settings.main([str(folder), "--repetitions", "1", "--output", str(output), *options])
    return json.loads((output / "encode_settings.json").read_text())["rows"]


def test_a_row_per_case(folder: Path) -> None:
    mjpeg, mpeg4 = run(folder, "--codecs", "mjpeg", "mpeg4")
    assert (mjpeg["codec"], mjpeg["tune"], mjpeg["preset"], mjpeg["quality"]) == ("mjpeg", None, None, 4)
    assert mjpeg["clip_ms"] == mjpeg["decode_ms"], "every frame is a key frame"
    assert mpeg4["clip_ms"] == pytest.approx(mpeg4["decode_ms"] * (16 + 3.5) / 16)
    assert all(row["psnr_db"] > 30 and 0.9 < row["ssim"] < 1 and row["encode_ms"] > 0 for row in (mjpeg, mpeg4))
    assert mpeg4["kb_per_clip"] > 0


def test_h264_is_tried_with_both_tunes_and_each_option_alone() -> None:
    cases = encode_settings.list_cases(["h264"])
    names = {case.name for case in cases if case.settings.gop == 8 and case.settings.quality == 23}
    assert names == {"decode", "size", "only cabac=0", "only no-deblock=1", "only weightp=0"}
    assert len({(case.name, case.settings) for case in cases}) == len(cases)


def test_missing_frames_stop_the_benchmark(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = VideoWriter.write
    monkeypatch.setattr(VideoWriter, "write", lambda self, frame: self.num_frames < 31 and write(self, frame))
    with pytest.raises(InputError, match="all frames come out again"):
        run(folder, "--codecs", "mpeg4")


def test_a_folder_without_a_whole_clip_is_refused(folder: Path) -> None:
    (folder / "b.mp4").unlink()
    with pytest.raises(InputError, match=r"no video in .* has 16 frames"):
        run(folder, "--codecs", "mpeg4")


def test_ssim_is_one_for_equal_pictures_and_follows_its_formula() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (48, 64), np.uint8)
    assert encode_settings.compute_ssim(picture, picture) == 1
    assert encode_settings.compute_ssim(picture, 255 - picture) < 0
    flat = np.full((48, 64), 100, np.uint8)
    expected = 2 * 100 * 110 / (100**2 + 110**2)
    assert encode_settings.compute_ssim(flat, flat + 10) == pytest.approx(expected, rel=1e-4)
