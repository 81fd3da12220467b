import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from made_videos import encode, write_shards
from safetensors import safe_open
from safetensors.torch import load_file

from adamae import extract_features
from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.encoder import SELECTIONS, VideoEncoder
from adamae.model.weights import pretrained
from adamae.model.weights.load_model import load_encoder
from adamae.pipeline.decoding.video import Video
from adamae.pipeline.planning.crops import FrameSize
from adamae.shard_tools import make_shards
from adamae.training.held_out import read_features
from adamae.training.video_windows import make_scaler

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
    pretrained.save(
        tmp_path / "model.safetensors",
        AdaMAE(CONFIG).state_dict(),
        pretrained.make_metadata(CONFIG),
    )
    return tmp_path / "model.safetensors"


def extract(place: Path, output: Path, weights: Path, *more: str) -> int:
    given = [
        str(place),
        str(output),
        "--model",
        str(weights),
        "--batch-size",
        "3",
        "--device",
        "cpu",
    ]
    more = more if {"--fps", "--frame-stride"} & {*more} else ("--frame-stride", "2", *more)
    return extract_features.main(extract_features.parse_arguments([*given, *more]))


def read_metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def test_windows_of_files_and_of_shards_are_the_same(videos, shards, weights, tmp_path) -> None:
    assert extract(videos, tmp_path / "of files", weights, "--stride", "3", "--tokens") == 0
    assert extract(shards, tmp_path / "of shards", weights, "--stride", "3", "--tokens") == 0
    for i in range(5):
        file = tmp_path / f"of files/class {i % 2}/v{i}.mp4.safetensors"
        first, second = load_file(file), load_file(tmp_path / f"of shards/a/v{i}.safetensors")
        sampled = (20 + i + 1) // 2
        assert first["features"].shape == ((sampled - 4) // 3 + 1, 48)
        assert first["tokens"].shape == (len(first["features"]), 2, 4, 4, 48)
        for name in ("features", "tokens", "times"):
            torch.testing.assert_close(first[name], second[name])
        starts = 2 * 3 * torch.arange(len(first["times"])) / 8
        torch.testing.assert_close(
            first["times"], torch.stack((starts, starts + 6 / 8), 1).double()
        )
        torch.testing.assert_close(
            first["tokens"].float().mean((1, 2, 3)), first["features"], atol=2e-3, rtol=0
        )
        about = read_metadata(file)
        assert (about["key"], about["label"], about["incomplete"]) == (
            f"class {i % 2}/v{i}.mp4",
            f"class {i % 2}",
            "",
        )


def test_of_videos_with_fewer_frames_a_second_some_are_repeated(
    videos, shards, weights, tmp_path, capsys
) -> None:
    assert extract(videos, tmp_path / "of files", weights, "--fps", "16", "--stride", "2") == 0
    assert "v0.mp4 has 8 frames a second: some are repeated for --fps 16" in capsys.readouterr().err
    assert extract(shards, tmp_path / "of shards", weights, "--fps", "16", "--stride", "2") == 0
    for i in range(5):
        first = load_file(tmp_path / f"of files/class {i % 2}/v{i}.mp4.safetensors")["features"]
        assert len(first) == (2 * (20 + i) - 4) // 2 + 1
        torch.testing.assert_close(
            load_file(tmp_path / f"of shards/a/v{i}.safetensors")["features"], first
        )


def test_resuming_makes_only_what_is_missing_and_all_splits_are_taken(
    shards, weights, tmp_path
) -> None:
    assert extract(shards, tmp_path / "whole", weights) == 0
    assert extract(shards, tmp_path / "parts", weights, "--part", "2/2") == 0
    first = {file: file.stat().st_mtime_ns for file in (tmp_path / "parts").rglob("*.safetensors")}
    assert len(first) == 2
    assert extract(shards, tmp_path / "parts", weights) == 0
    assert all(file.stat().st_mtime_ns == time for file, time in first.items())
    (tmp_path / "mine").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "mine" / split).symlink_to(shards)
    assert extract(tmp_path / "mine", tmp_path / "splits", weights) == 0
    for file in (tmp_path / "whole").rglob("*.safetensors"):
        for folder in ("parts", "splits/train", "splits/validation"):
            torch.testing.assert_close(
                load_file(file), load_file(tmp_path / folder / "a" / file.name)
            )


