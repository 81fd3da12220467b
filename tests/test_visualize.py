"""The figures show what the model did: colors, masks and images are read back from the files."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_videos import encode, read_number, write_shards
from matplotlib import colormaps
from PIL import Image

from adamae import visualize
from adamae.common.errors import InputError
from adamae.figures import reconstruction, sheet
from adamae.figures.clips import read_clips, resize_and_crop
from adamae.figures.sheet import GAP, Layout
from adamae.model.adamae import AdaMAE
from adamae.model.classifier import VideoClassifier
from adamae.model.config import ModelConfig
from adamae.model.load_adamae import load_adamae
from adamae.model.maps import interpolate_from_visible, reconstruct
from adamae.model.weights import pretrained
from adamae.pipeline.config import DataConfig

CONFIG = {
    "size": "tiny",
    "encoder_depth": 1,
    "decoder_depth": 1,
    "num_frames": 8,
    "image_size": 32,
    "patch_size": 8,
    "mask_ratio": 0.75,
}
SQUARE = sheet.Row("", np.zeros((8, 32, 32, 3), np.uint8))


@pytest.fixture
def run(write_run: Callable[..., Path]) -> Path:
    return write_run(AdaMAE(ModelConfig(**CONFIG)), AdaMAE(ModelConfig(**CONFIG)), frame_stride=2)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Two videos, 64×48, in which frame k shows its number modulo 22; and a file that is none."""
    folder = tmp_path / "videos"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(encode(40))
    (folder / "b.mkv").write_bytes(encode(40, container="matroska"))
    (folder / "c.mp4").write_bytes(b"not a video")
    return folder


@pytest.fixture
def clip(videos: Path) -> torch.Tensor:
    """Return the clip of the figures of a.mp4, [1, T, H, W, C]."""
    (clip,) = read_clips([videos / "a.mp4"], 8, 32, DataConfig(frame_stride=2), limit=1)
    return clip.frames[None]


def plot(*arguments: object) -> None:
    visualize.visualize(visualize.parse_arguments([str(argument) for argument in arguments]))


def test_files_of_a_run(run: Path, videos: Path, capsys: pytest.CaptureFixture) -> None:
    """A checkpoint is plotted as its run is, also beside it."""
    older, newer = (run / f"checkpoints/step-{number:08d}" for number in (5, 10))
    plot(run, videos, "--compare", older, newer)
    written = {path.name for path in (run / "figures").iterdir()}
    assert written == {f"{name}{kind}" for name in "ab" for kind in (".png", ".gif", ".runs.png")}
    assert "skipped c, which cannot be decoded: it is a text file" in capsys.readouterr().err
    with Image.open(run / "figures/a.gif") as moving:
        assert moving.n_frames == 8
    # 8 frames are 4 token frames.
    layout = Layout.fit([SQUARE], 4)
    with Image.open(run / "figures/a.png") as picture:
        assert picture.width >= 1600
        # Times are below the rows.
        assert picture.height == 7 * (layout.height + GAP) + 2 * layout.font

    layout = Layout.fit([SQUARE], 4, min_width=1000)
    side = layout.height + GAP
    pixels = np.asarray(Image.open(run / "figures/a.runs.png"))[:, layout.label :]
    # Below the frames, each model has 4 rows.
    first, second, third = (pixels[(1 + 4 * i) * side : (5 + 4 * i) * side] for i in range(3))
    assert np.array_equal(first, third)
    assert not np.array_equal(first, second)
    whole = (run / "figures/a.png").read_bytes()
    (run / "figures/a.png").unlink()
    plot(newer, videos / "a.mp4")
    assert (run / "figures/a.png").read_bytes() == whole
    assert [path.name for path in newer.iterdir()] == ["model.safetensors"]


