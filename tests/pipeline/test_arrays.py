"""Arrays in the place of videos: what is taken, what a clip reads, and that it is cut as a video's pictures are."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import open_loader
from made_videos import encode

from adamae.common.errors import InputError
from adamae.pipeline.config import DataConfig
from adamae.pipeline.decoding.sources import decode_frames, find_source, scale_frames
from adamae.pipeline.planning.crops import Crop
from adamae.pipeline.planning.plan import PlanRow, TrainingPlan
from adamae.pipeline.shards import arrays
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError
from adamae.shard_tools import check_shards, make_shards
from adamae.shard_tools.write import index_gops

T, H, W = 12, 40, 56


def smooth(channels: int, first: int = 0) -> np.ndarray:
    """Pictures that change slowly over space, time and channels."""
    t, y, x, c = np.meshgrid(*map(np.arange, (T, H, W, channels)), indexing="ij")
    return (40 + 2 * x + 1.5 * y + 5 * t + 9 * c + first).clip(0, 255).astype(np.uint8)


def npy_bytes(array: np.ndarray, tmp_path: Path) -> bytes:
    np.save(tmp_path / "array.npy", array)
    return (tmp_path / "array.npy").read_bytes()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    for kind in ("a", "b"):
        (folder / "in" / kind).mkdir(parents=True)
        for number in range(3):
            np.save(folder / "in" / kind / f"{number}.npy", smooth(5, 10 * number))
    assert make_shards.main([str(folder / "in"), str(folder / "out")]) == 0
    return folder / "out"


def batches(shards: Path | list[Path], **settings: object) -> tuple[TrainingPlan, torch.Tensor]:
    config = DataConfig(str(shards), frame_stride=2, num_workers=1, decoder="pyav", **settings)  # type: ignore[arg-type]
    shape = {"num_frames": 4, "image_size": 24, "batch_size": 6}
    with open_loader(ShardDataset.open(config), config, **shape) as (plan, loader):
        return plan, next(loader.batches(0)).clip


def test_a_dataset_of_arrays_is_whole_and_its_clips_are_parts_of_them(shards: Path) -> None:
    assert check_shards.main([str(shards)]) == 0
    dataset = ShardDataset.open(shards)
    assert (dataset.channels, list(dataset.info.codecs), dataset.info.containers) == (
        5,
        ["uint8x5"],
        ["npy"],
    )
    plan, clips = batches(shards)
    assert clips.shape == (6, 4, 24, 24, 5)
    assert {row.flip for row in plan.batch(0)} == {True, False}
    for clip, row in zip(clips, plan.batch(0), strict=True):
        frames = decode_frames(dataset.read_video(row.sample), row.frames)
        x, y, width, height = row.crop
        shown = frames[:, y : y + height, x : x + width][:, :, :: -1 if row.flip else 1]
        seen = torch.from_numpy(shown.copy()).permute(3, 0, 1, 2).float()
        expected = torch.nn.functional.interpolate(
            seen, (24, 24), mode="bilinear", antialias=True
        ).movedim(0, 3)
        assert (
            expected - clip.float()
        ).abs().max() <= 2  # smooth pictures; no channel is mixed with another
        assert (expected.mean((0, 1, 2)) - clip.float().mean((0, 1, 2))).abs().max() < 0.6


def test_a_clip_reads_its_own_frames_alone_and_notices_changes(
    shards: Path, tmp_path: Path
) -> None:
    dataset = ShardDataset.open(shards)
    cut = dataset.read_clip(0, [3, 9, 9])
    shape = arrays.read_shape(cut.data)
    assert (len(cut.data), cut.numbers, cut.num_frames) == (
        shape.start + 2 * shape.frame_bytes,
        (0, 1, 1),
        2,
    )
    whole = decode_frames(dataset.read_video(0), [3, 9])
    assert np.array_equal(arrays.read_array(cut.data, [0, 1], 2), whole)
    data = bytearray(npy_bytes(smooth(2), tmp_path))
    rows = index_gops(bytes(data), T)
    assert len(rows) == T + 1
    data[-1] ^= 1
    assert (index_gops(bytes(data), T)["checksum"] != rows["checksum"]).tolist() == [False] * T + [
        True
    ]


@pytest.mark.parametrize("channels", [1, 4, 5, 12])
@pytest.mark.parametrize("size", [(16, 16), (24, 50), (224, 224)])
def test_each_channel_is_scaled_by_itself_and_exactly(channels: int, size: tuple[int, int]) -> None:
    """Even noise, within rounding; where the filter reaches beyond the edge, FFmpeg repeats the pixels there."""
    frames = np.random.default_rng(0).integers(0, 256, (3, 40, 56, channels), np.uint8)
    clip = np.empty((3, *size, channels), np.uint8)
    scale_frames(frames, clip)
    pictures = torch.from_numpy(frames).permute(0, 3, 1, 2).double()
    expected = torch.nn.functional.interpolate(
        pictures, size, mode="bilinear", antialias=True
    ).permute(0, 2, 3, 1)
    assert (torch.from_numpy(clip) - expected)[:, 1:-1, 1:-1].abs().max() < 0.75


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((2, 3, 4, 5), np.float32), "it is float32 of shape"),
        (
            np.zeros((3, 4, 5), np.uint8),
            r"it is uint8 of shape \(3, 4, 5\): videos are uint8 of frames, height",
        ),
        (np.asfortranarray(smooth(2)), "its first axis the fastest"),
        (np.zeros((2, 4, 4, 13), np.uint8), "1 to 12 channels"),
        (np.zeros((0, 4, 4, 3), np.uint8), "at least a frame"),
        (np.array([{"a": 1}], object), "it is object of shape"),
    ],
)
def test_what_is_no_video_is_refused(array: np.ndarray, says: str, tmp_path: Path) -> None:
    data = npy_bytes(array, tmp_path)
    with pytest.raises(VideoError, match=says):
        arrays.read_shape(data)


def test_damaged_and_cut_files_are_rejected_with_the_reason(tmp_path: Path) -> None:
    whole, pickled = (npy_bytes(array, tmp_path) for array in (smooth(4), np.array([{}], object)))
    damaged = {
        "whole": (whole, ""),
        "cut": (whole[:-100], "holds 11.989 of its 12 frames"),
        "head": (whole[:20], "no header"),
        "long": (whole[:8] + b"\xff\xff" + whole[10:], "no header"),
        "pickle": (pickled, "object"),
    }
    folder = tmp_path / "in"
    folder.mkdir()
    for name, (data, _) in damaged.items():
        (folder / f"{name}.npy").write_bytes(data)
    assert make_shards.main([str(folder), str(tmp_path / "out"), "--max-rejects", "1"]) == 0
    said = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    assert {entry["source"][:-4] for entry in said} == damaged.keys() - {"whole"}
    assert all(damaged[entry["source"][:-4]][1] in entry["reason"] for entry in said)


def test_arrays_beside_videos_are_none(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "v.mp4").write_bytes(encode(8))
    np.save(folder / "v.npy", np.zeros(512, np.float32))
    assert make_shards.main([str(folder), str(tmp_path / "out"), "--frame-stride", "1"]) == 0
    assert ShardDataset.open(tmp_path / "out").info.num_samples == 1
    assert not (tmp_path / "out/rejected.jsonl").read_text()


def test_clips_of_several_kinds_and_colours_of_none_are_refused(shards: Path) -> None:
    with pytest.raises(
        InputError, match="clips of 3 and 5 channels, which no model takes together"
    ):
        arrays.count_channels(["h264", "uint8x5"])
    with pytest.raises(InputError, match="changes colors, and these clips have 5 channels"):
        batches(shards, rand_augment=2)


@pytest.mark.parametrize(
    ("codec", "is_array", "width"),
    [("uint8x4", True, W), ("h264", True, W), ("uint8x5", True, W + 2), ("uint8x5", False, W)],
)
def test_a_table_that_is_wrong_about_an_array_costs_the_video(
    codec: str, is_array: bool, width: int, tmp_path: Path
) -> None:
    data = npy_bytes(smooth(5), tmp_path) if is_array else encode(T)
    sample = Sample("k", "npy", codec, T, 25.0, 1, width, H, None, "s", "0" * 64, 0, len(data))
    row = PlanRow(0, 0, (0, 1), Crop(0, 0, 32, 32), False)
    with pytest.raises(VideoError, match="channels"):
        find_source(data).cut_views(
            VideoSlice(data, row.frames, T), sample, [row], np.empty((1, 2, 16, 16, 5), np.uint8)
        )


def test_shards_of_arrays_are_an_input_too(shards: Path, tmp_path: Path) -> None:
    assert make_shards.main([str(shards), str(tmp_path / "out")]) == 0
    again = ShardDataset.open(tmp_path / "out")
    assert (again.info.num_samples, again.info.classes, again.info.num_rejected) == (
        6,
        ["a", "b"],
        0,
    )