def test_what_was_read_of_a_broken_video_is_kept(tmp_path, weights, capsys) -> None:
    whole = encode(40, options={"g": "8"}, pattern=True)
    (tmp_path / "in").mkdir()
    damaged = bytearray(whole)
    middle = len(whole) // 2
    damaged[middle : middle + 400] = bytes(400)
    (tmp_path / "in/damaged.mp4").write_bytes(damaged)
    (tmp_path / "in/empty.mp4").touch()
    (tmp_path / "in/short.mp4").write_bytes(encode(3))
    assert extract(tmp_path / "in", tmp_path / "out", weights) == 1
    shown = capsys.readouterr()
    assert "wrote features of 1 videos" in shown.out
    assert "empty.mp4 is incomplete: the file is empty" in shown.err
    kept = tmp_path / "out/damaged.mp4.safetensors"
    assert 0 < len(load_file(kept)["features"]) < 5
    assert read_metadata(kept)["incomplete"]
    assert load_file(tmp_path / "out/short.mp4.safetensors")["times"].tolist() == [[0, 0.25]]


def test_arrays(tmp_path, weights) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/clip.npy", np.zeros((9, 40, 50, 3), np.uint8))
    extract(tmp_path / "in", tmp_path / "out", weights, "--stride", "1")
    file = tmp_path / "out/clip.npy.safetensors"
    loaded = load_file(file)
    assert loaded["features"].shape == (2, 48)
    assert loaded["times"].tolist() == [[0, 0.24], [0.08, 0.32]]
    assert read_metadata(file)["key"] == "clip.npy"


def read_tars(folder: Path) -> dict[str, dict]:
    """Read all tars with webdataset; return the samples by the keys of their videos."""
    tars = [str(tar) for tar in sorted(folder.glob("*.tar"))]
    samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
    by_key = {sample["json"]["key"]: sample for sample in samples}
    assert len(by_key) == len(samples), "no video twice"
    return by_key