def test_the_mask_in_the_figure_is_the_models(
    run: Path, videos: Path, clip: torch.Tensor, tmp_path: Path
) -> None:
    plot(run, videos / "a.mp4", "--output", tmp_path, "--mask-ratio", "0.5", "--seed", "3")
    is_masked = reconstruct(load_adamae(run, mask_ratio=0.5), clip, seed=3).is_masked[0]
    assert is_masked.float().mean() == 0.5

    picture = np.asarray(Image.open(tmp_path / "a.png"))
    layout = Layout.fit([SQUARE], 4)
    side = layout.height + GAP
    token = layout.height // 4
    for t in range(4):
        corner = layout.label + t * side
        cell = picture[5 * side : 5 * side + 4 * token, corner : corner + 4 * token, 0]
        # The pixel in the middle of each token.
        middles = cell[token // 2 :: token, token // 2 :: token]
        assert np.array_equal(middles == 0, is_masked[t].numpy())


def test_interpolated_statistics_know_nothing_of_masked_patches(
    run: Path, clip: torch.Tensor
) -> None:
    model = load_adamae(run).with_masking(masking="random")
    before = reconstruct(model, clip)
    # From tokens to their 2×8×8 pixels.
    masked = before.is_masked
    for dim, patch in ((1, 2), (2, 8), (3, 8)):
        masked = masked.repeat_interleave(patch, dim)
    masked = masked[..., None]
    after = reconstruct(model, torch.where(masked, 255 - clip, clip))
    assert torch.equal(after.visible_stats, torch.where(masked, before.visible_stats, clip))
    assert not torch.equal(after.reconstruction, before.reconstruction)


def test_statistics_come_from_the_nearest_most_of_all() -> None:
    # Visible at both ends of a row of four tokens.
    values = torch.tensor([[[10.0], [20.0]]])
    visible = torch.tensor([[0, 3]])
    masked = torch.tensor([[1, 2]])
    interpolated = interpolate_from_visible(values, visible, masked, (1, 1, 4))
    # Weights are 1 / distance²: 1 and 1/4.
    expected = torch.tensor([(10 + 20 / 4) / 1.25, (10 / 4 + 20) / 1.25])
    assert torch.allclose(interpolated.flatten(), expected)


def test_rows_of_a_model_that_predicts_pixels(clip: torch.Tensor) -> None:
    """It has one reconstruction; the error has its own range; probabilities lie over the frames."""
    maps = reconstruct(AdaMAE(ModelConfig(**CONFIG, normalize_target=False)).eval(), clip)
    assert maps.visible_stats is None
    maps = maps._replace(probability=torch.zeros(1, 4, 4, 4))
    maps.probability[0, 2, 1, 3] = 1
    rows = reconstruction.make_rows(maps)
    assert [*rows] == ["frames", "reconstruction", "error", "probability", "mask", "features"]
    assert rows["reconstruction"].label == "reconstruction"
    error = maps.error[maps.is_masked]
    low_to_high = f"blue {error.min():.2f} … yellow {error.max():.2f}"
    assert rows["error"].label == f"error (mean {error.mean():.3f})\n{low_to_high}"
    colors = {tuple(color) for color in rows["error"].cells.reshape(-1, 3).tolist()}
    ends = colormaps[reconstruction.COLORMAP]([0.0, 1.0], bytes=True)[:, :3].tolist()
    assert {tuple(color) for color in ends} <= colors
    assert (reconstruction.VISIBLE,) * 3 in colors
    overlay = rows["probability"].cells.astype(int)
    assert overlay.shape == (8, 32, 32, 3)
    high, low = overlay[4, 12, 28], overlay[4, 28, 4]
    assert high[0] > high[2] + 50, "yellow"
    assert low[2] > low[0] + 30, "blue"


def test_features_are_colored_by_their_principal_components() -> None:
    features = torch.randn(2, 4, 4, 8) / 100
    # What differs most is the half.
    features[:, :, 2:, 0] += 1
    colors = reconstruction.color_features(features)
    assert colors.shape == (2, 4, 4, 3)
    assert abs(int(colors[:, :, :2, 0].mean()) - int(colors[:, :, 2:, 0].mean())) > 200
    assert np.array_equal(reconstruction.color_features(features * 2), colors)


def test_features_of_several_videos_are_shown_without_their_positions(clip: torch.Tensor) -> None:
    maps = reconstruct(AdaMAE(ModelConfig(**CONFIG)).eval(), clip)
    # The positions are the same in all clips, and a hundred times as strong as what lies there.
    positions = 100 * torch.randn(maps.features.shape[1:])
    all_maps = []
    for row in range(4):
        content = torch.zeros_like(maps.features)
        content[:, :, row] = 1
        all_maps.append(maps._replace(features=positions + content))
    means = reconstruction.average_positions(all_maps)
    for row, own in enumerate(all_maps):
        first_component = reconstruction.make_rows(own, "", means)["features"].cells[0, :, :, 0]
        assert (first_component[row] != first_component[row - 1]).all()
        assert len(np.unique(np.delete(first_component, row, axis=0))) == 1
    # The mean of a few would be mostly the clips themselves.
    assert reconstruction.average_positions(all_maps[:3]) is None


def test_a_folder_of_splits_is_refused_and_each_split_is_named(run: Path, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / "shards" / name).mkdir(parents=True)
        (tmp_path / "shards" / name / "dataset.json").write_text("{}")
        np.save(tmp_path / "shards" / name / "samples-0.npy", np.zeros(8))
    with pytest.raises(InputError, match=r"shards/train or .*shards/validation"):
        plot(run, tmp_path / "shards", "--output", tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "a.mp4"], "nowhere does not exist"),
        (["run", "nowhere.mp4"], "nowhere.mp4 does not exist"),
        (["run", "c.mp4"], "c.mp4 cannot be decoded"),
        (["run", "empty"], "no video found in empty"),
        (["run", "pictures"], "make shards of it with make_shards.py --fps"),
        (["empty", "a.mp4"], "empty holds no checkpoint yet"),
        (["features", "a.mp4"], "features holds features, which search.py reads"),
        (["damaged", "a.mp4"], "config.yaml is damaged"),
        (["run", "a.mp4", "--mask-ratio", "1.5"], "model.mask_ratio is 1.5"),
        (["run", "a.mp4", "--clips", "0"], "--clips: it must be at least 1, not 0"),
        (["run", "a.mp4", "--compare", "shorter.safetensors"], "another shape"),
        (
            ["classifier.safetensors", "a.mp4"],
            "classifier.safetensors has no decoder, only an encoder",
        ),
    ],
    ids=str,
)
def test_bad_input(
    run: Path,
    videos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    (videos / "empty").mkdir()
    (videos / "features").mkdir()
    (videos / "features/features.json").write_text("{}")
    (videos / "pictures/frames").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (64, 48)).save(videos / f"pictures/frames/{number}.png")
    (videos / "run").symlink_to(run)
    (shutil.copytree(run, videos / "damaged") / "config.yaml").write_text("model: {")
    shorter = replace(ModelConfig(**CONFIG), num_frames=4)
    for name, model in (("shorter", AdaMAE(shorter)), ("classifier", VideoClassifier(shorter, 2))):
        pretrained.save(
            videos / f"{name}.safetensors", model.state_dict(), pretrained.make_metadata(shorter)
        )
    monkeypatch.chdir(videos)
    with pytest.raises(InputError) as error:
        plot(*arguments)
    assert sentence in str(error.value)


