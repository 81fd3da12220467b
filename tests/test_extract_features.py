import json
import socket
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
import webdataset
from fsspec.implementations.memory import MemoryFileSystem
from made_videos import encode, write_shards
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from adamae import extract_features
from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.encoder import Selection, VideoEncoder
from adamae.model.weights import pretrained
from adamae.model.weights.load_model import load_encoder
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.video import Video
from adamae.pipeline.planning.crops import FrameSize
from adamae.pipeline.planning.plan import frame_step, strided_frames
from adamae.pipeline.reading import storage
from adamae.shard_tools import make_shards
from adamae.training.feature_files import NAMES, read_feature_files
from adamae.training.feature_settings import read_settings
from adamae.training.video_features import read_vectors
from adamae.training.video_windows import WindowReader, make_scaler, round_half_up

CONFIG = ModelConfig(
    encoder_width=48,
    encoder_depth=2,
    encoder_heads=3,
    decoder_width=32,
    decoder_depth=2,
    decoder_heads=2,
    num_frames=4,
    image_size=32,
    patch_size=8,
    mask_ratio=0.75,
)


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    for i in range(5):
        file = tmp_path / f"videos/class {i % 2}/v{i}.mp4"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode(20 + i, first=3 * i))
    return tmp_path / "videos"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(
        tmp_path / "shards", [(f"a/v{i}", encode(20 + i, first=3 * i)) for i in range(5)], classes=2
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    file = tmp_path / "model.safetensors"
    pretrained.save(file, AdaMAE(CONFIG).state_dict(), pretrained.make_metadata(CONFIG))
    return file


def extract(videos: Path, output: Path | str, weights: Path, *options: str) -> int:
    """Run the command, by default on every second frame; return its exit code."""
    arguments = [str(videos), str(output), "--model", str(weights), "--device", "cpu"]
    # Batches hold windows of several videos.
    arguments += ["--batch-size", "3", *options]
    if "--fps" not in options:
        arguments += ["--frame-stride", "2"]
    return extract_features.main(extract_features.parse_arguments(arguments))


def read_metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


@pytest.mark.parametrize("kind", ["safetensors", "parquet"])
def test_features_in_object_storage_are_those_of_a_folder_and_an_extraction_resumes(
    videos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(storage, "PAUSE_S", 0)
    url = "memory://bucket/features"
    stored = MemoryFileSystem.store
    # All tests of a process share it.
    stored.clear()
    options = ("--format", kind)
    try:
        assert extract(videos, tmp_path / "out", weights, *options) == 0
        writes = [None] * 3 + [OSError("503 slow down")] * 100
        write = MemoryFileSystem.pipe_file
        with patch.object(MemoryFileSystem, "pipe_file", autospec=True) as failing:
            failing.side_effect = lambda *arguments: fail_or_write(writes, write, arguments)
            with pytest.raises(InputError, match="cannot be written to: 503 slow down"):
                extract(videos, url, weights, *options)
        earlier = {name: file.getvalue() for name, file in stored.items()}
        assert len(earlier) == 3
        assert extract(videos, url, weights, *options) == 0
        assert all(stored[name].getvalue() == earlier[name] for name in earlier)
        expected = {}
        for file in tmp_path.glob("out/**/*.*"):
            expected[f"/bucket/features/{file.relative_to(tmp_path / 'out')}"] = file.read_bytes()
        assert {name: file.getvalue() for name, file in stored.items()} == expected
        with pytest.raises(InputError, match="has features made with other settings"):
            extract(videos, url, weights, "--stride", "1", *options)
    finally:
        stored.clear()
    assert not Path("memory:").exists()


def fail_or_write(
    errors: list[OSError | None], write: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Raise the next error, or write."""
    error = errors.pop(0)
    if error is not None:
        raise error
    write(*arguments)


def test_tars_of_features_are_refused_at_a_url(videos: Path, weights: Path) -> None:
    with pytest.raises(InputError, match="memory://bucket/x is a URL: choose safetensors"):
        extract(videos, "memory://bucket/x", weights, "--format", "webdataset")


def test_windows_of_files_and_of_shards_are_the_same(
    videos: Path, shards: Path, weights: Path, tmp_path: Path
) -> None:
    assert extract(videos, tmp_path / "of files", weights, "--stride", "3", "--tokens") == 0
    assert extract(shards, tmp_path / "of shards", weights, "--stride", "3", "--tokens") == 0
    for i in range(5):
        file = tmp_path / f"of files/class {i % 2}/v{i}.mp4.safetensors"
        of_file = load_file(file)
        of_shard = load_file(tmp_path / f"of shards/a/v{i}.safetensors")
        num_sampled = (20 + i + 1) // 2
        num_windows = (num_sampled - 4) // 3 + 1
        assert of_file["features"].shape == (num_windows, 48)
        assert of_file["tokens"].shape == (num_windows, 2, 4, 4, 48)
        for name in ("features", "tokens", "times"):
            torch.testing.assert_close(of_file[name], of_shard[name])
        # At 8 fps, windows slide by 3 of every second frame, and span 6 frames.
        starts = 2 * 3 * torch.arange(num_windows) / 8
        times = torch.stack((starts, starts + 6 / 8), dim=1).double()
        torch.testing.assert_close(of_file["times"], times)
        means = of_file["tokens"].float().mean((1, 2, 3))
        torch.testing.assert_close(means, of_file["features"], atol=2e-3, rtol=0)
        metadata = read_metadata(file)
        assert metadata["key"] == f"class {i % 2}/v{i}.mp4"
        assert metadata["label"] == f"class {i % 2}"
        assert metadata["incomplete"] == ""


def test_of_videos_with_fewer_frames_a_second_some_are_repeated(
    videos: Path, shards: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract(videos, tmp_path / "of files", weights, "--fps", "16", "--stride", "2") == 0
    assert capsys.readouterr().err.count("some of their frames are repeated") == 1
    assert extract(shards, tmp_path / "of shards", weights, "--fps", "16", "--stride", "2") == 0
    for i in range(5):
        of_file = load_file(tmp_path / f"of files/class {i % 2}/v{i}.mp4.safetensors")
        of_shard = load_file(tmp_path / f"of shards/a/v{i}.safetensors")
        # As in training, the frames of the first windows are 0 1 1 2, 1 2 2 3, …
        assert len(of_file["features"]) == 20 + i - 2
        assert of_file["frames"][:2].tolist() == [[0, 2], [1, 3]]
        torch.testing.assert_close(of_shard["features"], of_file["features"])


def test_windows_have_the_frames_of_training_at_any_rate(tmp_path: Path) -> None:
    """Of 8 frames per second, 2.56 are 3.125 apart, as 8 of 25 are, and training rounds."""
    location = tmp_path / "video.mp4"
    location.write_bytes(encode(80))
    shards = write_shards(tmp_path / "shards", [("video", location.read_bytes())])
    data = DataConfig(fps=2.56)
    step = frame_step(8.0, 1, data)
    for length, stride in ((16, 16), (8, 3)):
        for source in (location, shards):
            reader = WindowReader(data, FrameSize(32, 32), length, stride)
            (video,) = reader.list_videos(str(source))
            *windows, end = reader.read_windows(video)
            assert not end.frames
            firsts = []
            last = 0
            for window in windows:
                first = window.frames[0].number
                firsts.append(first)
                clip = [first + number for number in strided_frames(80, length, step, 0)]
                assert [frame.number for frame in window.frames] == clip
                last = clip[-1]
                assert [frame.time for frame in window.frames] == [number / 8 for number in clip]
            assert firsts == [
                round_half_up(Fraction(25, 8) * k * stride) for k in range(len(firsts))
            ]
            assert 80 - 3.125 * stride - 1 < last < 80
    short = WindowReader(data, FrameSize(32, 32), 40, 40)
    (video,) = short.list_videos(str(location))
    window, _ = short.read_windows(video)
    assert [frame.number for frame in window.frames] == list(strided_frames(80, 40, step, 0))


def test_rates_of_ntsc_are_whole_ones() -> None:
    """Videos of 7.992 frames per second show each frame once at fps=8, and none is repeated."""
    step = frame_step(8000 / 1001, 1, DataConfig(fps=8))
    assert step == 1
    # NumPy's floats are written in another way, as names of segments.
    assert type(step) is float
    assert frame_step(30000 / 1001, 1, DataConfig(fps=10)) == 3
    assert frame_step(25.0, 1, DataConfig(fps=8)) == 3.125
    assert frame_step(7.9, 1, DataConfig(fps=8)) == 7.9 / 8
    rates = np.array([24000 / 1001, 25.0])
    assert frame_step(rates, np.ones(2), DataConfig(fps=8)).tolist() == [3, 3.125]


def test_resuming_makes_only_what_is_missing_and_all_splits_are_taken(
    shards: Path, weights: Path, tmp_path: Path
) -> None:
    assert extract(shards, tmp_path / "whole", weights) == 0
    assert extract(shards, tmp_path / "parts", weights, "--part", "2/2") == 0
    files = list((tmp_path / "parts").rglob("*.safetensors"))
    times = [file.stat().st_mtime_ns for file in files]
    assert len(files) == 2
    assert extract(shards, tmp_path / "parts", weights) == 0
    assert [file.stat().st_mtime_ns for file in files] == times
    (tmp_path / "mine").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "mine" / split).symlink_to(shards)
    assert extract(tmp_path / "mine", tmp_path / "splits", weights) == 0
    for file in (tmp_path / "whole").rglob("*.safetensors"):
        for folder in ("parts", "splits/train", "splits/validation"):
            resumed = load_file(tmp_path / folder / "a" / file.name)
            torch.testing.assert_close(load_file(file), resumed)


def test_all_subsets_of_a_folder_are_taken(tmp_path: Path, weights: Path) -> None:
    for subset in ("train", "val"):
        (tmp_path / "in" / subset).mkdir(parents=True)
        (tmp_path / "in" / subset / "v.mp4").write_bytes(encode(20))
    assert extract(tmp_path / "in", tmp_path / "out", weights) == 0
    names = [file.relative_to(tmp_path / "out") for file in (tmp_path / "out").rglob("*.mp4.*")]
    assert sorted(map(str, names)) == ["train/v.mp4.safetensors", "val/v.mp4.safetensors"]


def test_what_was_read_of_a_broken_video_is_kept(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = encode(40, options={"g": "8"}, pattern=True)
    (tmp_path / "in").mkdir()
    damaged = bytearray(whole)
    middle = len(whole) // 2
    damaged[middle : middle + 400] = bytes(400)
    (tmp_path / "in/damaged.mp4").write_bytes(damaged)
    (tmp_path / "in/empty.mp4").touch()
    (tmp_path / "in/short.mp4").write_bytes(encode(3))
    assert extract(tmp_path / "in", tmp_path / "out", weights) == 1
    captured = capsys.readouterr()
    assert "wrote features of 1 video " in captured.out
    assert "empty.mp4 is incomplete: the file is empty" in captured.err
    kept = tmp_path / "out/damaged.mp4.safetensors"
    assert 0 < len(load_file(kept)["features"]) < 5
    assert read_metadata(kept)["incomplete"]
    assert load_file(tmp_path / "out/short.mp4.safetensors")["times"].tolist() == [[0, 0.25]]


def test_a_folder_of_pictures_needs_a_rate(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in/frames").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (64, 48)).save(tmp_path / f"in/frames/{number}.png")
    assert extract(tmp_path / "in", tmp_path / "out", weights) == 1
    assert "make shards of it with make_shards.py --fps" in capsys.readouterr().err


def test_arrays(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/clip.npy", np.zeros((9, 40, 50, 3), np.uint8))
    extract(tmp_path / "in", tmp_path / "out", weights, "--stride", "1")
    file = tmp_path / "out/clip.npy.safetensors"
    loaded = load_file(file)
    assert loaded["features"].shape == (2, 48)
    assert loaded["times"].tolist() == [[0, 0.24], [0.08, 0.32]]
    assert read_metadata(file)["key"] == "clip.npy"
    np.save(tmp_path / "in/wide.npy", np.zeros((9, 40, 50, 5), np.uint8))
    message = r"wide\.npy has 5 channels, and the model takes 3: leave it out"
    with pytest.raises(InputError, match=message):
        extract(tmp_path / "in", tmp_path / "others", weights)


def read_tars(folder: Path) -> dict[str, dict[str, Any]]:
    """Read all tars with webdataset; return the samples by the keys of their videos."""
    tars = [str(tar) for tar in sorted(folder.glob("*.tar"))]
    samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
    by_key = {sample["json"]["key"]: sample for sample in samples}
    assert len(by_key) == len(samples), "no video twice"
    return by_key


def test_webdataset_reads_tars_of_many_videos(
    videos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adamae.training.feature_files.MAX_VIDEOS", 2)
    options = ["--stride", "3", "--tokens"]
    assert extract(videos, tmp_path / "files", weights, *options) == 0
    assert extract(videos, tmp_path / "tars", weights, *options, "--format", "webdataset") == 0
    tars = [f"features-1-of-1-{number:06}.tar" for number in range(3)]
    assert sorted(file.name for file in (tmp_path / "tars").iterdir()) == [*tars, "features.json"]
    assert json.loads((tmp_path / "tars/features.json").read_text())["format"] == "webdataset"
    samples = read_tars(tmp_path / "tars")
    files = sorted((tmp_path / "files").rglob("*.safetensors"))
    assert len(samples) == len(files) == 5
    for file in files:
        metadata = read_metadata(file)
        sample = samples[metadata["key"]]
        for name, values in load_file(file).items():
            torch.testing.assert_close(torch.from_numpy(sample[f"{name}.npy"]), values)
        metadata.pop("xxh3")
        assert {name: str(sample["json"][name]) for name in metadata} == metadata
    vectors_of_tars = read_vectors(tmp_path / "tars")
    torch.testing.assert_close(read_vectors(tmp_path / "files"), vectors_of_tars)


def test_tars_of_a_killed_run_are_whole_and_the_rest_is_made(
    videos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed as it writes the fourth video into the tar of the third, then run in parts."""
    monkeypatch.setattr("adamae.training.feature_files.MAX_VIDEOS", 2)
    output = tmp_path / "tars"
    killed = """if True:
        import os
        import sys
        from adamae import extract_features
        from adamae.training import feature_files
        feature_files.MAX_VIDEOS = 2
        describe = feature_files.describe
        keys = []
        def die_at_the_fourth(video):
            keys.append(video.key)
            if len(keys) == 4:
                os._exit(9)
            return describe(video)
        feature_files.describe = die_at_the_fourth
        extract_features.main(extract_features.parse_arguments(sys.argv[1:]))
        """
    arguments = [str(videos), str(output), "--model", str(weights), "--device", "cpu"]
    arguments += ["--format", "webdataset", "--frame-stride", "2"]
    command = [sys.executable, "-c", killed, *arguments]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 9
    unfinished, *whole = sorted(file.name for file in output.iterdir())
    assert unfinished.startswith(".features-1-of-1-000001.tar.")
    assert whole == ["features-1-of-1-000000.tar", "features.json"]
    first_tar = (output / "features-1-of-1-000000.tar").read_bytes()
    assert len(read_tars(output)) == 2
    options = ["--format", "webdataset"]
    assert extract(videos, output, weights, *options) == 0
    assert (output / "features-1-of-1-000000.tar").read_bytes() == first_tar
    assert len(read_tars(output)) == 5
    assert len(list(output.iterdir())) == 4, "nothing is left of the killed run"
    for part in ("1/2", "2/2"):
        assert extract(videos, tmp_path / "parts", weights, *options, "--part", part) == 0
    assert len(read_tars(tmp_path / "parts")) == 5
    assert extract(videos, tmp_path / "parts", weights, *options) == 0
    assert len(read_tars(tmp_path / "parts")) == 5, "whatever part has made them"


def test_what_a_killed_run_was_writing_is_removed(
    shards: Path, weights: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    # No process has this number.
    name = f".v0.safetensors.{socket.gethostname()}-{2**22 + 1}.partial"
    (output / "a").mkdir(parents=True)
    (output / "a" / name).write_bytes(b"half")
    (output / "a/.mine.partial").write_bytes(b"of another program")
    extract(shards, output, weights)
    assert [file.name for file in output.rglob("*.partial")] == [".mine.partial"]


def test_clips_are_cut_as_the_run_was_trained(
    shards: Path, write_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = write_run(AdaMAE(CONFIG), frame_stride=3)
    arguments = [str(shards), str(tmp_path / "out"), "--model", str(run), "--device", "cpu"]
    extract_features.main(extract_features.parse_arguments(arguments))
    assert json.loads((tmp_path / "out/features.json").read_text())["frame_stride"] == 3
    assert load_file(tmp_path / "out/a/v0.safetensors")["times"][0].tolist() == [0, 9 / 8]


def test_selected_tokens() -> None:
    torch.manual_seed(0)
    encoder = VideoEncoder(CONFIG, has_sampler=True).eval()
    clip = torch.randint(0, 256, (3, 4, 32, 32, 3), dtype=torch.uint8)
    # Only the lower half moves.
    clip[:, :, :16] = clip[:, :1, :16]
    for by in get_args(Selection):
        ids = encoder.select_tokens(clip, 0.25, by)
        assert ids.shape == (3, 8)
        assert (ids.diff(dim=1) > 0).all()
        assert torch.equal(encoder.select_tokens(clip[1:], 0.25, by), ids[1:]), "whatever the batch"
        tokens = encoder.tokenizer(clip, ids) + encoder.encoder.positions[ids]
        pooled = encoder.encode(clip, 0.25, by).pooled
        assert torch.equal(pooled, encoder.encoder(tokens).mean(dim=1))
    moves = encoder.select_tokens(clip, 0.25, "motion") % 16 >= 8
    assert moves.float().mean() > 0.8


@pytest.mark.parametrize("kind", ["safetensors", "webdataset"])
def test_a_flipped_bit_is_told_when_features_are_read(
    shards: Path, weights: Path, tmp_path: Path, kind: str
) -> None:
    output = tmp_path / "out"
    extract(shards, output, weights, "--format", kind, "--part", "1/4")
    file = min(file for file in output.rglob("*") if file.suffix in (".safetensors", ".tar"))
    expected = [video.features for video in read_feature_files(output)]
    content = file.read_bytes()
    num_told = 0
    for index in range(120):
        damaged = bytearray(content)
        damaged[index * (len(content) - 1) // 119] ^= 1 << index % 8
        file.write_bytes(damaged)
        try:
            videos = list(read_feature_files(output))
        except InputError as error:
            assert_is_damage(error, file)
            num_told += 1
            continue
        # A tar is padded with bytes that mean nothing.
        assert kind == "webdataset"
        for video, features in zip(videos, expected, strict=True):
            assert torch.equal(video.features, features)
    assert num_told > 50


def test_a_file_of_features_without_checksums_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({name: torch.zeros(1, 1) for name in NAMES}, file)
    with pytest.raises(InputError, match="it has no 'xxh3'") as error:
        list(read_feature_files(file))
    assert_is_damage(error.value, file)


def assert_is_damage(error: InputError, file: Path) -> None:
    assert f"{file} is damaged" in str(error)
    assert "\n" not in str(error)


def test_damaged_settings_are_one_sentence(shards: Path, weights: Path, tmp_path: Path) -> None:
    extract(shards, tmp_path, weights, "--part", "1/5")
    file = tmp_path / "features.json"
    content = file.read_bytes()
    # The last byte ends the line.
    for position in range(0, len(content) - 1, 7):
        damaged = bytearray(content)
        damaged[position] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"features\.json is damaged"):
            read_settings(tmp_path)
    with pytest.raises(InputError, match=r"features\.json is damaged"):
        extract(shards, tmp_path, weights, "--part", "1/5")


@pytest.mark.parametrize("kind", ["safetensors", "webdataset", "parquet"])
def test_truncated_files_are_made_again(
    shards: Path, weights: Path, tmp_path: Path, kind: str
) -> None:
    options = ["--format", kind]
    output = tmp_path / "out"
    extract(shards, output, weights, *options)
    file = min(file for file in output.rglob("*") if file.suffix in (f".{kind}", ".tar"))
    content = file.read_bytes()
    for length in (len(content) // 2, 0):
        file.write_bytes(content[:length])
        extract(shards, output, weights, *options)
        assert file.read_bytes() == content


def test_features_of_other_weights_or_shards_are_not_mixed(
    shards: Path, videos: Path, weights: Path, tmp_path: Path
) -> None:
    """Weights and shards are known by what they are, wherever they lie."""
    output = tmp_path / "out"
    extract(shards, output, weights, "--part", "1/5")
    weights.rename(tmp_path / "moved.safetensors")
    shards.rename(tmp_path / "moved")
    assert extract(tmp_path / "moved", output, tmp_path / "moved.safetensors") == 0
    pretrained.save(weights, AdaMAE(CONFIG).state_dict(), pretrained.make_metadata(CONFIG))
    with pytest.raises(InputError, match=r"made with other settings \(weights\)"):
        extract(tmp_path / "moved", output, weights)
    with pytest.raises(InputError, match=r"made with other settings \(dataset\)"):
        extract(videos, output, tmp_path / "moved.safetensors")


def test_bad_input_is_one_sentence(shards: Path, weights: Path, tmp_path: Path) -> None:
    extract(shards, tmp_path / "out", weights)
    with pytest.raises(InputError, match=r"made with other settings \(frame_stride, fps, tokens\)"):
        extract(shards, tmp_path / "out", weights, "--tokens", "--fps", "5")
    with pytest.raises(InputError, match="--part: 0/2 is not like 1/4"):
        extract(shards, tmp_path / "out", weights, "--part", "0/2")
    with pytest.raises(InputError, match="--format parquet is for features alone"):
        extract(shards, tmp_path / "out", weights, "--tokens", "--format", "parquet")
    with pytest.raises(InputError, match="nothing does not exist: give a folder"):
        extract(tmp_path / "nothing", tmp_path / "none", weights)
    thinned = write_shards(tmp_path / "thinned", [("v", encode(20))], frame_stride=[4])
    with pytest.raises(InputError, match=r"every 4: give --frame-stride 4 or a multiple, or --fps"):
        extract(thinned, tmp_path / "none", weights)
    assert not (tmp_path / "none").exists()


def test_parquet_files_are_one_table(videos: Path, weights: Path, tmp_path: Path) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    for kind in ("safetensors", "parquet"):
        assert extract(videos, tmp_path / kind, weights, "--stride", "3", "--format", kind) == 0
    rows = dataset.dataset(sorted((tmp_path / "parquet").rglob("*.parquet"))).to_table().to_pylist()
    for file in sorted((tmp_path / "safetensors").rglob("*.safetensors")):
        metadata = read_metadata(file)
        metadata.pop("xxh3")
        columns = {}
        for name in rows[0]:
            columns[name] = [row[name] for row in rows if row["key"] == metadata["key"]]
        frames = zip(columns["first_frame"], columns["last_frame"], strict=True)
        times = zip(columns["start"], columns["end"], strict=True)
        expected = load_file(file)
        assert columns["features"] == expected["features"].tolist()
        assert list(map(list, frames)) == expected["frames"].tolist()
        assert list(map(list, times)) == expected["times"].tolist()
        for name, text in metadata.items():
            assert {str(value) for value in columns[name]} == {text}


def test_nothing_is_written_outside_of_the_output(
    videos: Path, weights: Path, tmp_path: Path
) -> None:
    """A list names videos outside of its own folder: two of one name, and one by its whole path."""
    (videos / "other").mkdir()
    (videos / "class 0/v0.mp4").rename(videos / "other/v1.mp4")
    (tmp_path / "lists").mkdir()
    names = ["../videos/class 1/v1.mp4", "../videos/other/v1.mp4", str(videos / "class 0/v2.mp4")]
    (tmp_path / "lists/list.txt").write_text("\n".join(names))
    before = {file for file in tmp_path.rglob("*") if file.is_file()}
    assert extract(tmp_path / "lists/list.txt", tmp_path / "out", weights) == 0
    written = {file for file in tmp_path.rglob("*") if file.is_file()} - before
    assert {file.parent for file in written} == {tmp_path / "out"}
    files = [file for file in written if file.suffix == ".safetensors"]
    assert {read_metadata(file)["source"] for file in files} == {*names}


def test_segments_are_the_same_from_a_list_and_from_shards(
    videos: Path, weights: Path, tmp_path: Path
) -> None:
    """Segments keep their time in the source; their windows are counted from their own start."""
    # The names of segments do not have all 17 digits of a float.
    rows = [
        "path,start,end,episode,label",
        "class 0/v0.mp4,0.30000000000000004,2,7,a",
        "class 0/v2.mp4,0.375,2.5000000000000004,8,b",
        "class 0/v4.mp4,0,,x,b",
    ]
    (videos / "list.csv").write_text("\n".join(rows))
    columns = ["--columns", "path=path,start=start,end=end,label=label,rest=fields"]
    options = ["--frame-stride", "1", "--workers", "1", *columns]
    make_shards.main([str(videos / "list.csv"), str(tmp_path / "shards"), *options])
    windows = ["--pad", "--stride", "3"]
    with pytest.raises(InputError, match="is shown before it is read"):
        extract(videos / "list.csv", tmp_path / "list", weights, *windows)
    with pytest.raises(InputError, match="--columns is for lists"):
        extract(tmp_path / "shards", tmp_path / "shards features", weights, *windows, *columns)
    assert extract(videos / "list.csv", tmp_path / "list", weights, *windows, *columns) == 0
    assert extract(tmp_path / "shards", tmp_path / "features", weights, *windows) == 0
    assert (tmp_path / "list/class 0/v2.mp4#t=0.375,2.5.safetensors").is_file()
    of_list = read_segments(tmp_path / "list")
    of_shards = read_segments(tmp_path / "features")
    episodes = {segment: metadata["episode"] for segment, (metadata, _) in of_list.items()}
    assert episodes == {"t=0.3,2": "7", "t=0.375,2.5": "8", "": "x"}
    for segment, (metadata, values) in of_list.items():
        shard_metadata, shard_values = of_shards[segment]
        varying = {"key": "", "xxh3": ""}
        assert shard_metadata | varying == metadata | varying
        # 0.3 s is rounded up to the next frame at 8 fps.
        offset = 0.375 if segment else 0
        assert float(metadata["offset"]) == offset
        assert values["times"][0, 0] == offset
        ends = range(0, 2 * 3 * len(values["times"]), 6)
        assert values["frames"].tolist() == [[max(0, end - 6), end] for end in ends]
        for name, value in values.items():
            # Shards are encoded once more.
            tolerance = 0.1 if name == "features" else 0
            torch.testing.assert_close(value, shard_values[name], atol=tolerance, rtol=0)
    metadata, _ = of_list[""]
    assert json.loads(metadata["fields"]) == {"episode": "x"}


def read_segments(folder: Path) -> dict[str, tuple[dict[str, str], dict[str, torch.Tensor]]]:
    """Return the metadata and the arrays of all files, by segment."""
    segments = {}
    for file in folder.rglob("*.safetensors"):
        metadata = read_metadata(file)
        segments[metadata["segment"]] = (metadata, load_file(file))
    return segments


def test_padded_windows_end_at_every_frame_and_see_nothing_later(
    shards: Path, weights: Path, tmp_path: Path
) -> None:
    options = ["--stride", "1", "--part", "1/5"]
    assert extract(shards, tmp_path / "padded", weights, *options, "--pad") == 0
    assert extract(shards, tmp_path / "whole", weights, *options) == 0
    padded = load_file(tmp_path / "padded/a/v0.safetensors")
    whole = load_file(tmp_path / "whole/a/v0.safetensors")
    assert padded["frames"].tolist() == [[max(0, 2 * (t - 3)), 2 * t] for t in range(10)]
    for name, values in whole.items():
        torch.testing.assert_close(padded[name][3:], values)
    scaler = make_scaler(64, 48, FrameSize(32, 32))
    frames = [scaler(frame) for _, frame in Video(encode(20), 20).frames([0, 2])]
    clip = torch.from_numpy(np.stack([frames[0], frames[0], frames[0], frames[1]]))
    pooled = load_encoder(weights).encode(clip[None]).pooled
    torch.testing.assert_close(padded["features"][1:2], pooled)
