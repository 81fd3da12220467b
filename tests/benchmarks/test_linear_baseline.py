"""Hand-made features and ridge regression."""

from pathlib import Path

import numpy as np
import pytest
import torch
from made_videos import encode, write_shards

from adamae.benchmarks.linear_baseline import classify, describe, describe_videos, ridge_predict
from adamae.common.errors import InputError


def test_ridge_regression_is_that_of_the_least_left_out_error() -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    points = torch.randn(90, 100, generator=random) + torch.eye(3, 100)[labels] * 20
    assert (
        ridge_predict(points[:60], labels[:60], points[60:]) == labels[60:]
    ).float().mean() > 0.9
    shuffled = labels[torch.randperm(60, generator=random)]
    assert (ridge_predict(points[:60], shuffled, points[60:]) == labels[60:]).float().mean() < 0.7


def test_features_are_of_color_and_of_change() -> None:
    frames = np.zeros((3, 64, 64, 3), np.uint8)
    frames[1, :8, :8] = 80
    color, difference = describe(frames)
    assert color.nonzero()[0].tolist() == [0, 1, 2]
    assert difference[0] == pytest.approx(np.log(81))
    assert not describe(frames[:1])[1].any()


def test_a_class_without_training_videos_is_one_sentence(tmp_path: Path) -> None:
    videos = [("a", encode(6)), ("b", encode(6, first=3))]
    both, one = (
        write_shards(tmp_path / name, videos[:n], classes=2)
        for name, n in (("both", 2), ("one", 1))
    )
    given, asked = (describe_videos(str(shards))["mean color"] for shards in (one, both))
    assert classify(asked, asked)["linear_top1"] == 1
    with pytest.raises(
        InputError, match="no training video is of 'class 1', but a validation video is"
    ):
        classify(given, asked)