def test_clips_show_the_frames_they_say(tmp_path: Path, videos: Path) -> None:
    """Those of a file, and those of shards."""
    shards = write_shards(
        tmp_path / "shards",
        [(f"v{i}", encode(40, first=i)) for i in range(5)],
        per_shard=2,
        classes=2,
    )
    # Of 40 frames, those in the middle.
    numbers = [13, 15, 17, 19, 21, 23, 25, 27]
    locations = [videos / "b.mkv", shards]
    clips = list(read_clips(locations, 8, 32, DataConfig(frame_stride=2), limit=10))
    assert [clip.name for clip in clips] == ["b", "v0", "v1", "v2", "v3", "v4"]
    titles = [f"v{i}.mp4\nclass class {i % 2}" for i in range(5)]
    assert [clip.title for clip in clips] == ["b.mkv", *titles]
    for clip, first in zip(clips, [0, *range(5)], strict=True):
        assert clip.frames.shape == (8, 32, 32, 3)
        assert clip.times == [number / 8 for number in numbers]
        seen = [read_number(frame) for frame in clip.frames.numpy()]
        assert seen == [(first + number) % 22 for number in numbers]


def test_clips_of_a_list_lie_in_its_segments(
    videos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["path,start,end,label", "a.mp4,1,3,x", "b.mkv,2,,y", "b.mkv,9,,y", "c.mp4,,,x"]
    (videos / "list.csv").write_text("\n".join(rows))
    first, second = read_clips([videos / "list.csv"], 8, 32, DataConfig(frame_stride=2), limit=10)
    assert (first.name, second.name) == ("a_t=1,3", "b_t=2,inf")
    assert first.numbers == list(range(9, 25, 2))
    assert second.numbers == list(range(21, 37, 2))
    assert first.times == [number / 8 for number in first.numbers]
    for clip in (first, second):
        seen = [read_number(frame) for frame in clip.frames.numpy()]
        assert seen == [number % 22 for number in clip.numbers]
    stderr = capsys.readouterr().err
    reason = "its segment starts at 9, and the video has 5 seconds"
    assert f"skipped b_t=9,inf, which cannot be decoded: {reason}" in stderr
    assert "skipped c, which cannot be decoded: it is a text file" in stderr


def test_a_folder_gives_evenly_spread_clips_and_equal_names_are_numbered(
    tmp_path: Path, videos: Path
) -> None:
    for i in range(10):
        (tmp_path / f"many/{i // 5}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"many/{i // 5}/{i}.mp4").symlink_to(videos / "a.mp4")
    (videos / "a-2.mp4").symlink_to(videos / "a.mp4")
    locations = [tmp_path / "many", videos / "a.mp4", videos / "a.mp4", videos / "a-2.mp4"]
    clips = read_clips(locations, 8, 32, DataConfig(frame_stride=1), limit=3)
    assert [clip.name for clip in clips] == ["0_0", "0_4", "1_8", "a", "a-2", "a-2-2"]


def test_resizing_keeps_shapes_and_the_center() -> None:
    frames = np.zeros((1, 40, 100, 3), np.uint8)
    # The middle square.
    frames[:, :, 30:70] = 255
    assert (resize_and_crop(frames, 20)[:, :, :, 2:-2] == 255).all()
    assert (resize_and_crop(frames, 80)[:, :, :, 5:-5] == 255).all()
