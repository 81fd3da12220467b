"""search.py finds the moments that a comparison with all windows finds."""

import csv
from pathlib import Path

import encoder_models
import numpy as np
import pytest
import torch
from made_videos import encode
from safetensors.torch import load_file

from adamae import extract_features, search
from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.encoders.open_encoder import open_encoder
from adamae.model.weights import pretrained
from adamae.pipeline.config import DataConfig
from adamae.pipeline.planning.crops import FrameSize
from adamae.training import feature_search
from adamae.training.extraction import stack_images
from adamae.training.feature_files import read_feature_files
from adamae.training.feature_search import Query, find_moments
from adamae.training.video_windows import WindowReader

CONFIG = ModelConfig(
    encoder_width=48,
    encoder_depth=1,
    encoder_heads=3,
    decoder_width=32,
    decoder_depth=1,
    decoder_heads=2,
    num_frames=4,
    image_size=32,
    patch_size=8,
    mask_ratio=0.75,
)


def save_weights(file: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    pretrained.save(file, AdaMAE(CONFIG).state_dict(), pretrained.make_metadata(CONFIG))
    return file


def extract(folder: Path, *options: str) -> Path:
    """Extract the features of FOLDER/videos by FOLDER/model.safetensors; return their folder."""
    arguments = [str(folder / "videos"), str(folder / "features"), "--device", "cpu", *options]
    arguments += ["--model", str(folder / "model.safetensors"), "--fps", "4"]
    assert extract_features.main(extract_features.parse_arguments(arguments)) == 0
    return folder / "features"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three videos, a model and their features, a window a frame."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "videos").mkdir()
    for number in range(3):
        content = encode(30, first=20 * number, pattern=True)
        (folder / f"videos/v{number}.mp4").write_bytes(content)
    save_weights(folder / "model.safetensors", 0)
    extract(folder, "--stride", "1")
    return folder


def find(folder: Path, query: Path, output: Path, *options: str) -> list[dict[str, str]]:
    """Run the command; return the rows of its CSV."""
    arguments = [str(folder / "features"), str(query), "--output", str(output), *options]
    search.main(search.parse_arguments(arguments))
    with (output / f"{query.stem}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_moment_of_a_video_is_found_in_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows are 4 frames, .25 s apart: the one around 2 s begins at 1.5 s."""
    rows = find(folder, folder / "videos/v1.mp4", tmp_path, "--at", "2", "--top", "4")
    best = rows[0]
    assert (best["source"], best["start"], best["end"]) == ("v1.mp4", "1.5", "2.25")
    assert float(best["score"]) == pytest.approx(1, abs=1e-4)
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4"]
    assert (tmp_path / "v1.png").is_file()
    printed = capsys.readouterr().out
    assert "   1   1.000       1.50       2.25  v1.mp4" in printed


def test_the_query_is_the_mean_of_a_part_or_of_all_of_a_video(folder: Path, tmp_path: Path) -> None:
    stored = load_file(folder / "features/v1.mp4.safetensors")
    starts = stored["times"][:, 0]
    # Windows begin at 1, 1.25, 1.5 and 1.75 s, of which the last one ends at 2.5 s.
    for options, first, last in ((["--window", "1,2.6"], 1, 1.75), ([], 0, 9)):
        windows = stored["features"][(starts >= first) & (starts <= last)]
        moments = find_moments(folder / "features", Query(windows.mean(dim=0).numpy()), 5)
        rows = find(folder, folder / "videos/v1.mp4", tmp_path, *options, "--top", "5")
        assert [(row["key"], float(row["start"])) for row in rows] == [
            (moment.key, moment.times[0]) for moment in moments
        ]


@pytest.mark.parametrize("block", [5, 256])
def test_moments_are_those_of_a_comparison_with_all_windows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(feature_search, "BLOCK", block)
    file = folder / "features/v0.mp4.safetensors"
    rows = find(folder, file, tmp_path, "--index", "3", "--top", "5")
    videos = list(read_feature_files(folder / "features"))
    center = torch.cat([video.features for video in videos]).mean(dim=0)
    query = load_file(file)["features"][3] - center
    candidates = []
    for video in videos:
        similarity = torch.cosine_similarity(video.features - center, query[None])
        for window, score in enumerate(similarity.tolist()):
            candidates.append((score, video.metadata["key"], window))
    chosen = [(1.0, "v0.mp4", 3)]
    for score, key, window in sorted(candidates, reverse=True):
        # Windows have 4 frames, and each begins a frame after the one before.
        overlaps = [name == key and abs(window - other) < 4 for _, name, other in chosen]
        if not any(overlaps):
            chosen.append((score, key, window))
    expected = [(key, 0.25 * window, round(score, 4)) for score, key, window in chosen[1:6]]
    found = [(row["key"], float(row["start"]), round(float(row["score"]), 4)) for row in rows]
    assert found == expected


def test_tars_of_features_are_searched(folder: Path, tmp_path: Path) -> None:
    for name in ("videos", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    extract(tmp_path, "--stride", "1", "--format", "webdataset")
    query = folder / "videos/v2.mp4"
    expected = find(folder, query, tmp_path / "of files", "--at", "1")
    assert find(tmp_path, query, tmp_path / "of tars", "--at", "1") == expected


# It imports transformers, which takes ten seconds.
@pytest.mark.slow
def test_features_of_another_projects_model_are_searched(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "videos").symlink_to(folder / "videos")
    encoder_models.IMAGE_CASES["dinov2"].write(tmp_path / "model.safetensors")
    features = extract(tmp_path, "--window", "4", "--stride", "1")
    rows = find(tmp_path, folder / "videos/v1.mp4", tmp_path / "out", "--at", "2", "--top", "1")
    assert (rows[0]["source"], rows[0]["start"]) == ("v1.mp4", "1.5")
    encoder = open_encoder(tmp_path / "model.safetensors", num_frames=4)
    reader = WindowReader(DataConfig(frame_stride=2), FrameSize(*encoder.image_size), 4, 4)
    window = next(reader.read_windows(next(reader.list_videos(str(folder / "videos/v0.mp4")))))
    clip = torch.from_numpy(stack_images(window))[None]
    stored = load_file(features / "v0.mp4.safetensors")["features"]
    torch.testing.assert_close(stored[:1], encoder.pooled(clip))


def test_videos_that_have_gone_are_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/v.mp4").write_bytes((folder / "videos/v0.mp4").read_bytes())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    extract(tmp_path)
    (tmp_path / "videos/v.mp4").unlink()
    query = folder / "videos/v0.mp4"
    assert find(tmp_path, query, tmp_path / "out", "--at", "1")
    assert "no contact sheet of the moments" in capsys.readouterr().err


def test_a_model_that_has_moved_is_named_and_another_one_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "videos").symlink_to(folder / "videos")
    weights = save_weights(tmp_path / "model.safetensors", 0)
    extract(tmp_path)
    query = folder / "videos/v0.mp4"
    moved = weights.rename(tmp_path / "moved.safetensors")
    with pytest.raises(InputError, match=r"cannot be opened .*: say where it is with --model"):
        find(tmp_path, query, tmp_path / "out", "--at", "1")
    assert find(tmp_path, query, tmp_path / "out", "--at", "1", "--model", str(moved))
    save_weights(weights, 1)
    with pytest.raises(InputError, match="other weights than the features were made with"):
        find(tmp_path, query, tmp_path / "out", "--at", "1")
    features = tmp_path / "features/v0.mp4.safetensors"
    assert find(folder, features, tmp_path / "out", "--index", "0")


def test_bad_input_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    video = folder / "videos/v0.mp4"
    file = folder / "features/v0.mp4.safetensors"
    cases = [
        (file, [], "has many windows: choose one with --index N"),
        (video, ["--index", "1"], "--index is for a .safetensors file"),
        (video, ["--window", "3,2"], "3,2 does not end after it starts"),
        (video, ["--window", "now"], "now is not like 10,14"),
        (file, ["--index", "99"], "has no window 99: give --index from 0 to 11"),
        (folder / "no.safetensors", ["--index", "0"], "no.safetensors does not exist"),
        (video, ["--at", "99"], "cannot be encoded: its segment starts at"),
        (folder / "videos", [], "has several videos: give one of them"),
        (folder / "missing.mp4", [], "does not exist"),
    ]
    for query, options, message in cases:
        with pytest.raises(InputError, match=message):
            find(folder, query, tmp_path / "out", *options)
    with pytest.raises(InputError, match=r"has no features.json: give a folder"):
        find(tmp_path, video, tmp_path / "out")
    with pytest.raises(InputError, match=r"the query has 7 features, and .* has 48 of each window"):
        find_moments(folder / "features", Query(np.zeros(7, np.float32)), 1)
    assert not (tmp_path / "out").exists()
