"""Features of ours and of the plain loop are of the same windows, and a wrong one is found."""

import json
import operator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import feature_speed
from common.errors import InputError


@pytest.fixture
def results(tmp_path: Path, synthetic_videos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(feature_speed, "in_fresh_process", operator.call)
    monkeypatch.setattr(feature_speed, "FRAME_STRIDE", 1)  # they have 32 frames
    (tmp_path / "list.txt").write_text("\n".join(str(path) for path in sorted(synthetic_videos.rglob("*.mp4"))[:2]))
    return tmp_path


def run(folder: Path) -> None:
    feature_speed.main([str(folder / "list.txt"), "--size=tiny", "--rounds=1", f"--output={folder}"])


def test_both_have_a_row(results: Path) -> None:
    run(results)
    ours, plain = json.loads((results / "feature_speed.json").read_text())["rows"]
    assert (ours["implementation"], plain["implementation"]) == ("ours", "plain loop")
    assert (ours["videos"], ours["windows"]) == (plain["videos"], plain["windows"]) == (2, 6)
    assert plain["relative_to_plain"] == 1
    assert ours["relative_to_plain"] == pytest.approx(plain["cpu_ms_per_window"] / ours["cpu_ms_per_window"], abs=0.01)


def test_nothing_is_written_of_other_windows(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_wrong(videos: Path, weights: Path, stride: int, output: Path) -> None:
        output.mkdir()
        np.save(output / "a.npy", np.zeros((1, 1)))

    monkeypatch.setattr(feature_speed, "run_plain", run_wrong)
    with pytest.raises(InputError, match="windows of"):
        run(results)
    assert not (results / "feature_speed.json").exists()


def test_nothing_is_timed_when_features_differ(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_speed, "encode_plain", lambda model, pixels: model(pixels).last_hidden_state[:, 0])
    monkeypatch.setattr(feature_speed, "in_fresh_process", lambda *_: pytest.fail("timed all the same"))
    with pytest.raises(InputError, match="features of the same clip are the same"):
        run(results)