def test_webdataset_reads_tars_of_many_videos(
    videos: Path, weights: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("adamae.training.feature_files.MAX_VIDEOS", 2)
    assert extract(videos, tmp_path / "files", weights, "--stride", "3", "--tokens") == 0
    assert (
        extract(
            videos,
            tmp_path / "tars",
            weights,
            "--stride",
            "3",
            "--tokens",
            "--format",
            "webdataset",
        )
        == 0
    )
    tars = [f"features-1-of-1-{number:06}.tar" for number in range(3)]
    assert sorted(file.name for file in (tmp_path / "tars").iterdir()) == [*tars, "features.json"]
    assert json.loads((tmp_path / "tars/features.json").read_text())["format"] == "webdataset"
    samples = read_tars(tmp_path / "tars")
    files = sorted((tmp_path / "files").rglob("*.safetensors"))
    assert len(samples) == len(files) == 5
    for file in files:
        about = read_metadata(file)
        sample = samples[about["key"]]
        for name, values in load_file(file).items():
            torch.testing.assert_close(torch.from_numpy(sample[f"{name}.npy"]), values)
        assert {name: str(sample["json"][name]) for name in about} == about
    of_files, of_tars = (read_features(tmp_path / name) for name in ("files", "tars"))
    order = [[video["key"] for video in about] for about, _ in (of_files, of_tars)]
    assert order[0] == order[1]
    torch.testing.assert_close(of_files[1], of_tars[1])


def test_tars_of_a_killed_run_are_whole_and_the_rest_is_made(
    videos: Path, weights: Path, tmp_path: Path, monkeypatch
) -> None:
    """Killed while it writes the fourth video, whose tar has the third; then run in two parts."""
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
    given = [
        str(videos),
        str(output),
        "--model",
        str(weights),
        "--device",
        "cpu",
        "--format",
        "webdataset",
    ]
    command = [sys.executable, "-c", killed, *given, "--frame-stride", "2"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 9
    left = sorted(file.name for file in output.iterdir())
    assert left[0].startswith(".features-1-of-1-000001.tar.")
    assert left[1:] == ["features-1-of-1-000000.tar", "features.json"]
    first = (output / "features-1-of-1-000000.tar").read_bytes()
    assert len(read_tars(output)) == 2
    assert extract(videos, output, weights, "--format", "webdataset") == 0
    assert (output / "features-1-of-1-000000.tar").read_bytes() == first
    assert len(read_tars(output)) == 5
    assert len(list(output.iterdir())) == 4, "nothing is left of the killed run"
    for part in ("1/2", "2/2"):
        assert (
            extract(videos, tmp_path / "parts", weights, "--format", "webdataset", "--part", part)
            == 0
        )
    assert len(read_tars(tmp_path / "parts")) == 5
    assert extract(videos, tmp_path / "parts", weights, "--format", "webdataset") == 0
    assert len(read_tars(tmp_path / "parts")) == 5, "whatever part has made them"


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
    encoder = VideoEncoder(CONFIG, has_sampler=True)
    clip = torch.randint(0, 256, (3, 4, 32, 32, 3), dtype=torch.uint8)
    clip[:, :, :16] = clip[:, :1, :16]  # only the lower half moves
    for by in SELECTIONS:
        ids = encoder.select_tokens(clip, 0.25, by)
        assert ids.shape == (3, 8)
        assert (ids.diff(dim=1) > 0).all()
        assert torch.equal(encoder.select_tokens(clip[1:], 0.25, by), ids[1:]), "whatever the batch"
        tokens = encoder.tokenizer(clip, ids) + encoder.encoder.positions[ids]
        assert torch.equal(
            encoder.encode(clip, 0.25, by).pooled, encoder.encoder(tokens).mean(dim=1)
        )
    moves = encoder.select_tokens(clip, 0.25, "motion") % 16 >= 8
    assert moves.float().mean() > 0.8


def test_a_fraction_of_the_tokens(shards: Path, weights: Path, tmp_path: Path) -> None:
    assert (
        extract(
            shards, tmp_path / "some", weights, "--keep", "0.25", "--stride", "1", "--part", "1/5"
        )
        == 0
    )
    assert extract(shards, tmp_path / "all", weights, "--stride", "1", "--part", "1/5") == 0
    some, whole = (
        load_file(tmp_path / name / "a/v0.safetensors")["features"] for name in ("some", "all")
    )
    assert some.shape == whole.shape
    assert not torch.equal(some, whole)
    config = replace(CONFIG, masking="random")
    pretrained.save(
        tmp_path / "r.safetensors", AdaMAE(config).state_dict(), pretrained.make_metadata(config)
    )
    with pytest.raises(InputError, match="no token sampler to select tokens by"):
        extract(shards, tmp_path / "none", tmp_path / "r.safetensors", "--keep", "0.25")
    with pytest.raises(InputError, match=r"keep is 0\.01, 0 of 32 tokens"):
        extract(shards, tmp_path / "none", weights, "--keep", "0.01")
    with pytest.raises(InputError, match="--keep encodes a fraction: leave out one"):
        extract(shards, tmp_path / "none", weights, "--keep", "0.5", "--tokens")


def test_bad_input_is_one_sentence(shards: Path, weights: Path, tmp_path: Path) -> None:
    extract(shards, tmp_path / "out", weights)
    with pytest.raises(InputError, match="made with another frame_stride, fps, tokens"):
        extract(shards, tmp_path / "out", weights, "--tokens", "--fps", "5")
    with pytest.raises(InputError, match="--part: 0/2 is not like 1/4"):
        extract(shards, tmp_path / "out", weights, "--part", "0/2")
    with pytest.raises(InputError, match="--format parquet is for features alone"):
        extract(shards, tmp_path / "out", weights, "--tokens", "--format", "parquet")
    with pytest.raises(InputError, match="nothing does not exist: give a folder"):
        extract(tmp_path / "nothing", tmp_path / "none", weights)
    thinned = write_shards(tmp_path / "thinned", [("v", encode(20))], frame_stride=[4])
    with pytest.raises(InputError, match=r"stores one frame of every 4: give a multiple of 4"):
        extract(thinned, tmp_path / "none", weights)
    assert not (tmp_path / "none").exists()


def test_parquet_files_are_one_table(videos: Path, weights: Path, tmp_path: Path) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    for kind in ("safetensors", "parquet"):
        assert extract(videos, tmp_path / kind, weights, "--stride", "3", "--format", kind) == 0
    rows = dataset.dataset(sorted((tmp_path / "parquet").rglob("*.parquet"))).to_table().to_pylist()
    for file in sorted((tmp_path / "safetensors").rglob("*.safetensors")):
        expected, about = load_file(file), read_metadata(file)
        found = [row for row in rows if row["key"] == about["key"]]
        assert [row["features"] for row in found] == expected["features"].tolist()
        assert [[row["start"], row["end"]] for row in found] == expected["times"].tolist()
        assert [[row["first_frame"], row["last_frame"]] for row in found] == expected[
            "frames"
        ].tolist()
        assert all(str(row[name]) == text for row in found for name, text in about.items())


def test_nothing_is_written_outside_of_the_output(
    videos: Path, weights: Path, tmp_path: Path
) -> None:
    """Also of videos that a list names outside of its own folder: two of one name, and one by its
    whole path.
    """
    (videos / "other").mkdir()
    (videos / "class 0/v0.mp4").rename(videos / "other/v1.mp4")
    (tmp_path / "lists").mkdir()
    names = ["../videos/class 1/v1.mp4", "../videos/other/v1.mp4", str(videos / "class 0/v2.mp4")]
    (tmp_path / "lists/list.txt").write_text("\n".join(names))
    before = {file for file in tmp_path.rglob("*") if file.is_file()}
    assert extract(tmp_path / "lists/list.txt", tmp_path / "out", weights) == 0
    written = {file for file in tmp_path.rglob("*") if file.is_file()} - before
    assert {file.parent for file in written} == {tmp_path / "out"}
    found = {read_metadata(file)["source"] for file in written if file.suffix == ".safetensors"}
    assert found == {*names}


def test_segments_are_the_same_from_a_list_and_from_shards(
    videos: Path, weights: Path, tmp_path: Path
) -> None:
    """Each with its place in the source, whatever the 17 digits of a float; windows of a stride
    from its own start.
    """
    rows = [
        "v0.mp4,0.30000000000000004,2,7,a",
        "v2.mp4,0.375,2.5000000000000004,8,b",
        "v4.mp4,0,,x,b",
    ]
    (videos / "list.csv").write_text(
        "\n".join(["path,start,end,episode,label", *(f"class 0/{row}" for row in rows)])
    )
    make_shards.main(
        [
            str(videos / "list.csv"),
            str(tmp_path / "shards"),
            "--frame-stride",
            "1",
            "--workers",
            "1",
        ]
    )
    for place in (videos / "list.csv", tmp_path / "shards"):
        assert extract(place, tmp_path / place.stem, weights, "--pad", "--stride", "3") == 0
    found = {}
    for folder in ("list", "shards"):
        files = (tmp_path / folder).rglob("*.safetensors")
        found[folder] = {
            read_metadata(file)["segment"]: (read_metadata(file), load_file(file)) for file in files
        }
    assert (tmp_path / "list/class 0/v2.mp4#t=0.375,2.5.safetensors").is_file()
    assert {segment: about["episode"] for segment, (about, _) in found["list"].items()} == {
        "t=0.3,2": "7",
        "t=0.375,2.5": "8",
        "": "x",
    }
    for segment, (about, values) in found["list"].items():
        of_shards, others = found["shards"][segment]
        assert {**of_shards, "key": ""} == {**about, "key": ""}
        assert float(about["offset"]) == values["times"][0, 0] == (0.375 if segment else 0)
        assert values["frames"].tolist() == [
            [max(0, t - 6), t] for t in range(0, 2 * len(others["times"]) * 3, 6)
        ]
        for name, value in values.items():
            torch.testing.assert_close(
                value, others[name], atol=0.1 if name == "features" else 0, rtol=0
            )
    assert json.loads(found["list"][""][0]["fields"]) == {"episode": "x"}


def test_padded_windows_end_at_every_frame_and_see_nothing_later(
    shards: Path, weights: Path, tmp_path: Path
) -> None:
    assert (
        extract(shards, tmp_path / "padded", weights, "--pad", "--stride", "1", "--part", "1/5")
        == 0
    )
    assert extract(shards, tmp_path / "whole", weights, "--stride", "1", "--part", "1/5") == 0
    padded, whole = (
        load_file(tmp_path / name / "a/v0.safetensors") for name in ("padded", "whole")
    )
    assert padded["frames"].tolist() == [[max(0, 2 * (t - 3)), 2 * t] for t in range(10)]
    for name, values in whole.items():
        torch.testing.assert_close(padded[name][3:], values)
    scaler = make_scaler(64, 48, FrameSize(32, 32))
    frames = [scaler(frame) for _, frame in Video(encode(20), 20).frames([0, 2])]
    clip = torch.from_numpy(np.stack([frames[0], frames[0], frames[0], frames[1]]))
    torch.testing.assert_close(
        padded["features"][1:2], load_encoder(weights).encode(clip[None]).pooled
    )
