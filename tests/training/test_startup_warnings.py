"""Warnings before a run begins."""

from dataclasses import replace

import pytest
from made_videos import encode, write_shards

from pipeline.reading.reader import Reader
from pipeline.shards.dataset import ShardDataset
from training.config import TrainConfig, parse
from training.startup_warnings import startup_warnings


@pytest.fixture
def shards(tmp_path):
    videos = [(f"v{length}", encode(length)) for length in (3, 6, 20, 30)]
    return write_shards(tmp_path / "shards", videos, classes=2)


@pytest.fixture
def config(shards) -> TrainConfig:
    return parse([f"data.shards={shards}", "model.num_frames=8", "data.frame_stride=2"])


def test_videos_shorter_than_a_clip_are_counted(config, shards):
    dataset = ShardDataset.open(shards)
    (said,) = startup_warnings(config, dataset)
    assert said.startswith("WARNING: 2 of 4 videos are shorter than a clip (the shortest has 3 of 15 frames)")
    segments = replace(config, data=replace(config.data, sampling="segments"))
    assert "of 8 frames): frames are repeated" in startup_warnings(segments, dataset)[0]
    assert startup_warnings(replace(config, model=replace(config.model, num_frames=2)), dataset) == []


def test_videos_of_fewer_frames_a_second_are_counted(config, shards):
    dataset = ShardDataset.open(shards)  # of 8 a second

    def warn(fps: float) -> list[str]:
        return startup_warnings(replace(config, data=replace(config.data, frame_stride=None, fps=fps)), dataset)

    slow, short = warn(12.0)
    assert slow.startswith("WARNING: 4 of 4 videos have fewer than 12 frames per second (the slowest has 8)")
    assert short.startswith("WARNING: 1 of 4 videos are shorter than a clip (the shortest has 3 of 6 frames)")
    (short,) = warn(8.05)  # no frame is repeated
    assert short.endswith("raise data.fps or lower model.num_frames")
    assert "3 of 15 frames" in warn(4.0)[0]


def test_validation_on_what_is_learnt_from_is_counted(shards, tmp_path):
    config = parse([f"data.shards={shards}", "task=finetune", "model.num_frames=2", "data.frame_stride=1",
                    f"evaluation.shards={shards}"])  # fmt: skip
    dataset = ShardDataset.open(shards)
    assert startup_warnings(config, dataset)[0].startswith(
        "WARNING: 4 of 4 videos of evaluation.shards are also trained on"
    )
    same = Reader(dataset).read([sample.key for sample in dataset.samples].index("v20"))
    other = write_shards(tmp_path / "other", [("w", same), ("x", encode(20, first=7))], classes=2)
    apart = replace(config, evaluation=replace(config.evaluation, shards=str(other)))
    assert "1 of 2 videos" in startup_warnings(apart, dataset)[0]  # the same bytes under another name


def test_classes_of_none_or_one_video_to_learn_from_are_named(shards, tmp_path):
    few = ShardDataset.open(write_shards(tmp_path / "few", [("x", encode(20, first=7))], classes=2))
    config = parse([f"data.shards={few.folder}", "task=finetune", "model.num_frames=2", "data.frame_stride=1",
                    f"evaluation.shards={shards}"])  # fmt: skip
    none, one = startup_warnings(config, few)
    assert "1 classes of evaluation.shards ('class 1') have no video to learn from" in none
    assert "1 classes of evaluation.shards ('class 0') have one video to learn from" in one
    assert startup_warnings(replace(config, task="pretrain"), few) == []
