"""Arrays in the place of videos: what is taken, what a clip reads, and how it is scaled."""

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

T = 12
H = 40
W = 56


def smooth(channels: int, first: int = 0) -> np.ndarray:
    """Make pictures that change slowly over space, time and channels: uint8 [T, H, W, C]."""
    t, y, x, c = np.meshgrid(*map(np.arange, (T, H, W, channels)), indexing="ij")
    return (40 + 2 * x + 1.5 * y + 5 * t + 9 * c + first).clip(0, 255).astype(np.uint8)


def npy_bytes(array: np.ndarray, tmp_path: Path) -> bytes:
    np.save(tmp_path / "array.npy", array)
    return (tmp_path / "array.npy").read_bytes()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make shards of six arrays with five channels, in two classes."""
    folder = tmp_path_factory.mktemp("arrays")
    for kind in ("a", "b"):
        (folder / "in" / kind).mkdir(parents=True)
        for number in range(3):
            np.save(folder / "in" / kind / f"{number}.npy", smooth(5, 10 * number))
    assert make_shards.main([str(folder / "in"), str(folder / "out")]) == 0
    return folder / "out"


def load_first(shards: Path | list[Path], **settings: object) -> tuple[TrainingPlan, torch.Tensor]:
    """Return a plan and the clips of its first batch."""
    config = DataConfig(str(shards), frame_stride=2, num_workers=1, decoder="pyav", **settings)  # type: ignore[arg-type]
    shape = {"num_frames": 4, "image_size": 24, "batch_size": 6}
    with open_loader(ShardDataset.open(config), config, **shape) as (plan, loader):
        return plan, next(loader.batches(0)).clip


def test_a_dataset_of_arrays_is_whole_and_its_clips_are_parts_of_them(shards: Path) -> None:
    assert check_shards.main([str(shards)]) == 0
    dataset = ShardDataset.open(shards)
    assert dataset.channels == 5
    assert list(dataset.info.codecs) == ["uint8x5"]
    assert dataset.info.containers == ["npy"]
    plan, clips = load_first(shards)
    assert clips.shape == (6, 4, 24, 24, 5)
    assert {row.flip for row in plan.batch(0)} == {True, False}
    for clip, row in zip(clips, plan.batch(0), strict=True):
        frames = decode_frames(dataset.read_video(row.sample), row.frames)
        x, y, width, height = row.crop
        shown = frames[:, y : y + height, x : x + width]
        if row.flip:
            shown = shown[:, :, ::-1]
        expected = scale_with_torch(shown.copy(), (24, 24))
        # Pictures are smooth, and no channel is mixed with another.
        assert (expected - clip).abs().max() <= 2
        assert (expected.mean((0, 1, 2)) - clip.double().mean((0, 1, 2))).abs().max() < 0.6


def scale_with_torch(frames: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """Scale frames [T, H, W, C] to height and width `size`, without rounding."""
    pictures = torch.from_numpy(frames).permute(0, 3, 1, 2).double()
    scaled = torch.nn.functional.interpolate(pictures, size, mode="bilinear", antialias=True)
    return scaled.permute(0, 2, 3, 1)


def test_a_clip_reads_its_own_frames_alone_and_notices_changes(
    shards: Path, tmp_path: Path
) -> None:
    dataset = ShardDataset.open(shards)
    cut = dataset.read_clip(0, [3, 9, 9])
    shape = arrays.read_shape(cut.data)
    assert len(cut.data) == shape.start + 2 * shape.frame_bytes
    assert cut.numbers == (0, 1, 1)
    assert cut.num_frames == 2
    whole = decode_frames(dataset.read_video(0), [3, 9])
    assert np.array_equal(arrays.read_array(cut.data, [0, 1], 2), whole)
    data = bytearray(npy_bytes(smooth(2), tmp_path))
    rows = index_gops(bytes(data), T)
    assert len(rows) == T + 1
    data[-1] ^= 1
    is_changed = index_gops(bytes(data), T)["checksum"] != rows["checksum"]
    assert is_changed.tolist() == [False] * T + [True]


@pytest.mark.parametrize("channels", [1, 4, 5, 12])
@pytest.mark.parametrize("size", [(16, 16), (24, 50), (224, 224)])
def test_each_channel_is_scaled_by_itself_and_exactly(channels: int, size: tuple[int, int]) -> None:
    """Even noise, within rounding. At the edge they differ: FFmpeg repeats the pixels there."""
    frames = np.random.default_rng(0).integers(0, 256, (3, 40, 56, channels), np.uint8)
    clip = np.empty((3, *size, channels), np.uint8)
    scale_frames(frames, clip)
    difference = torch.from_numpy(clip) - scale_with_torch(frames, size)
    assert difference[:, 1:-1, 1:-1].abs().max() < 0.75


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((2, 3, 4, 5), np.float32), "it is float32 of shape"),
        (np.zeros((3, 4, 5), np.uint8), r"shape \(3, 4, 5\): videos are uint8 of frames, height"),
        (np.asfortranarray(smooth(2)), "its first axis the fastest"),
        (np.zeros((2, 4, 4, 13), np.uint8), "1 to 12 channels"),
        (np.zeros((0, 4, 4, 3), np.uint8), "at least a frame"),
        (np.array([{"a": 1}], object), "it is object of shape"),
    ],
)
def test_what_is_no_video_is_refused(array: np.ndarray, reason: str, tmp_path: Path) -> None:
    data = npy_bytes(array, tmp_path)
    with pytest.raises(VideoError, match=reason):
        arrays.read_shape(data)


def test_damaged_and_cut_files_are_rejected_with_the_reason(tmp_path: Path) -> None:
    whole = npy_bytes(smooth(4), tmp_path)
    pickled = npy_bytes(np.array([{}], object), tmp_path)
    damaged = {
        "cut": (whole[:-100], "holds 11.989 of its 12 frames"),
        "head": (whole[:20], "no header"),
        "long": (whole[:8] + b"\xff\xff" + whole[10:], "no header"),
        "pickle": (pickled, "object"),
    }
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "whole.npy").write_bytes(whole)
    for name, (data, _) in damaged.items():
        (folder / f"{name}.npy").write_bytes(data)
    assert make_shards.main([str(folder), str(tmp_path / "out"), "--max-rejects", "1"]) == 0
    reasons = {}
    for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines():
        entry = json.loads(line)
        reasons[entry["source"].removesuffix(".npy")] = entry["reason"]
    assert reasons.keys() == damaged.keys()
    for name, (_, expected) in damaged.items():
        assert expected in reasons[name]


def test_arrays_beside_videos_are_none(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "v.mp4").write_bytes(encode(8))
    np.save(folder / "v.npy", np.zeros(512, np.float32))
    assert make_shards.main([str(folder), str(tmp_path / "out"), "--frame-stride", "1"]) == 0
    assert ShardDataset.open(tmp_path / "out").info.num_samples == 1
    assert not (tmp_path / "out/rejected.jsonl").read_text()


def test_mixed_kinds_of_clips_and_changes_of_colors_are_refused(shards: Path) -> None:
    message = "clips of 3 and 5 channels, which no model takes together"
    with pytest.raises(InputError, match=message):
        arrays.count_channels(["h264", "uint8x5"])
    with pytest.raises(InputError, match="changes colors, and these clips have 5 channels"):
        load_first(shards, rand_augment=2)


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
    video = VideoSlice(data, row.frames, T)
    clips = np.empty((1, 2, 16, 16, 5), np.uint8)
    with pytest.raises(VideoError, match="channels"):
        find_source(data).cut_views(video, sample, [row], clips)


def test_shards_of_arrays_are_an_input_too(shards: Path, tmp_path: Path) -> None:
    assert make_shards.main([str(shards), str(tmp_path / "out")]) == 0
    info = ShardDataset.open(tmp_path / "out").info
    assert info.num_samples == 6
    assert info.classes == ["a", "b"]
    assert info.num_rejected == 0
